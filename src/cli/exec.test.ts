import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { CliRig, noGuest } from "../../tests/support/cli-rig.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { exitStatus } from "./agent.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

if (noGuest !== undefined) console.warn(`skipped: aenv exec: ${noGuest}`);

describe.skipIf(noGuest !== undefined)("aenv exec", () => {
  let rig: CliRig;
  let id: string;

  beforeAll(async () => {
    rig = await CliRig.start();
    await rig.guest();
    id = rig.sandbox();
  });
  afterAll(() => rig[Symbol.asyncDispose]());

  test("output, error output and exit status are the command's", async () => {
    const run = await rig.aenv(["exec", id, "--", "sh", "-c", "echo to-out; echo to-err >&2; exit 7"]);
    expect(run).toEqual({ out: "to-out\n", err: "to-err\n", code: 7 });
  });

  test("an interpreter at a terminal without -i: why it ends at once is said", async () => {
    const note = "note: standard input is not passed on; use -it";
    const bare = rig.terminal(`aenv exec ${id} sh; echo "[rc $?]"`);
    await bare.shows("[rc 0]");
    expect(bare.screen()).toContain(note);
    const meant = rig.terminal(`aenv exec ${id} true; aenv exec -n ${id} sh; echo "[rc $?]"`);
    await meant.shows("[rc 0]");
    expect(meant.screen()).not.toContain(note);
    expect((await rig.aenv(["exec", id, "sh"])).err).toBe("");
  });

  test("words are passed as they are", async () => {
    const words = ["printf", "%s|", "a b", "", "--help", "-d", "ä", "*", "--", "$HOME", "a\nb"];
    expect(await rig.aenv(["exec", id, ...words])).toEqual({
      code: 0,
      err: "",
      out: "a b||--help|-d|ä|*|--|$HOME|a\nb|",
    });
    expect((await rig.aenv(["exec", id, "--", "-no-such-program"])).code).toBe(127);
  });

  test("a signal shows as 128 + its number", async () => {
    for (const [signal, code] of [
      ["KILL", 137],
      ["TERM", 143],
      ["USR1", 138],
    ] as const) {
      expect((await rig.aenv(["exec", id, "--", "sh", "-c", `kill -${signal} $$`])).code).toBe(code);
    }
    expect(
      exitStatus({ exitCode: -1, exited: false, status: "signal: segmentation fault (core dumped)" }),
    ).toBe(139);
    expect(exitStatus({ exitCode: -1, exited: false, status: "signal: signal 40" })).toBe(168);
    expect(exitStatus({ exitCode: -1, exited: false, status: "" })).toBe(255);
    expect(exitStatus({ exitCode: 256 + 3, exited: true, status: "" })).toBe(3);
  });

  test("a command that is not there, a directory and an account that do not exist", async () => {
    const unknown = await rig.aenv(["exec", id, "no-such-program"]);
    expect(unknown.code).toBe(127);
    expect(unknown.err).toContain("no-such-program");
    const cwd = await rig.aenv(["exec", "--cwd", "/no/such/dir", id, "true"]);
    expect(cwd).toMatchObject({ code: 1, out: "" });
    expect(cwd.err).toContain("/no/such/dir");
    const user = await rig.aenv(["exec", "--user", "nobody-such", id, "true"]);
    expect(user.code).toBe(1);
    expect(user.err).toContain("nobody-such");
  });

  test("bytes arrive exactly, many of them, in order", async () => {
    const bytes = 24 * 1024 * 1024;
    const child = rig.spawn([
      "exec",
      id,
      "sh",
      "-c",
      `head -c ${bytes} /dev/urandom | tee sum.bin; sha256sum sum.bin >&2`,
    ]);
    const hash = createHash("sha256");
    let seen = 0;
    const read = (async () => {
      for await (const chunk of child.stdout) {
        hash.update(chunk);
        seen += chunk.length;
      }
    })();
    const err = await new Response(child.stderr).text();
    await read;
    expect(await child.exited).toBe(0);
    expect(seen).toBe(bytes);
    expect(err.split(" ")[0]).toBe(hash.digest("hex"));
  });

  test("all 256 byte values, no newline at the end", async () => {
    const child = rig.spawn([
      "exec",
      id,
      "sh",
      "-c",
      'for i in $(seq 0 255); do printf "\\\\$(printf %o $i)"; done',
    ]);
    const out = Buffer.from(await new Response(child.stdout).arrayBuffer());
    expect([...out]).toEqual(Array.from({ length: 256 }, (_, i) => i));
    expect(await child.exited).toBe(0);
  });

  test("output comes as it is written, not at the end", async () => {
    const fifo = join(rig.dir, "home/go");
    Bun.spawnSync(["mkfifo", fifo]);
    const child = rig.spawn(["exec", id, "sh", "-c", "echo first; read x < go; echo second"]);
    const reader = child.stdout.getReader();
    const first = await reader.read();
    expect(Buffer.from(first.value!).toString()).toBe("first\n");
    // Waits for the command to open its end.
    expect(await Bun.spawn(["sh", "-c", 'echo x > "$0"', fifo]).exited).toBe(0);
    const second = await reader.read();
    expect(Buffer.from(second.value!).toString()).toBe("second\n");
    expect(await child.exited).toBe(0);
  });

  test("a slow reader slows the command; memory stays flat", async () => {
    const bytes = 200_000_000;
    const written = join(rig.dir, "home/written");
    const [program, ...args] = rig.command([
      "exec",
      id,
      "sh",
      "-c",
      `head -c ${bytes} /dev/zero; touch written`,
    ]);
    // Not Bun.spawn: that one reads a pipe whether somebody wants the data or not.
    const child = spawn(program!, args, { env: rig.env(), stdio: ["ignore", "pipe", "inherit"] });
    const ended = new Promise<number | null>((resolve) => child.on("close", resolve));
    await new Promise((resolve) => child.stdout.once("readable", resolve));
    await Bun.sleep(1_000);
    expect(existsSync(written)).toBe(false);
    const peak = /VmHWM:\s+(\d+) kB/.exec(await Bun.file(`/proc/${child.pid}/status`).text());
    expect(Number(peak?.[1])).toBeLessThan(250_000);
    let seen = 0;
    child.stdout.on("data", (chunk: Buffer) => {
      seen += chunk.length;
    });
    expect(await ended).toBe(0);
    expect(seen).toBe(bytes);
    expect(existsSync(written)).toBe(true);
  }, 120_000);

  test("whoever stops reading or interrupts ends the command in the sandbox", async () => {
    rig.installCommand();
    const piped = Bun.spawn(
      [
        "bash",
        "-c",
        `aenv exec "$1" sh -c 'echo $$ > pid1; exec yes' | head -1; echo "\${PIPESTATUS[0]}"`,
        "-",
        id,
      ],
      { env: rig.env(), stdout: "pipe", stderr: "pipe" },
    );
    expect(await new Response(piped.stdout).text()).toBe("y\n141\n");
    expect(await new Response(piped.stderr).text()).toBe("");

    const child = rig.spawn([
      "exec",
      id,
      "sh",
      "-c",
      "sleep 60 & echo $! > pid3; echo $$ > pid2; echo ready; wait",
    ]);
    await child.stdout.getReader().read();
    child.kill("SIGINT");
    expect(await child.exited).toBe(130);
    // What it had started is ended with it.
    for (const name of ["pid1", "pid2", "pid3"]) {
      const pid = (await Bun.file(join(rig.dir, "home", name)).text()).trim();
      // Gone, or ended and not yet fetched by whoever is its parent now.
      const state = async () => {
        if (!existsSync(`/proc/${pid}/stat`)) return "gone";
        const stat = await readFile(`/proc/${pid}/stat`, "utf8").catch(() => ") gone");
        return stat.slice(stat.lastIndexOf(")") + 2).split(" ", 1)[0];
      };
      await eventually(`${name} has ended`, async () => /^(gone|Z)$/.test((await state()) ?? ""));
    }
  });

  test("standard input from a pipe and from a file arrives whole, then its end", async () => {
    const piped = await rig.aenv(["exec", id, "cat"], { stdin: "a line\nand half of one" });
    expect(piped).toEqual({ code: 0, out: "a line\nand half of one", err: "" });
    const bytes = Buffer.alloc(12_345_678);
    for (let i = 0; i < bytes.length; i++) bytes[i] = (i * 31 + (i >> 8)) & 255;
    await Bun.write(join(rig.dir, "input"), bytes);
    const [program, ...args] = rig.command(["exec", id, "sha256sum"]);
    const child = Bun.spawn([program!, ...args], {
      env: rig.env(),
      stdin: Bun.file(join(rig.dir, "input")),
      stdout: "pipe",
    });
    expect(await new Response(child.stdout).text()).toStartWith(
      createHash("sha256").update(bytes).digest("hex"),
    );
    expect(await child.exited).toBe(0);
  });

  test("nobody waits for input that nobody reads, or that nobody wants", async () => {
    const unread = await rig.aenv(["exec", id, "sh", "-c", "exec 0<&-; sleep 0.3; echo done"], {
      stdin: "x".repeat(1_000_000),
    });
    expect(unread).toEqual({ code: 0, out: "done\n", err: "" });
    const off = await rig.aenv(["exec", "-n", id, "cat"], { stdin: "not for you\n" });
    expect(off).toEqual({ code: 0, out: "", err: "" });
    // An input that never ends does not keep a command that has.
    const open = Bun.spawn(rig.command(["exec", id, "true"]), { env: rig.env(), stdin: "pipe" });
    expect(await open.exited).toBe(0);
    const both = await rig.aenv(["exec", "-n", "-i", id, "cat"]);
    expect(both.code).toBe(2);
  });

  test("streams that are closed or full keep nobody waiting", async () => {
    rig.installCommand();
    const run = async (script: string) => {
      const child = Bun.spawn(["bash", "-c", script, "-", id], {
        env: rig.env(),
        stdout: "pipe",
        stderr: "pipe",
      });
      const [out, err] = await Promise.all([
        new Response(child.stdout).text(),
        new Response(child.stderr).text(),
      ]);
      return { out, err, code: await child.exited };
    };
    expect(await run(`aenv exec "$1" sh -c 'seq 100000 >&2; exit 3' 2>&-`)).toEqual({
      out: "",
      err: "",
      code: 3,
    });
    expect(await run(`aenv exec "$1" sh -c 'seq 100000; exit 3' >&-`)).toMatchObject({ out: "", code: 3 });
    expect(await run(`aenv exec "$1" cat <&-`)).toEqual({ out: "", err: "", code: 0 });
    const full = await run(`aenv exec "$1" yes >/dev/full`);
    expect(full.code).toBe(1);
    expect(full.err).toContain("cannot write to standard output");
  });

  test("a slow writer slows nothing else; what it wrote comes in time", async () => {
    const child = Bun.spawn(rig.command(["exec", id, "sh", "-c", 'read a; echo "got $a"; cat']), {
      env: rig.env(),
      stdin: "pipe",
      stdout: "pipe",
    });
    child.stdin.write("first\n");
    await child.stdin.flush();
    const reader = child.stdout.getReader();
    expect(Buffer.from((await reader.read()).value!).toString()).toBe("got first\n");
    child.stdin.write("second\n");
    await child.stdin.end();
    expect(Buffer.from((await reader.read()).value!).toString()).toBe("second\n");
    expect(await child.exited).toBe(0);
  });

  test("environment, directory, a limit of time", async () => {
    const run = await rig.aenv(
      [
        "exec",
        "-e",
        "A=1=2",
        "--env",
        "HERE",
        "-e",
        "NOT_SET",
        "-w",
        "/usr",
        id,
        "sh",
        "-c",
        'echo "$A|$HERE|$NOT_SET|$PWD"',
      ],
      { env: { HERE: "from here" } },
    );
    expect(run).toEqual({ code: 0, out: "1=2|from here||/usr\n", err: "" });
    expect((await rig.aenv(["exec", "-e", "=x", id, "true"])).code).toBe(2);
    const late = await rig.aenv(["exec", "--timeout", "1", id, "sh", "-c", "echo begun; exec sleep 60"]);
    expect(late).toEqual({
      code: 124,
      out: "begun\n",
      err: "Error: the command did not end within 1 s and was killed\n",
    });
  });

  test("a sandbox that is paused, unknown or goes away", async () => {
    const paused = rig.sandbox({ state: "paused" });
    const run = await rig.aenv(["exec", paused, "true"]);
    expect(run).toEqual({
      code: 1,
      out: "",
      err: `Error: sandbox ${paused} is paused\n  resume it with: aenv resume ${paused}\n`,
    });
    const unknown = await rig.aenv(["exec", "01234567-89ab-7def-8123-456789abcdef", "true"]);
    expect(unknown.code).toBe(1);
    expect(unknown.err).toContain("HTTP 404: sandbox 01234567-89ab-7def-8123-456789abcdef was not found");

    const other = rig.sandbox();
    const child = rig.spawn(["exec", other, "sh", "-c", "echo up; exec sleep 60"]);
    await child.stdout.getReader().read();
    rig.records.delete(other);
    rig.cut(other);
    expect(await child.exited).toBe(1);
    expect(await new Response(child.stderr).text()).toStartWith(
      "Error: the connection to the sandbox was cut\n",
    );
  });
});
