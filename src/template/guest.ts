import { AenvError } from "../lib/errors.ts";
import type { AgentClient, CommandOutcome } from "../sandbox/types.ts";
import type { StartupContext } from "../snapshot/types.ts";
import type { BuildLog } from "./log.ts";

const USER_COMMAND_TIMEOUT_MS = 60_000;

/** The guest of a build: commands as the image's users, through a shell that is there. */
export class BuildGuest {
  readonly agent: AgentClient;
  readonly #log: BuildLog;
  readonly #ensured = new Set<string>();
  #shell: string | undefined;

  constructor(agent: AgentClient, log: BuildLog) {
    this.agent = agent;
    this.#log = log;
  }

  /** `/bin/bash`, else `/bin/sh`; error `no_shell` when the image has neither. */
  async shell(): Promise<string> {
    if (this.#shell !== undefined) return this.#shell;
    for (const path of ["/bin/bash", "/bin/sh"]) {
      if (!(await this.agent.exists(path))) continue;
      if (path !== "/bin/bash") this.#log.add("warn", "the image has no /bin/bash: commands run in /bin/sh");
      this.#shell = path;
      return path;
    }
    throw new AenvError({
      code: "no_shell",
      status: 400,
      message: "there is no shell in the image (neither /bin/bash nor /bin/sh)",
      remediation: "use an image with a shell, or build without RUN steps, start and ready commands",
    });
  }

  async command(text: string, context: StartupContext, user?: string) {
    return {
      cmd: await this.shell(),
      args: ["-l", "-c", text],
      env: context.envVars,
      user: accountOf(user ?? context.user ?? "root"),
      ...(context.workdir === undefined || context.workdir === "" ? {} : { cwd: context.workdir }),
    };
  }

  /** Runs in the shell; output goes to the log line by line under `step`. */
  async run(
    text: string,
    context: StartupContext,
    options: { readonly step: string; readonly timeoutMs: number; readonly user?: string },
  ): Promise<CommandOutcome> {
    const out = this.#log.lines("info", options.step);
    const err = this.#log.lines("warn", options.step);
    try {
      return await this.agent.run({
        ...(await this.command(text, context, options.user)),
        timeoutMs: options.timeoutMs,
        onStdout: out.write,
        onStderr: err.write,
      });
    } finally {
      out.flush();
      err.flush();
    }
  }

  /**
   * Creates a named account and its group when the image lacks them. Numeric ids need none. An image
   * without the tools for it keeps its accounts as they are; the log says so.
   */
  async ensureUser(spec: string): Promise<void> {
    if (this.#ensured.has(spec)) return;
    this.#ensured.add(spec);
    const [user, group] = spec.split(":") as [string, string?];
    if (group !== undefined && !/^\d+$/.test(group) && !(await this.#listed("/etc/group", group))) {
      await this.#create(`group ${group}`, [
        ["groupadd", group],
        ["addgroup", group],
      ]);
    }
    if (user === "" || user === "root" || /^\d+$/.test(user) || (await this.#listed("/etc/passwd", user)))
      return;
    const shell = (await this.agent.exists("/bin/bash")) ? ["-s", "/bin/bash"] : [];
    await this.#create(`user ${user}`, [
      ["useradd", "-m", ...shell, user],
      ["adduser", "-D", user],
    ]);
  }

  async #listed(file: string, name: string): Promise<boolean> {
    const bytes = await this.agent.readFile(file);
    if (bytes === undefined) return false;
    return new TextDecoder()
      .decode(bytes)
      .split("\n")
      .some((line) => line.startsWith(`${name}:`));
  }

  async #create(what: string, attempts: readonly (readonly [string, ...string[]])[]): Promise<void> {
    const said: string[] = [];
    for (const [cmd, ...args] of attempts) {
      try {
        const outcome = await this.agent.run({ cmd, args, user: "root", timeoutMs: USER_COMMAND_TIMEOUT_MS });
        if (outcome.exitCode === 0) {
          this.#log.add("info", `created ${what}`);
          return;
        }
        said.push(`${cmd}: exit code ${outcome.exitCode} ${outcome.stderr.trim()}`.trim());
      } catch (error) {
        // The tool is not in the image: try the next one.
        if (!(error instanceof AenvError) || error.code === "agent_unreachable") throw error;
        said.push(`${cmd}: ${error.message}`);
      }
    }
    this.#log.add("warn", `${what} does not exist and could not be created (${said.join("; ")})`);
  }
}

/** The account part of an image's `user[:group]`. */
export function accountOf(spec: string): string {
  return spec.split(":")[0] || "root";
}
