import { auth } from "./auth.ts";
import { pull, watchTemplate } from "./build.ts";
import { type Argument, type Command, type Flag, OUTPUT_FLAG } from "./command.ts";
import { printCompletion, SHELLS } from "./completion-scripts.ts";
import { credentialsPath } from "./credentials.ts";
import { connect, list, pause, remove, resume, setSandboxTimeout, start } from "./sandboxes.ts";
import { templateDelete, templateList } from "./templates.ts";

const sandbox = (complete: "sandbox" | "running-sandbox" | "paused-sandbox"): Argument => ({
  name: "sandbox-id",
  help: "id of the sandbox, as `aenv list` shows it",
  complete,
});

const DETACH: Flag = { name: "detach", short: "d", help: "do not wait; print what was started" };

/** All commands: what is parsed, shown in help and completed by shells. */
export const COMMANDS: readonly Command[] = [
  {
    name: "auth",
    summary: "Store the server's URL and API key",
    details: `Asks for both and writes them to ${credentialsPath()} (mode 0600). The key is never taken from the command line.`,
    arguments: [],
    flags: [],
    examples: ["aenv auth", "printf '%s\\n%s\\n' URL \"$(cat KEYFILE)\" | aenv auth"],
    run: auth,
  },
  {
    name: "pull",
    summary: "Make a template from an OCI image",
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
        help: "command polled until it succeeds before the snapshot is taken",
      },
      { name: "probe", value: "PORT", help: "ready when something listens on this port" },
      DETACH,
      { name: "timeout", value: "SECS", help: "stop waiting after this time; the build goes on" },
    ],
    examples: [
      "aenv pull debian:12",
      "aenv pull ghcr.io/org/app:1 --name app --start-cmd ./serve --probe 8080",
    ],
    run: pull,
  },
  {
    name: "start",
    summary: "Start a sandbox and open a shell in it",
    arguments: [{ name: "target", help: "template name or id, or snapshot id", complete: "template" }],
    flags: [
      { name: "timeout", value: "SECS", default: "300", help: "time to live" },
      DETACH,
      { name: "secure", help: "accepted for compatibility: sandboxes are always secured" },
    ],
    examples: ["aenv start debian", "id=$(aenv start debian -d) && aenv exec $id uname -a"],
    run: start,
  },
  {
    name: "exec",
    summary: "Run a command in a sandbox",
    details:
      "Standard output and error stay apart, the exit status is the command's own. Put -- before a command that begins with a dash. Ctrl-C ends the command in the sandbox.",
    arguments: [
      sandbox("running-sandbox"),
      { name: "command", help: "program and its arguments, taken as they are", rest: true },
    ],
    flags: [
      { name: "user", value: "USER", help: "account to run as (default: the template's)" },
      { name: "cwd", value: "DIR", help: "working directory" },
    ],
    examples: ["aenv exec ID uname -a", "aenv exec ID -- sh -c 'echo hello; exit 3'"],
    run: async (invocation) => (await import("./exec.ts")).exec(invocation),
  },
  {
    name: "connect",
    aliases: ["cn"],
    summary: "Open a shell in a sandbox, resuming it when paused",
    arguments: [sandbox("sandbox")],
    flags: [],
    examples: ["aenv connect ID"],
    run: connect,
  },
  {
    name: "list",
    aliases: ["ls"],
    summary: "List sandboxes",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv list", "aenv list --output json | jq -r .[].sandboxID"],
    run: list,
  },
  {
    name: "pause",
    summary: "Pause a sandbox with its memory",
    arguments: [sandbox("running-sandbox")],
    flags: [],
    examples: ["aenv pause ID"],
    run: pause,
  },
  {
    name: "resume",
    summary: "Resume a paused sandbox",
    arguments: [sandbox("paused-sandbox")],
    flags: [{ name: "timeout", value: "SECS", default: "300", help: "time to live from now" }],
    examples: ["aenv resume ID --timeout 3600"],
    run: resume,
  },
  {
    name: "timeout",
    summary: "Set when a sandbox ends, counted from now",
    arguments: [
      sandbox("running-sandbox"),
      { name: "seconds", help: "time to live; may shorten what was set before" },
    ],
    flags: [],
    examples: ["aenv timeout ID 600"],
    run: setSandboxTimeout,
  },
  {
    name: "delete",
    aliases: ["rm"],
    summary: "Delete a sandbox, running or paused",
    arguments: [sandbox("sandbox")],
    flags: [],
    examples: ["aenv delete ID"],
    run: remove,
  },
  {
    name: "template list",
    aliases: ["template ls", "templates list", "templates ls"],
    summary: "List templates",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv template list"],
    run: templateList,
  },
  {
    name: "template watch",
    aliases: ["templates watch"],
    summary: "Follow a template's newest build to its end",
    details: "Ctrl-C ends the watching, not the build.",
    arguments: [{ name: "template", help: "template name or id", complete: "template" }],
    flags: [],
    examples: ["aenv template watch debian"],
    run: watchTemplate,
  },
  {
    name: "template delete",
    aliases: ["template rm", "templates delete", "templates rm"],
    summary: "Delete a template or snapshot",
    arguments: [{ name: "template", help: "template name or id, or snapshot id", complete: "template" }],
    flags: [],
    examples: ["aenv template delete debian"],
    run: templateDelete,
  },
  {
    name: "completion",
    summary: "Print the script that lets a shell complete aenv's commands",
    arguments: [{ name: "shell", help: "bash, zsh or fish", choices: SHELLS }],
    flags: [],
    examples: [
      "source <(aenv completion bash)",
      "aenv completion zsh > ~/.zfunc/_aenv",
      "aenv completion fish > ~/.config/fish/completions/aenv.fish",
    ],
    hidden: true,
    run: printCompletion,
  },
];

/** Programs of the same executable that are not clients of a server. */
export const SERVER_PROGRAMS: readonly (readonly [name: string, summary: string])[] = [
  ["serve", "Run the server"],
  ["setup", "Fetch the guest kernel and the virtual machine monitor"],
  ["doctor", "Check this host: what is there, what is missing, how to get it"],
];
