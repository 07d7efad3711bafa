import type { Command } from "./command.ts";

export const BUILD_COMMAND: Command = {
  name: "build",
  group: "Templates and snapshots:",
  summary: "Make a template from a Dockerfile",
  details:
    "The server runs the Dockerfile step by step in microVMs and keeps every step, so that a change builds only what follows it. ENTRYPOINT with CMD becomes the start command, HEALTHCHECK the readiness; .dockerignore is honoured. Ctrl-C cancels the build.",
  arguments: [{ name: "context", help: "directory that COPY and ADD take files from", complete: "path" }],
  flags: [
    { name: "name", value: "NAME", help: "template name", required: true },
    { name: "file", short: "f", value: "PATH", help: "Dockerfile (default: Dockerfile in the context)" },
    {
      name: "build-arg",
      value: "KEY=VALUE",
      help: "value of an ARG; KEY alone takes it from the environment; may be repeated",
      repeat: true,
    },
    { name: "cpu", hiddenAliases: ["cpu-count"], value: "N", help: "virtual CPUs" },
    { name: "memory", hiddenAliases: ["memory-mb", "mem"], value: "MIB", help: "memory in MiB" },
    {
      name: "start-cmd",
      value: "CMD",
      help: "in place of ENTRYPOINT and CMD; an empty one starts nothing",
    },
    {
      name: "ready-cmd",
      value: "CMD",
      help: "in place of HEALTHCHECK; with neither of them the start command gets 20 s",
    },
    { name: "probe", value: "PORT", help: "ready when something listens on this port (needs bash there)" },
    { name: "timeout", value: "SECS", help: "cancel the build after this time" },
    {
      name: "progress",
      value: "HOW",
      choices: ["auto", "plain", "tty"],
      default: "auto",
      help: "a status line below the log on a terminal, or plain lines",
    },
  ],
  examples: [
    "aenv build . --name app",
    "aenv build . --name web --probe 8080",
    "aenv build src -f docker/Dockerfile --name app --build-arg VERSION=2",
  ],
  run: async (invocation) => (await import("./dockerfile-build.ts")).build(invocation),
};
