import { AenvError } from "../lib/errors.ts";
import type { AgentClient, CommandOutcome } from "../sandbox/types.ts";
import type { BuildLog } from "./log.ts";
import { DOCKER_SHELL, type StageState, variables } from "./steps.ts";

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

  /**
   * A shell's text, or a program and its arguments, as the stage's user in its directory. A Dockerfile's text is
   * for the stage's SHELL; others get a login shell.
   */
  async command(command: string | readonly string[], state: StageState, user?: string) {
    const { context, dockerfile } = state;
    const [cmd, ...args] =
      typeof command !== "string"
        ? command
        : dockerfile === undefined
          ? [await this.shell(), "-l", "-c", command]
          : [...(await this.#dockerShell(dockerfile.shell)), command];
    if (cmd === undefined || cmd === "")
      throw new AenvError({ code: "invalid_step", status: 400, message: "the command is empty" });
    const cwd = context.workdir || (dockerfile === undefined ? undefined : "/");
    return {
      cmd,
      args,
      env: variables(state),
      user: accountOf(user ?? context.user ?? "root"),
      ...(cwd === undefined ? {} : { cwd }),
    };
  }

  async #dockerShell(words: readonly string[]): Promise<readonly string[]> {
    if (words === DOCKER_SHELL && !(await this.agent.exists(DOCKER_SHELL[0]!))) {
      throw new AenvError({
        code: "no_shell",
        status: 400,
        message: "there is no shell in the image (no /bin/sh)",
        remediation: 'use an image with a shell, or commands as ["program", "argument"]',
      });
    }
    return words;
  }

  /** Runs it; output goes to the log line by line under `step`. */
  async run(
    command: string | readonly string[],
    state: StageState,
    options: { readonly step: string; readonly timeoutMs: number; readonly user?: string },
  ): Promise<CommandOutcome> {
    const out = this.#log.lines("info", options.step);
    const err = this.#log.lines("warn", options.step);
    try {
      return await this.agent.run({
        ...(await this.command(command, state, options.user)),
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
   * Creates a named account and its group when the image lacks them, with the image's own tools, else by
   * adding lines to its account files. Numeric ids need no account.
   */
  async ensureUser(spec: string): Promise<void> {
    if (this.#ensured.has(spec)) return;
    this.#ensured.add(spec);
    const [user, group] = spec.split(":") as [string, string?];
    if (
      group !== undefined &&
      group !== "" &&
      !/^\d+$/.test(group) &&
      !(await this.#listed("/etc/group", group))
    ) {
      const said = await this.#tryTools([
        ["groupadd", group],
        ["addgroup", group],
      ]);
      if (said !== undefined) await this.#addGroup(group);
      this.#log.add("info", `created group ${group}`);
    }
    if (user === "" || user === "root" || /^\d+$/.test(user) || (await this.#listed("/etc/passwd", user)))
      return;
    if (!ACCOUNT_NAME.test(user)) {
      this.#log.add("warn", `${JSON.stringify(user)} is not a name an account can have: it is not created`);
      return;
    }
    const bash = await this.agent.exists("/bin/bash");
    const said = await this.#tryTools([
      ["useradd", "-m", ...(bash ? ["-s", "/bin/bash"] : []), user],
      ["adduser", "-D", user],
    ]);
    if (said !== undefined) {
      this.#log.add("debug", `no tool of the image created user ${user} (${said})`);
      await this.#addUser(user, bash ? "/bin/bash" : "/bin/sh");
    }
    this.#log.add("info", `created user ${user}`);
  }

  /**
   * Ids and home of `user[:group]` in the image. A user without a group owns with the group of the same name,
   * else with its own; a number without a group with the group of that number. Error 400 for unknown names.
   */
  async account(
    spec: string,
  ): Promise<{ readonly uid: number; readonly gid: number; readonly home: string }> {
    const [user = "", group] = spec.split(":");
    const users = await this.#accounts("/etc/passwd");
    const groups = await this.#accounts("/etc/group");
    const unknown = (what: string, name: string): AenvError =>
      new AenvError({
        code: "unknown_user",
        status: 400,
        message: `the image has no ${what} ${name}`,
        remediation: `create it in a RUN step, or give its number`,
      });
    const number = /^\d+$/.test(user) ? Number(user) : undefined;
    const entry = users.find((fields) =>
      number === undefined ? fields[0] === user : Number(fields[2]) === number,
    );
    if (entry === undefined && number === undefined && user !== "root") throw unknown("user", user);
    const uid = number ?? Number(entry?.[2] ?? 0);
    const home = entry?.[5] || (uid === 0 ? "/root" : "/");
    const gidOf = (name: string): number | undefined => {
      const found = groups.find((fields) => fields[0] === name)?.[2];
      return found === undefined ? undefined : Number(found);
    };
    if (group !== undefined && group !== "") {
      const gid = /^\d+$/.test(group) ? Number(group) : gidOf(group);
      if (gid === undefined) throw unknown("group", group);
      return { uid, gid, home };
    }
    const gid = number === undefined ? (gidOf(user) ?? Number(entry?.[3] ?? 0)) : number;
    return { uid, gid, home };
  }

  async #listed(file: string, name: string): Promise<boolean> {
    return (await this.#accounts(file)).some((fields) => fields[0] === name);
  }

  async #accounts(file: string): Promise<string[][]> {
    const bytes = await this.agent.readFile(file);
    if (bytes === undefined) return [];
    const lines = new TextDecoder().decode(bytes).split("\n");
    return lines.filter((line) => line !== "").map((line) => line.split(":"));
  }

  /** Undefined when one of them did it, else what they said. */
  async #tryTools(attempts: readonly (readonly [string, ...string[]])[]): Promise<string | undefined> {
    const said: string[] = [];
    for (const [cmd, ...args] of attempts) {
      try {
        const outcome = await this.agent.run({ cmd, args, user: "root", timeoutMs: USER_COMMAND_TIMEOUT_MS });
        if (outcome.exitCode === 0) return undefined;
        said.push(`${cmd}: exit code ${outcome.exitCode} ${outcome.stderr.trim()}`.trim());
      } catch (error) {
        // The tool is not in the image: try the next one.
        if (!(error instanceof AenvError) || error.code === "agent_unreachable") throw error;
        said.push(`${cmd}: ${error.message}`);
      }
    }
    return said.join("; ");
  }

  async #append(file: string, line: string): Promise<void> {
    const before = (await this.agent.readFile(file)) ?? new Uint8Array();
    const text = new TextDecoder().decode(before);
    const separator = text === "" || text.endsWith("\n") ? "" : "\n";
    await this.agent.writeFile(file, `${text}${separator}${line}\n`);
  }

  async #addGroup(name: string): Promise<number> {
    const id = freeId(await this.#accounts("/etc/group"));
    await this.#append("/etc/group", `${name}:x:${id}:`);
    return id;
  }

  async #addUser(name: string, shell: string): Promise<void> {
    const groups = await this.#accounts("/etc/group");
    const own = groups.find((fields) => fields[0] === name)?.[2];
    const users = await this.#accounts("/etc/passwd");
    if (users.length === 0) await this.#append("/etc/passwd", "root:x:0:0:root:/root:/bin/sh");
    const id = freeId([...users, ...groups]);
    const group = own ?? String(id);
    if (own === undefined) await this.#append("/etc/group", `${name}:x:${group}:`);
    await this.#append("/etc/passwd", `${name}:x:${id}:${group}::/home/${name}:${shell}`);
    await this.agent.makeDir("/home", "root");
    await this.agent.makeDir(`/home/${name}`, name);
  }
}

const ACCOUNT_NAME = /^[A-Za-z_][A-Za-z0-9_.-]{0,31}$/;
const FIRST_USER_ID = 1000;
const LAST_USER_ID = 60_000;

/** Lowest id of the range for people that no entry has. */
function freeId(entries: readonly (readonly string[])[]): number {
  const taken = new Set(entries.map((fields) => Number(fields[2])));
  for (let id = FIRST_USER_ID; id <= LAST_USER_ID; id++) if (!taken.has(id)) return id;
  throw new AenvError({ code: "no_free_user_id", status: 400, message: "the image has no free user id" });
}

/** The account part of an image's `user[:group]`. */
export function accountOf(spec: string): string {
  return spec.split(":")[0] || "root";
}
