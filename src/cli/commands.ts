import { auth } from "./auth.ts";
import { cancelTemplate, pull, watchTemplate } from "./build.ts";
import { BUILD_COMMAND } from "./build-command.ts";
import { type Argument, type Command, type Flag, OUTPUT_FLAG } from "./command.ts";
import { printCompletion, SHELLS } from "./completion-scripts.ts";
import type { ServerProgram } from "./program.ts";
import { connect, fork, info, list, pause, remove, resume, setSandboxTimeout, start } from "./sandboxes.ts";
import { snapshotCreate, snapshotDelete, snapshotList } from "./snapshots.ts";
import { templateDelete, templateList } from "./templates.ts";

const SANDBOXES = "Sandboxes:";
const INSIDE = "Inside a sandbox:";
const TEMPLATES = "Templates and snapshots:";
const CLIENT = "This command line:";

const sandbox = (complete: "sandbox" | "running-sandbox" | "paused-sandbox"): Argument => ({
  name: "sandbox-id",
  help: "id of the sandbox, as `aenv list` shows it",
  complete,
});

const DETACH: Flag = { name: "detach", short: "d", help: "do not wait; print what was started" };

const DETACH_KEYS: Flag = {
  name: "detach-keys",
  value: "KEYS",
  default: "ctrl-],ctrl-]",
  help: "keys that leave the shell running, e.g. ctrl-p,ctrl-q; none: all keys go to the shell",
};

const USER: Flag = {
  name: "user",
  short: "u",
  value: "USER",
  help: "account whose home relative paths start from and who owns new files (one file only)",
};

const JOBS: Flag = { name: "jobs", short: "j", value: "N", default: "4", help: "files at a time (1 to 32)" };

const PRESERVE: Flag = {
  name: "preserve",
  short: "p",
  help: "keep modes, times, symbolic and hard links (needs tar here and in the sandbox)",
};

const NO_PROGRESS: Flag = { name: "no-progress", help: "no progress bar" };

/** All commands: what is parsed, shown in help and completed by shells. */
export const COMMANDS: readonly Command[] = [
  {
    name: "auth",
    group: CLIENT,
    summary: "Store the server's URL and API key",
    details:
      "Asks for both and writes them to ~/.config/aenv/credentials (below $XDG_CONFIG_HOME when that is set), mode 0600. The key is never taken from the command line. The server is asked afterwards: a warning says when it refuses the key or does not answer. E2B_API_URL and E2B_API_KEY of the environment, when both are set, win over the file; E2B_API_URL alone is ignored, with a warning.",
    arguments: [],
    flags: [],
    examples: ["aenv auth", "printf '%s\\n%s\\n' URL \"$(cat KEYFILE)\" | aenv auth"],
    run: auth,
  },
  {
    name: "pull",
    group: TEMPLATES,
    summary: "Make a template from an OCI image",
    details:
      "Ctrl-C and --timeout end only the watching: the build is the server's and goes on. `aenv template cancel` ends it.",
    arguments: [{ name: "image", help: "image reference, e.g. debian:12 or host:5000/repo@sha256:..." }],
    flags: [
      { name: "name", value: "NAME", help: "template name (default: last part of the image's name)" },
      { name: "cpu", hiddenAliases: ["cpu-count"], value: "N", help: "virtual CPUs" },
      { name: "memory", hiddenAliases: ["memory-mb", "mem"], value: "MIB", help: "memory in MiB" },
      {
        name: "start-cmd",
        value: "CMD",
        help: "command that runs in the template, kept running in the snapshot",
      },
      {
        name: "ready-cmd",
        value: "CMD",
        help: "command polled until it succeeds before the snapshot is taken; without it or --probe a start command gets 20 s",
      },
      { name: "probe", value: "PORT", help: "ready when something listens on this port (needs bash there)" },
      DETACH,
      { name: "timeout", value: "SECS", help: "stop waiting after this time; the build goes on" },
    ],
    examples: [
      "aenv pull debian:12",
      "aenv pull ghcr.io/org/app:1 --name app --start-cmd ./serve --probe 8080",
    ],
    run: pull,
  },
  BUILD_COMMAND,
  {
    name: "start",
    group: SANDBOXES,
    summary: "Start a sandbox and open a shell in it",
    arguments: [
      { name: "target", help: "template name or id, or snapshot name or id", complete: "startable" },
    ],
    details:
      "When its time to live is over a sandbox is paused and kept, memory and all: `aenv resume` and `aenv connect` bring it back, `aenv delete` removes it. With --cold the target is an image, and the sandbox boots from it instead of resuming a template's memory.",
    flags: [
      { name: "timeout", value: "SECS", default: "300", help: "time to live" },
      DETACH,
      { name: "env", short: "e", value: "NAME=VALUE", repeat: true, help: "variable of all its commands" },
      { name: "metadata", value: "KEY=VALUE", repeat: true, help: "note that is listed with it" },
      { name: "cold", help: "the target is an OCI image to boot from" },
      { name: "cpu", hiddenAliases: ["cpu-count"], value: "N", help: "virtual CPUs (with --cold)" },
      {
        name: "memory",
        hiddenAliases: ["memory-mb", "mem"],
        value: "MIB",
        help: "memory in MiB (with --cold)",
      },
      {
        name: "disk-size-mb",
        hiddenAliases: ["disk-mb"],
        value: "N",
        help: "disk in MiB, a multiple of 1024 (with --cold)",
      },
      {
        name: "volume",
        value: "PATH=VOLUME",
        repeat: true,
        help: "for servers with volumes, which agentenv is not: it refuses them (its way: attachedDrives of a cold create, or aenv upload)",
      },
      DETACH_KEYS,
      { name: "secure", help: "accepted for compatibility: sandboxes are always secured" },
    ],
    examples: [
      "aenv start debian",
      "id=$(aenv start debian -d) && aenv exec $id uname -a",
      "aenv start --cold docker.io/library/python:3.12-slim --cpu 2 --memory 1024",
    ],
    run: start,
  },
  {
    name: "exec",
    group: INSIDE,
    summary: "Run a command in a sandbox",
    details:
      "Standard output and error stay apart, the exit status is the command's own. Options come before the sandbox's id; what follows the id is the command, put -- before one that begins with a dash. Standard input is passed on when it is a pipe or a file; programs that a person types into need -it. Ctrl-C ends the command in the sandbox. After --timeout the command is killed and the status is 124.",
    arguments: [
      sandbox("running-sandbox"),
      { name: "command", help: "program and its arguments, taken as they are", rest: true },
    ],
    flags: [
      { name: "interactive", short: "i", help: "pass standard input on, also from a terminal" },
      { name: "no-stdin", short: "n", help: "standard input is empty", conflicts: ["interactive", "tty"] },
      { name: "tty", short: "t", help: "run it on a terminal of its own, attached to this one" },
      { name: "env", short: "e", value: "NAME=VALUE", repeat: true, help: "variable; NAME alone: ours" },
      { name: "user", short: "u", value: "USER", help: "account to run as (default: the template's)" },
      {
        name: "workdir",
        short: "w",
        hiddenAliases: ["cwd"],
        value: "DIR",
        help: "working directory",
      },
      { name: "timeout", value: "SECS", help: "kill the command after this time" },
      DETACH_KEYS,
    ],
    examples: [
      "aenv exec ID uname -a",
      "aenv exec ID -- sh -c 'echo hello; exit 3'",
      "aenv exec -e NAME=value -w /srv -u user ID env",
      "tar -cz src | aenv exec ID tar -xz -C /srv",
      "aenv exec -it ID python3",
    ],
    run: async (invocation) => (await import("./exec.ts")).exec(invocation),
  },
  {
    name: "connect",
    group: INSIDE,
    aliases: ["cn"],
    summary: "Open a shell in a sandbox, resuming it when paused",
    details:
      "The sandbox then has at least 300 s to live, and is kept alive while keys are typed. All keys go to the shell; end it to leave. The detach keys leave it running: come back to it with --pid. The status is the shell's own; 130 when the sandbox was paused, deleted or lost.",
    arguments: [sandbox("sandbox")],
    flags: [
      { name: "pid", value: "PID", help: "attach to a detached shell instead of starting one" },
      DETACH_KEYS,
    ],
    examples: ["aenv connect ID", "aenv cn ID --pid 412"],
    run: connect,
  },
  {
    name: "upload",
    aliases: ["up"],
    group: INSIDE,
    summary: "Copy a file or directory into a sandbox",
    details:
      "A remote path that ends in / (or is a directory, for a directory) takes the local name. A file is there whole or not at all: what is interrupted leaves nothing under its final name. Without --preserve symbolic links are refused and only contents are kept.",
    arguments: [
      sandbox("running-sandbox"),
      { name: "local-path", help: "file or directory here; - is standard input", complete: "path" },
      { name: "remote-path", help: "path in the sandbox" },
    ],
    flags: [USER, JOBS, PRESERVE, NO_PROGRESS],
    examples: [
      "aenv upload ID data.csv /srv/",
      "aenv upload ID notes.txt notes.txt --user user",
      "aenv upload -j 8 ID src /srv/app",
      "aenv upload -p ID src /srv/app",
      "sort words | aenv upload ID - /srv/words",
    ],
    run: async (invocation) => (await import("./upload.ts")).upload(invocation),
  },
  {
    name: "download",
    aliases: ["down"],
    group: INSIDE,
    summary: "Copy a file or directory out of a sandbox",
    details:
      "An existing local directory, or a path that ends in / (which is made when only its last part is missing), takes the remote name. Files that are there are kept unless --force is given; each file appears whole or not at all.",
    arguments: [
      sandbox("running-sandbox"),
      { name: "remote-path", help: "path in the sandbox" },
      {
        name: "local-path",
        help: "where to (default: this directory); - is standard output, for a file",
        optional: true,
        complete: "path",
      },
    ],
    flags: [
      { ...USER, help: "account whose home relative paths start from (one file only)" },
      { name: "force", short: "f", help: "replace files that are there" },
      JOBS,
      PRESERVE,
      NO_PROGRESS,
    ],
    examples: [
      "aenv download ID /srv/result.csv",
      "aenv download ID /srv/app out/ --force",
      "aenv download -p ID /srv/app",
      "aenv download ID /srv/result.json - | jq .",
    ],
    run: async (invocation) => (await import("./download.ts")).download(invocation),
  },
  {
    name: "logs",
    group: SANDBOXES,
    summary: "Show what happened to a sandbox and what its console printed",
    arguments: [sandbox("sandbox")],
    flags: [
      { name: "follow", short: "f", help: "go on until Ctrl-C or the sandbox is gone" },
      { name: "tail", short: "n", value: "N", help: "only the last N lines (1 to 1000)" },
      {
        name: "level",
        value: "LEVEL",
        choices: ["debug", "info", "warn", "error"],
        help: "only lines of this importance or more",
      },
      { ...OUTPUT_FLAG, help: "table for lines (default), or json for an object per line" },
    ],
    examples: ["aenv logs ID", "aenv logs -f --level warn ID"],
    run: async (invocation) => (await import("./telemetry.ts")).logs(invocation),
  },
  {
    name: "metrics",
    group: SANDBOXES,
    summary: "Show a sandbox's use of CPU, memory and disk over time",
    arguments: [sandbox("sandbox")],
    flags: [
      { name: "last", value: "SECS", default: "60", help: "how far back" },
      { name: "follow", short: "f", help: "go on until Ctrl-C or the sandbox is gone" },
      OUTPUT_FLAG,
    ],
    examples: ["aenv metrics ID", "aenv metrics ID --last 600 --output json | jq '.[-1].memUsed'"],
    run: async (invocation) => (await import("./telemetry.ts")).metrics(invocation),
  },
  {
    name: "top",
    group: SANDBOXES,
    summary: "Watch what all running sandboxes use",
    details: "Redrawn until q or Ctrl-C on a terminal; printed once elsewhere.",
    arguments: [],
    flags: [
      { name: "interval", value: "SECS", default: "2", help: "time between two looks (1 to 3600)" },
      {
        name: "sort",
        value: "COLUMN",
        choices: ["cpu", "memory", "disk", "started"],
        default: "cpu",
        help: "what comes first",
      },
      { name: "once", help: "print once" },
      OUTPUT_FLAG,
    ],
    examples: ["aenv top", "aenv top --once --sort memory"],
    run: async (invocation) => (await import("./telemetry.ts")).top(invocation),
  },
  {
    name: "info",
    aliases: ["sandbox info"],
    group: SANDBOXES,
    summary: "Show all there is to know about a sandbox",
    arguments: [sandbox("sandbox")],
    flags: [OUTPUT_FLAG],
    examples: ["aenv info ID", "aenv info ID --output json | jq -r .endAt"],
    run: info,
  },
  {
    name: "network show",
    group: SANDBOXES,
    summary: "Show what a running sandbox may reach, and what that has let through and refused",
    details:
      "The rules in the order they are asked, with the first packets of connections each has decided; what goes by name is counted above them. The last refusals by name tell why.",
    arguments: [sandbox("running-sandbox")],
    flags: [OUTPUT_FLAG],
    examples: ["aenv network show ID", "aenv network show ID --output json | jq .refused.packets"],
    run: async (invocation) => (await import("./network.ts")).networkShow(invocation),
  },
  {
    name: "list",
    group: SANDBOXES,
    aliases: ["ls"],
    summary: "List sandboxes",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv list", "aenv list --output json | jq -r .[].sandboxID"],
    run: list,
  },
  {
    name: "pause",
    group: SANDBOXES,
    summary: "Pause sandboxes",
    arguments: [{ ...sandbox("running-sandbox"), many: true }],
    details:
      "Memory and disks are kept, and what runs goes on after `aenv resume`. With --no-memory the disks alone are kept, which takes less room: what runs is ended, and `aenv resume` and `aenv connect` boot the sandbox from its disks. Traffic does not wake it.",
    flags: [{ name: "no-memory", help: "end what runs and keep the disks alone" }],
    examples: ["aenv pause ID", "aenv pause ID ID", "aenv pause --no-memory ID"],
    run: pause,
  },
  {
    name: "resume",
    group: SANDBOXES,
    summary: "Resume paused sandboxes",
    arguments: [{ ...sandbox("paused-sandbox"), many: true }],
    flags: [{ name: "timeout", value: "SECS", default: "300", help: "time to live from now" }],
    examples: ["aenv resume ID --timeout 3600"],
    run: resume,
  },
  {
    name: "timeout",
    group: SANDBOXES,
    summary: "Set when a sandbox ends, counted from now",
    details:
      "At its end a sandbox that `aenv start` made is paused and kept; one that was created with autoPause false is deleted. `aenv info` tells which (AT ITS END).",
    arguments: [
      sandbox("running-sandbox"),
      { name: "seconds", help: "time to live; may shorten what was set before" },
    ],
    flags: [],
    examples: ["aenv timeout ID 600"],
    run: setSandboxTimeout,
  },
  {
    name: "fork",
    group: SANDBOXES,
    summary: "Start copies of a running sandbox from its present state",
    details:
      "The sandbox itself goes on. Prints an id per copy; when some could not be started the status is 1.",
    arguments: [sandbox("running-sandbox")],
    flags: [
      { name: "count", short: "c", value: "N", default: "1", help: "how many (1 to 100)" },
      { name: "timeout", value: "SECS", help: "time to live of the copies (default: the sandbox's own)" },
    ],
    examples: ["aenv fork ID", "aenv fork ID --count 3 --timeout 600"],
    run: fork,
  },
  {
    name: "delete",
    group: SANDBOXES,
    aliases: ["rm"],
    summary: "Delete sandboxes, running or paused",
    arguments: [{ ...sandbox("sandbox"), many: true }],
    flags: [],
    examples: ["aenv delete ID", "aenv list --output json | jq -r '.[].sandboxID' | xargs -r aenv delete"],
    run: remove,
  },
  {
    name: "template list",
    group: TEMPLATES,
    aliases: ["template ls", "templates list", "templates ls"],
    summary: "List templates",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv template list"],
    run: templateList,
  },
  {
    name: "template watch",
    group: TEMPLATES,
    aliases: ["templates watch"],
    summary: "Follow a template's newest build to its end",
    details: "Ctrl-C ends the watching, not the build.",
    arguments: [{ name: "template", help: "template name or id", complete: "template" }],
    flags: [],
    examples: ["aenv template watch debian"],
    run: watchTemplate,
  },
  {
    name: "template cancel",
    group: TEMPLATES,
    aliases: ["templates cancel"],
    summary: "End a template's build that runs",
    arguments: [{ name: "template", help: "template name or id", complete: "template" }],
    flags: [],
    examples: ["aenv template cancel debian"],
    run: cancelTemplate,
  },
  {
    name: "template delete",
    group: TEMPLATES,
    aliases: ["template rm", "templates delete", "templates rm"],
    summary: "Delete a template or snapshot",
    arguments: [{ name: "template", help: "template name or id, or snapshot id", complete: "template" }],
    flags: [],
    examples: ["aenv template delete debian"],
    run: templateDelete,
  },
  {
    name: "snapshot create",
    aliases: ["snap create"],
    group: TEMPLATES,
    summary: "Make a snapshot of a running sandbox, which goes on",
    arguments: [sandbox("running-sandbox")],
    flags: [{ name: "name", value: "NAME", help: "name that shall point at it, alias or alias:tag" }],
    examples: ["aenv snapshot create ID", "aenv snapshot create ID --name ready && aenv start ready"],
    run: snapshotCreate,
  },
  {
    name: "snapshot list",
    aliases: ["snap list", "snapshot ls", "snap ls"],
    group: TEMPLATES,
    summary: "List snapshots, newest first",
    arguments: [],
    flags: [{ name: "sandbox-id", value: "ID", help: "only those made of this sandbox" }, OUTPUT_FLAG],
    examples: ["aenv snapshot list", "aenv snap ls --sandbox-id ID"],
    run: snapshotList,
  },
  {
    name: "snapshot delete",
    aliases: ["snap delete", "snapshot rm", "snap rm"],
    group: TEMPLATES,
    summary: "Delete a snapshot",
    arguments: [{ name: "snapshot", help: "snapshot id or name", complete: "snapshot" }],
    flags: [],
    examples: ["aenv snapshot delete ready"],
    run: snapshotDelete,
  },
  {
    name: "doctor",
    group: CLIENT,
    summary: "Check the way to the server: credentials, address, key, clock",
    details:
      "Every line that is not ok comes with what to do. On the server's host `agentenv doctor` checks the host itself. The status is 1 when something keeps commands from working.",
    arguments: [],
    flags: [{ ...OUTPUT_FLAG, help: "table (default) or json" }],
    examples: ["aenv doctor"],
    run: async (invocation) => (await import("./doctor.ts")).doctor(invocation),
  },
  {
    name: "completion",
    group: CLIENT,
    summary: "Print the script that lets a shell complete aenv's commands",
    arguments: [{ name: "shell", help: "bash, zsh or fish", choices: SHELLS }],
    flags: [],
    examples: [
      "source <(aenv completion bash)",
      "aenv completion zsh > ~/.zfunc/_aenv",
      "aenv completion fish > ~/.config/fish/completions/aenv.fish",
    ],
    run: printCompletion,
  },
];

/** What the groups of commands are for. */
export const GROUPS: Readonly<Record<string, string>> = {
  network: "Show what sandboxes may reach",
  template: "List, watch, cancel and delete templates",
  snapshot: "Make, list and delete snapshots of sandboxes",
};

/** Programs of the same executable that are not clients of a server. */
export const SERVER_PROGRAMS: readonly ServerProgram[] = [
  ["serve", "Run the server"],
  ["setup", "Fetch the guest kernel and the virtual machine monitor"],
  ["config", "Check and show the configuration"],
  ["layer", "Create, inspect, merge and convert block layers"],
];
