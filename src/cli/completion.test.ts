import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { chmodSync } from "node:fs";
import { CliRig, type OnTerminal } from "../../tests/support/cli-rig.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

let rig: CliRig;
let running: string;
let paused: string;

beforeAll(async () => {
  rig = await CliRig.start();
  rig.installCommand();
  running = rig.sandbox();
  paused = rig.sandbox({ state: "paused", alias: "python" });
  rig.template("base");
  rig.template("base-dev:v2");
});
afterAll(() => rig[Symbol.asyncDispose]());

/** What the callback answers for a command line, the last word being completed. */
async function complete(words: readonly string[], shell = "bash", env: Record<string, string> = {}) {
  return rig.aenv(["--", "aenv", ...words], { env: { COMPLETE: shell, ...env } });
}
const words = async (...line: string[]) =>
  (await complete(line)).out.split("\n").filter((word) => word !== "");

describe("candidates", () => {
  test("commands, nested ones, aliases; nothing hidden", async () => {
    const all = await words("");
    for (const name of [
      "auth",
      "pull",
      "exec",
      "cn",
      "connect",
      "ls",
      "rm",
      "template",
      "templates",
      "completion",
      "serve",
    ]) {
      expect(all).toContain(name);
    }
    expect(new Set(all).size).toBe(all.length);
    expect(await words("pa")).toEqual(["pause"]);
    expect(await words("template", "")).toEqual(["list", "ls", "watch", "cancel", "delete", "rm"]);
    expect(await words("templates", "l")).toEqual(["list", "ls"]);
    expect(await words("help", "res")).toEqual(["resume"]);
    expect(await words("-")).toEqual(["--help", "--version"]);
    expect(await words("nonsense", "")).toEqual([]);
  });

  test("flags and their values", async () => {
    expect(await words("list", "--")).toEqual(["--output", "--help"]);
    expect(await words("list", "--output", "")).toEqual(["table", "json"]);
    expect(await words("list", "--output=j")).toEqual(["--output=json"]);
    expect(await words("pull", "--name", "x", "--t")).toEqual(["--timeout"]);
    expect(await words("pull", "--cpu", "")).toEqual([]);
    expect(await words("start", "-d", "--de")).toEqual(["--detach-keys"]);
    expect(await words("start", "-e", "a=b", "--e")).toEqual(["--env"]);
    expect(await words("completion", "")).toEqual(["bash", "zsh", "fish"]);
    // What follows the sandbox in exec is another program's.
    expect(await words("exec", running, "--")).toEqual([]);
    expect(await words("exec", running, "ls", "--u")).toEqual([]);
    expect(await words("exec", "--u")).toEqual(["--user"]);
    expect(await words("upload", running, "")).toEqual([":paths"]);
    expect(await words("upload", running, "here", "")).toEqual([]);
    expect(await words("download", running, "/there", "")).toEqual([":paths"]);
  });

  test("sandboxes by state, sorted; templates", async () => {
    for (const command of ["exec", "pause", "timeout"]) expect(await words(command, "")).toEqual([running]);
    expect(await words("resume", "")).toEqual([paused]);
    for (const command of ["connect", "cn", "delete", "rm"]) {
      expect(await words(command, "")).toEqual([running, paused].toSorted());
    }
    expect(await words("delete", running)).toEqual([running]);
    expect(await words("delete", running, "")).toEqual([running, paused].toSorted());
    expect(await words("timeout", running, "")).toEqual([]);
    expect(await words("start", "--timeout", "5", "ba")).toEqual(["base", "base-dev:v2"]);
    expect(await words("template", "watch", "base-")).toEqual(["base-dev:v2"]);
    // What a sandbox cannot be started from is still a template to look at or delete.
    const unready = [rig.template("base-failed", "error"), rig.template("base-building", "building")];
    const source = rig.template("base-warm");
    rig.templates.delete(source.id);
    rig.snapshots.push({ ...source, source: { kind: "sandbox", sourceSandboxId: running } });
    expect(await words("start", "base")).toEqual(["base", "base-dev:v2", "base-warm"]);
    expect(await words("start", source.id.slice(0, -1))).toEqual([source.id]);
    expect(await words("template", "delete", "base-")).toEqual([
      "base-building",
      "base-dev:v2",
      "base-failed",
    ]);
    for (const { id } of unready) rig.templates.delete(id);
    rig.snapshots.length = 0;
    const described = await complete(["resume", ""], "zsh");
    expect(described.out).toBe(`${paused}\tpython (paused)\n`);
  });

  test("silent and quick without credentials, without a server, with one that hangs", async () => {
    const none = { code: 0, out: "", err: "" };
    expect(await complete(["delete", ""], "fish", { XDG_CONFIG_HOME: "/nonexistent" })).toEqual(none);
    expect((await complete(["pa"], "bash", { XDG_CONFIG_HOME: "/nonexistent" })).out).toBe("pause\n");
    using hanging = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch: () => new Promise<Response>(() => undefined),
    });
    using html = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response("<p>") });
    try {
      for (const url of [
        "http://127.0.0.1:1",
        `http://127.0.0.1:${html.port}`,
        `http://127.0.0.1:${hanging.port}`,
      ]) {
        rig.login(url);
        expect(await complete(["delete", ""])).toEqual(none);
      }
      rig.login(rig.url, "wrong");
      expect(await complete(["delete", ""])).toEqual(none);
    } finally {
      rig.login();
    }
    expect(await complete([""], "tcsh")).toEqual(none);
  });
});

describe("scripts", () => {
  const run = async (argv: string[], env: Record<string, string> = {}) => {
    const child = Bun.spawn(argv, {
      env: rig.env(env),
      cwd: rig.dir,
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [out, err] = await Promise.all([
      new Response(child.stdout).text(),
      new Response(child.stderr).text(),
    ]);
    return { out, err, code: await child.exited };
  };
  const missing = (shell: string) => Bun.which(shell) === null;
  for (const shell of ["zsh", "fish"]) {
    if (missing(shell)) console.warn(`skipped: completion in ${shell}: ${shell} is not installed`);
  }

  /** Puts the executable on the path by its other name, alone: what completes it must not need `aenv`. */
  const asAgentenv = async (): Promise<Record<string, string>> => {
    const bin = `${rig.dir}/server-bin`;
    await Bun.write(`${bin}/agentenv`, await Bun.file(`${rig.dir}/bin/aenv`).text());
    chmodSync(`${bin}/agentenv`, 0o755);
    return { PATH: `${bin}:/usr/local/bin:/usr/bin:/bin` };
  };

  test("the name agentenv is completed, too, by that name", async () => {
    const env = await asAgentenv();
    const bash = `source <(agentenv completion bash); complete -p agentenv
      COMP_LINE="agentenv pa" COMP_POINT=11 COMP_WORDS=(agentenv pa) COMP_CWORD=1
      _aenv; printf '%s\\n' "\${COMPREPLY[@]}"`;
    expect(await run(["bash", "--norc", "-c", bash], env)).toEqual({
      code: 0,
      out: "complete -F _aenv agentenv\npause\n",
      err: "",
    });
    if (!missing("zsh")) {
      const zsh = `autoload -Uz compinit; compinit -u -D; source <(agentenv completion zsh)
        print -r -- $_comps[agentenv] $_comps[aenv]
        _describe() { print -rl -- $candidates }
        words=(agentenv pa) CURRENT=2; _aenv`;
      const { out, err } = await run(["zsh", "-f", "-c", zsh], env);
      expect([out, err]).toEqual(["_aenv _aenv\npause:Pause sandboxes\n", ""]);
    }
    if (!missing("fish")) {
      const fish = "agentenv completion fish | source; complete --do-complete 'agentenv pa'";
      const { out, err } = await run(["fish", "--no-config", "-c", fish], env);
      expect([out, err]).toEqual(["pause\tPause sandboxes\n", ""]);
    }
  });

  /** Completes as bash does: it breaks a line at blanks and at = and : into COMP_WORDS. */
  const inBash = async (line: string) => {
    const broken = line.match(/[=:]+|[^\s=:]+/g) ?? [];
    const list = /\s$/.test(line) ? [...broken, ""] : broken;
    const script = `source <(aenv completion bash)
      COMP_LINE=$1 COMP_POINT=\${#1}; shift
      COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
      _aenv
      printf '%s\\n' "\${COMPREPLY[@]}"`;
    const { out, err } = await run(["bash", "--norc", "-c", script, "-", line, ...list]);
    expect(err).toBe("");
    return out.split("\n").filter((word) => word !== "");
  };

  /** Types each line at a prompt and looks at what has become of it. */
  const completesTyped = async (terminal: OnTerminal, lines: readonly (readonly [string, string])[]) => {
    for (const [typed, completed] of lines) {
      const since = terminal.screen().length;
      // Makes the line an argument of echo, whatever way the editor has drawn it.
      terminal.type(`${typed}\x01echo "<\x05>"\r`);
      // Bracketed paste is switched off in front of the answer.
      await terminal.shows(new RegExp(`[\\r\\n]<${completed}`), 10_000, since);
      await terminal.shows("prompt> ", 5_000, since + typed.length);
    }
  };

  test("bash", async () => {
    expect(await inBash("aenv pa")).toEqual(["pause"]);
    expect(await inBash("aenv   template   w")).toEqual(["watch"]);
    expect(await inBash("aenv list --output ")).toEqual(["table", "json"]);
    // Bash replaces only what is behind the last = or :.
    expect(await inBash("aenv list --output=")).toEqual(["table", "json"]);
    expect(await inBash("aenv list --output=j")).toEqual(["json"]);
    expect(await inBash("aenv start base-dev:")).toEqual(["v2"]);
    expect(await inBash("aenv start ba")).toEqual(["base", "base-dev:v2"]);
    expect(await inBash("aenv exec ")).toEqual([running]);
    expect(await inBash(`aenv exec ${running} ls `)).toEqual([]);
    expect(await inBash("aenv nonsense x")).toEqual([]);
  });

  test("bash, typed at a real prompt", async () => {
    await Bun.write(`${rig.dir}/space d/one`, "");
    const terminal = rig.terminal("exec env PS1='prompt> ' bash --norc -i");
    await terminal.shows("prompt> ");
    terminal.type(
      "source <(aenv completion bash); bind 'set enable-bracketed-paste off'; echo loaded-$((1 + 1))\r",
    );
    await terminal.shows("loaded-2");
    await terminal.shows("prompt> ", 5_000, terminal.screen().lastIndexOf("loaded-2"));
    await completesTyped(terminal, [
      ["aenv resu\t", "aenv resume"],
      ["aenv list --output=j\t", "aenv list --output=json"],
      ["aenv start base-dev:\t", "aenv start base-dev:v2"],
      [`aenv exec ${running.slice(0, -4)}\t`, `aenv exec ${running}`],
      // Quoted as the shell does it.
      [`aenv upload ${running} spa\t`, `aenv upload ${running} space\\\\ d/`],
    ]);
    process.kill(terminal.pid, "SIGKILL");
    await terminal.exited;
  });

  test.skipIf(missing("zsh"))(
    "zsh",
    async () => {
      const script = await run(["aenv", "completion", "zsh"]);
      expect(script.out).toStartWith("#compdef aenv agentenv\n");
      await Bun.write(`${rig.dir}/fn/_aenv`, script.out);
      expect(await run(["zsh", "-n", `${rig.dir}/fn/_aenv`])).toEqual({ code: 0, out: "", err: "" });
      await Bun.write(`${rig.dir}/wide-dir/one`, "");
      // In a real line editor, from the function path and by sourcing.
      for (const load of [
        "fpath=($PWD/fn $fpath); autoload -Uz compinit; compinit -u -d $PWD/zdump",
        "autoload -Uz compinit; compinit -u -d $PWD/zdump2; source <(aenv completion zsh)",
      ]) {
        const terminal = rig.terminal("exec env PS1='prompt> ' zsh -f -i");
        await terminal.shows("prompt> ");
        terminal.type(`${load}; echo loaded-$((1 + 1))\r`);
        await terminal.shows("loaded-2");
        await terminal.shows("prompt> ", 5_000, terminal.screen().lastIndexOf("loaded-2"));
        await completesTyped(terminal, [
          ["aenv resu\t", "aenv resume"],
          ["aenv list --output=j\t", "aenv list --output=json"],
          [`aenv exec ${running.slice(0, -4)}\t`, `aenv exec ${running}`],
          ["aenv start base-dev\t", "aenv start base-dev:v2"],
          [`aenv upload ${running} wide\t`, `aenv upload ${running} wide-dir`],
        ]);
        const since = terminal.screen().length;
        terminal.type("aenv cn \t\t");
        await terminal.shows("python (paused)", 10_000, since);
        process.kill(terminal.pid, "SIGKILL");
        await terminal.exited;
      }
    },
    120_000,
  );

  test.skipIf(missing("fish"))("fish", async () => {
    const script = await run(["aenv", "completion", "fish"]);
    await Bun.write(`${rig.dir}/aenv.fish`, script.out);
    expect(await run(["fish", "-n", `${rig.dir}/aenv.fish`])).toEqual({ code: 0, out: "", err: "" });
    const inFish = async (line: string) => {
      const { out, err } = await run([
        "fish",
        "--no-config",
        "-c",
        `source ${rig.dir}/aenv.fish; complete --do-complete '${line}'`,
      ]);
      expect(err).toBe("");
      return out.split("\n").filter((row) => row !== "");
    };
    expect(await inFish("aenv resu")).toEqual(["resume\tResume paused sandboxes"]);
    expect(await inFish("aenv template w")).toEqual(["watch\tFollow a template's newest build to its end"]);
    expect((await inFish("aenv list --output ")).map((row) => row.split("\t")[0])).toEqual(["table", "json"]);
    expect((await inFish("aenv list --output=j")).map((row) => row.split("\t")[0])).toEqual([
      "--output=json",
    ]);
    expect(await inFish("aenv resume ")).toEqual([`${paused}\tpython (paused)`]);
    expect((await inFish("aenv start base-d")).map((row) => row.split("\t")[0])).toEqual(["base-dev:v2"]);
    expect(await inFish(`aenv exec ${running} `)).toEqual([]);
    await Bun.write(`${rig.dir}/data-dir/one`, "");
    expect((await inFish(`aenv upload ${running} data-`)).map((row) => row.split("\t")[0])).toEqual([
      "data-dir/",
    ]);
  });

  test("a reader that leaves is no error", async () => {
    const { out, err } = await run(["bash", "-c", `aenv completion bash | true; echo "\${PIPESTATUS[0]}"`]);
    expect([out, err]).toEqual(["0\n", ""]);
  });
});
