import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import {
  chmodSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { open } from "node:fs/promises";
import { connect } from "node:net";
import { CommandExitError, Sandbox, TimeoutError } from "e2b";
import {
  type Agent,
  basic,
  call,
  collect,
  eventually,
  type Frame,
  frame,
  frames,
  type Json,
  openStream,
  rssKiB,
  run,
  sh,
  startAgent,
} from "./harness.ts";

/* Cases that were met in the field, each with the number it has in the collection. */

const P = "process.Process";
const F = "filesystem.Filesystem";

let agent: Agent;
let sandbox: Sandbox;
beforeAll(async () => {
  agent = await startAgent();
  sandbox = await Sandbox.create({ debug: true, sandboxUrl: agent.url, apiKey: "e2b_0" });
});
afterAll(async () => await agent[Symbol.asyncDispose]());

/** Processes whose command line holds the word. */
function alive(word: string): number[] {
  return readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .filter((pid) => {
      try {
        return readFileSync(`/proc/${pid}/cmdline`, "latin1").includes(word);
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === "ENOENT") return false; // ended meanwhile
        if ((error as NodeJS.ErrnoException).code === "ESRCH") return false;
        throw error;
      }
    })
    .map(Number);
}
const started = async (tag: string) =>
  await eventually(`${tag} started`, async () =>
    JSON.stringify((await call(agent, `${P}/List`, {})).body).includes(`"${tag}"`),
  );
/** What the process has said when it has ended. */
const begin = async (script: string, tag: string, extra: Record<string, Json> = {}) => {
  const body = { process: { cmd: "/bin/bash", args: ["-c", script] }, tag, ...extra };
  return await collect(await openStream(agent, `${P}/Start`, body));
};

describe("ends of processes", () => {
  test("FR-35: the time limit ends children and job groups too, SIGKILL likewise, setsid stays", async () => {
    const word = `busy-${process.pid}`;
    const spinners = `for i in 1 2 3; do (exec -a ${word} sleep 600) & done; set -m; (exec -a ${word} sleep 600) & wait`;
    const error = await sandbox.commands.run(spinners, { timeoutMs: 700 }).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(TimeoutError);
    await eventually("all gone", () => alive(word).length === 0);

    const command = await sandbox.commands.run(spinners, { background: true });
    await eventually("all there", () => alive(word).length >= 4);
    expect(await command.kill()).toBe(true);
    expect(await command.wait().catch((e: unknown) => e)).toBeInstanceOf(CommandExitError);
    await eventually("all gone again", () => alive(word).length === 0);

    // what made a session of its own asked to stay
    const stays = `stays-${process.pid}`;
    const limited = await sh(
      agent,
      `setsid bash -c 'exec -a ${stays} sleep 60' >/dev/null 2>&1 & sleep 60`,
      {},
      { "connect-timeout-ms": "2000" },
    );
    expect(limited.error?.code).toBe("deadline_exceeded");
    // The shells before it have the word in their command lines, too.
    await eventually("the others are gone", () => alive(stays).length <= 1);
    await Bun.sleep(100);
    const left = alive(stays);
    expect(left.length).toBe(1);
    for (const pid of left) process.kill(pid, "SIGKILL");
  });

  test("FR-35: SIGTERM is for the process alone, which may end its children in order", async () => {
    const ready = `${agent.dir}/trapped`;
    const script = `trap 'echo orderly; kill %1; exit 0' TERM; sleep 60 & touch ${ready}; wait`;
    const result = begin(script, "orderly");
    await started("orderly");
    await eventually("the trap is set", () => existsSync(ready));
    await call(agent, `${P}/SendSignal`, { process: { tag: "orderly" }, signal: "SIGNAL_SIGTERM" });
    expect(await result).toMatchObject({ stdout: "orderly\n", end: { exited: true } });
  });

  test("FR-36, FR-42: no limit with 0; at the limit what was said so far is there", async () => {
    expect((await sandbox.commands.run("sleep 0.3; echo done", { timeoutMs: 0 })).stdout).toBe("done\n");
    const r = await sh(agent, "echo a; echo b >&2; sleep 9", {}, { "connect-timeout-ms": "1500" });
    expect([r.stdout, r.stderr, r.error?.code]).toEqual(["a\n", "b\n", "deadline_exceeded"]);
    const seen: string[] = [];
    const late = await sandbox.commands
      .run("echo a; sleep 9", { timeoutMs: 1500, onStdout: (s) => void seen.push(s) })
      .catch((e: unknown) => e);
    expect([late instanceof TimeoutError, seen.join("")]).toEqual([true, "a\n"]);
  });
});

describe("output", () => {
  test("FR-38: characters cut by chunks, half a character at the end, all bytes", async () => {
    const slowly = String.raw`for b in '\360' '\237' '\230' '\200' '\n'; do printf "$b"; sleep 0.02; done`;
    expect((await sandbox.commands.run(slowly)).stdout).toBe("😀\n");
    const half = await sandbox.commands.run(String.raw`printf 'x\360\237'; exit 3`).catch((e: unknown) => e);
    expect(half).toBeInstanceOf(CommandExitError);
    expect((half as CommandExitError).exitCode).toBe(3);
    expect((half as CommandExitError).stdout).toStartWith("x");
    // the bytes themselves are exact
    const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
    writeFileSync(`${agent.dir}/all`, all);
    const chunks: Buffer[] = [];
    for await (const f of frames(
      await openStream(agent, `${P}/Start`, { process: { cmd: "cat", args: [`${agent.dir}/all`] } }),
    ))
      if (f.event?.data?.stdout) chunks.push(Buffer.from(f.event.data.stdout, "base64"));
    expect(Buffer.concat(chunks).equals(all)).toBe(true);
  });

  test("FR-39: 200 MB of output in flat memory on both sides", async () => {
    const before = rssKiB(agent);
    const mine = process.memoryUsage().rss;
    const response = await openStream(agent, `${P}/Start`, {
      process: { cmd: "/bin/sh", args: ["-c", "yes | head -c 200000000"] },
      stdin: false,
    });
    let bytes = 0;
    let most = 0;
    let tail = "";
    if (!response.body) throw new Error("no body");
    for await (const chunk of response.body) {
      bytes += chunk.length;
      if (bytes % 16 === 0) most = Math.max(most, rssKiB(agent));
      tail = (tail + Buffer.from(chunk.subarray(-200)).toString("latin1")).slice(-300);
    }
    expect(tail).toContain("exit status 0");
    expect(bytes).toBeGreaterThan(Math.floor((200e6 * 4) / 3));
    expect(Math.max(most, rssKiB(agent)) - before).toBeLessThan(8 * 1024);
    expect(process.memoryUsage().rss - mine).toBeLessThan(300 << 20);
  }, 120_000);

  test("several subscribers see the same; one that went leaves the others alone", async () => {
    const first = begin("read x; for i in 1 2 3; do echo $i; done; read x; echo end", "shared");
    await started("shared");
    const stop = new AbortController();
    const join = async (signal?: AbortSignal) =>
      await openStream(agent, `${P}/Connect`, { process: { tag: "shared" } }, {}, signal);
    const second = collect(await join());
    const leaving = await join(stop.signal);
    const input = async () =>
      await call(agent, `${P}/SendInput`, { process: { tag: "shared" }, input: { stdin: btoa("\n") } });
    await input();
    for await (const f of frames(leaving)) if (f.event?.data) break;
    stop.abort();
    await input();
    for (const r of await Promise.all([first, second])) expect(r.stdout).toBe("1\n2\n3\nend\n");
  });

  test("a subscriber that takes nothing is cut off in the end; the process and the others go on", async () => {
    await using a = await startAgent(["--stall", "3"]);
    const body = {
      process: { cmd: "/bin/sh", args: ["-c", "head -c 30000000 /dev/zero"] },
      tag: "stalled",
    };
    const payload = Buffer.from(frame(JSON.stringify(body)));
    const dead = connect(a.port, "127.0.0.1");
    let closed = false;
    dead.on("error", () => undefined);
    dead.on("close", () => {
      closed = true;
    });
    dead.pause();
    dead.write(
      Buffer.concat([
        Buffer.from(
          `POST /${P}/Start HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nContent-Length: ${payload.length}\r\n\r\n`,
        ),
        payload,
      ]),
    );
    const list = async () => JSON.stringify((await call(a, `${P}/List`, {})).body);
    await eventually("started", async () => (await list()).includes("stalled"));
    const other = collect(await openStream(a, `${P}/Connect`, { process: { tag: "stalled" } }));
    expect((await other).end?.exited).toBe(true);
    expect(await list()).not.toContain("stalled");
    dead.resume();
    await eventually("closed", () => closed);
  }, 120_000);
});

describe("input", () => {
  test("FR-40: without stdin the command sees its end at once", async () => {
    for (const cmd of ["cat", "python3 -", "bash -s"]) {
      const r = await sandbox.commands.run(
        `command -v ${cmd.split(" ")[0]} >/dev/null || exit 0; ${cmd}; echo over`,
        {
          timeoutMs: 20_000,
        },
      );
      expect(r.exitCode).toBe(0);
    }
  });

  test("FR-40: 64 MiB through standard input", async () => {
    const result = begin("sha256sum", "sum", { stdin: true });
    await started("sum");
    const piece = Buffer.alloc(4 << 20);
    for (let i = 0; i < piece.length; i++) piece[i] = (i * 31) & 255;
    const hash = createHash("sha256");
    const before = rssKiB(agent);
    let sent = 0;
    const stream = new ReadableStream({
      type: "bytes",
      pull(controller) {
        if (sent === 0) controller.enqueue(frame(JSON.stringify({ start: { process: { tag: "sum" } } })));
        if (sent++ === 16) {
          controller.close();
          return;
        }
        hash.update(piece);
        controller.enqueue(frame(JSON.stringify({ data: { input: { stdin: piece.toString("base64") } } })));
      },
    });
    const response = await fetch(`${agent.url}/${P}/StreamInput`, {
      method: "POST",
      headers: { "content-type": "application/connect+json" },
      body: stream,
    });
    const got: Frame[] = [];
    for await (const f of frames(response)) got.push(f);
    expect(got.at(-1)).toEqual({ end: true });
    await call(agent, `${P}/CloseStdin`, { process: { tag: "sum" } });
    expect((await result).stdout).toStartWith(hash.digest("hex"));
    expect(rssKiB(agent) - before).toBeLessThan(48 * 1024);
    const late = await call(agent, `${P}/SendInput`, {
      process: { tag: "sum" },
      input: { stdin: btoa("x") },
    });
    expect([late.status, late.body.code]).toEqual([404, "not_found"]);
  }, 120_000);

  test("FR-43: a resize reaches the foreground group of the terminal", async () => {
    const inner = `trap 'echo now $(stty size)' WINCH; echo ready; while :; do sleep 0.05; done`;
    let seen = "";
    const response = await openStream(agent, `${P}/Start`, {
      process: {
        cmd: "/bin/bash",
        args: ["-c", `stty size; set -m; bash -c "$INNER"`],
        envs: { INNER: inner },
      },
      pty: { size: { cols: 132, rows: 43 } },
      tag: "winch",
    });
    const done = collect(response, (f) => {
      seen += Buffer.from(f.event?.data?.pty ?? "", "base64").toString();
    });
    await eventually("ready", () => seen.includes("ready"));
    expect(seen).toStartWith("43 132\r\n");
    const resize = async (cols: number, rows: number) =>
      (await call(agent, `${P}/Update`, { process: { tag: "winch" }, pty: { size: { cols, rows } } })).status;
    expect(await resize(200, 50)).toBe(200);
    await eventually("SIGWINCH", () => seen.includes("now 50 200"));
    expect([await resize(0, 0), await resize(70_000, 50), await resize(80, 70_000)]).toEqual([400, 400, 400]);
    await call(agent, `${P}/SendSignal`, { process: { tag: "winch" }, signal: "SIGNAL_SIGKILL" });
    expect((await done).end?.status).toBe("signal: killed");
  });
});

describe("accounts", () => {
  test("FR-48: groups, no home, numbers, unknown names", async () => {
    const passwd = readFileSync(`${agent.dir}/etc/passwd`, "utf8");
    const many = Array.from({ length: 100 }, (_, i) => `g${i}:x:${60_000 + i}:app`);
    writeFileSync(
      `${agent.dir}/etc/passwd`,
      `${passwd}app:x:5000:5000::/home/app-of-test:/bin/sh\nbad line\nshort:x\n`,
    );
    writeFileSync(`${agent.dir}/etc/group`, `app:x:5000:\ndocker:x:990:other,app\n${many.join("\n")}\n`);
    const as = async (user: string, script: string) => await sh(agent, script, {}, basic(user));
    // the home does not exist: the variable names it all the same, the command runs in /
    const app = (await as("app", "id -u; id -g; id -G; echo $HOME $USER; pwd")).stdout.split("\n");
    expect(app.slice(0, 2)).toEqual(["5000", "5000"]);
    expect(app[2]!.split(" ").length).toBe(102);
    expect(app.slice(3, 5)).toEqual(["/home/app-of-test app", "/"]);
    expect((await as("nogroup", "pwd")).stdout).toBe("/\n");
    expect((await as("1234", "id -u; id -g; echo $HOME; pwd")).stdout).toBe("1234\n0\n/\n/\n");
    expect((await as("1234:4321", "id -u; id -g")).stdout).toBe("1234\n4321\n");
    expect((await as("5000", "id -un 2>/dev/null || id -u; echo $HOME")).stdout).toContain(
      "/home/app-of-test\n",
    );
    for (const unknown of ["nobody-here", "12x", "-1", "99999999999"])
      expect((await as(unknown, "true")).error).toEqual({
        code: "unauthenticated",
        message: `invalid username: '${unknown}'`,
      });
    // a directory that was asked for must be there
    const asked = await run(agent, { process: { cmd: "true", cwd: "/home/app-of-test" } }, basic("app"));
    expect(asked.error?.code).toBe("invalid_argument");
  });

  test("FR-64: images without the default user, or without any account", async () => {
    await using a = await startAgent();
    for (const passwd of ["root:x:0:0:root:/root:/bin/ash\n", "", undefined]) {
      if (passwd === undefined) await Bun.$`rm ${a.dir}/etc/passwd ${a.dir}/etc/group`;
      else writeFileSync(`${a.dir}/etc/passwd`, passwd);
      const r = await sh(
        a,
        'id -u; echo $USER; touch "$HOME/.probe-of-test" && rm "$HOME/.probe-of-test" && echo writable',
      );
      expect(r.stdout).toBe("0\nroot\nwritable\n");
    }
    // the default user by name, where uid 1000 is taken by another
    writeFileSync(
      `${a.dir}/etc/passwd`,
      `node:x:1000:1000::/home/node:/bin/sh\nuser:x:1001:1001::${a.dir}/home/user:/bin/sh\n`,
    );
    await fetch(`${a.url}/init`, { method: "POST", body: JSON.stringify({ defaultUser: "user" }) });
    expect((await sh(a, "id -u; echo $USER $HOME")).stdout).toBe(`1001\nuser ${a.dir}/home/user\n`);
  });
});

const at = (path: string, more = "") => `${agent.url}/files?path=${encodeURIComponent(path)}${more}`;
const put = async (
  path: string,
  body: NonNullable<RequestInit["body"]>,
  headers: Record<string, string> = {},
) =>
  await fetch(at(path), {
    method: "POST",
    headers: { "content-type": "application/octet-stream", ...headers },
    body,
  });
/** Begins an upload and breaks off in the middle. */
async function cut(head: string, part: Buffer | string): Promise<void> {
  await new Promise<void>((done) => {
    const s = connect(agent.port, "127.0.0.1", () => {
      s.write(head);
      s.write(part, () => s.destroy());
    });
    s.on("error", () => done());
    s.on("close", () => done());
  });
}
const octets = (path: string, length: number) =>
  `POST /files?path=${encodeURIComponent(path)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: ${length}\r\n\r\n`;

describe("files", () => {
  test("FR-49: bytes are what they were in every format", async () => {
    const all = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
    const png = Buffer.from("89504e470d0a1a0a0000000d49484452", "hex");
    const zeros = Buffer.alloc(100_000);
    const mixed = Buffer.concat([zeros, all, zeros, png, zeros]);
    for (const [i, content] of [Buffer.alloc(0), Buffer.from("x"), all, png, zeros, mixed].entries()) {
      const path = `${agent.dir}/exact-${i}`;
      await sandbox.files.write(path, new Uint8Array(content).buffer);
      expect(readFileSync(path).equals(content)).toBe(true);
      expect(Buffer.from(await sandbox.files.read(path, { format: "bytes" })).equals(content)).toBe(true);
      const blob = await sandbox.files.read(path, { format: "blob" });
      expect(Buffer.from(await blob.arrayBuffer()).equals(content)).toBe(true);
      const parts: Uint8Array[] = [];
      for await (const part of await sandbox.files.read(path, { format: "stream" })) parts.push(part);
      expect(Buffer.concat(parts).equals(content)).toBe(true);
    }
  });

  // All of it through the loopback costs half a minute of processor time: only on request.
  const LONG = process.env.AENV_TEST_LONG === "1";
  test(`FR-49: ${LONG ? "5 GiB" : "256 MiB (5 GiB with AENV_TEST_LONG=1)"}, most of it holes, there and back`, async () => {
    const size = LONG ? 5 * 2 ** 30 : 256 << 20;
    const marks = [0, 4321, size / 2 + 77, size - 4096].map(
      (at) => [at, crypto.getRandomValues(Buffer.alloc(4096))] as const,
    );
    const from = `${agent.dir}/huge-source`;
    const path = `${agent.dir}/huge`;
    writeFileSync(from, "");
    truncateSync(from, size);
    const file = await open(from, "r+");
    for (const [offset, mark] of marks) await file.write(mark, 0, mark.length, offset);
    await file.close();
    const before = rssKiB(agent);
    const type = "Content-Type: application/octet-stream";
    const up =
      await Bun.$`curl -sS -X POST -T ${from} -H ${type} -o /dev/null -w ${"%{http_code}"} ${at(path)}`.text();
    expect(up).toBe("200");
    const st = statSync(path);
    expect([st.size, st.blocks * 512 < 16 << 20]).toEqual([size, true]); // holes take no disk
    for (const [offset, mark] of marks) {
      const r = await fetch(at(path), { headers: { range: `bytes=${offset}-${offset + mark.length - 1}` } });
      expect([r.status, Buffer.from(await r.arrayBuffer()).equals(mark)]).toEqual([206, true]);
    }
    const down = await Bun.$`curl -sS -o /dev/null -w ${"%{http_code} %{size_download}"} ${at(path)}`.text();
    expect(down).toBe(`200 ${size}`);
    expect(rssKiB(agent) - before).toBeLessThan(8 * 1024);
    await Bun.$`rm ${from} ${path}`;
  }, 600_000);

  test(`FR-49: ${LONG ? "5 GiB" : "64 MiB (5 GiB with AENV_TEST_LONG=1)"} without holes, sent in chunks, same hash`, async () => {
    const size = LONG ? 5 * 2 ** 30 : 64 << 20;
    const path = `${agent.dir}/dense`;
    const before = rssKiB(agent);
    const type = "Content-Type: application/octet-stream";
    // Numbers one after the other: no two places of the file are alike.
    const script = `exec 3>&1; seq 1 9999999999 | head -c "$1" | tee >(sha256sum >&3) | curl -sS -X POST -T - -H "$2" -o /dev/null -w '%{http_code}' "$3" >&2`;
    const sent = await Bun.$`bash -c ${script} x ${size} ${type} ${at(path)}`.quiet();
    expect(sent.stderr.toString()).toBe("200");
    expect(statSync(path).size).toBe(size);
    const got = await Bun.$`bash -c ${'curl -sS "$1" | sha256sum'} x ${at(path)}`.text();
    expect(got).toMatch(/^[0-9a-f]{64} /);
    expect(got).toBe(sent.stdout.toString());
    expect(rssKiB(agent) - before).toBeLessThan(8 * 1024);
    await Bun.$`rm ${path}`;
  }, 600_000);

  test("FR-49: offsets beyond 4 GiB", async () => {
    const size = 5 * 2 ** 30;
    const path = `${agent.dir}/sparse`;
    writeFileSync(path, "");
    truncateSync(path, size);
    const file = await open(path, "r+");
    await file.write("the end", size - 7);
    await file.close();
    const head = await fetch(at(path), { method: "HEAD" });
    expect(head.headers.get("content-length")).toBe(String(size));
    const tail = await fetch(at(path), { headers: { range: "bytes=-7" } });
    expect([tail.status, await tail.text(), tail.headers.get("content-range")]).toEqual([
      206,
      "the end",
      `bytes ${size - 7}-${size - 1}/${size}`,
    ]);
    expect((await fetch(at(path), { headers: { range: `bytes=${size}-` } })).status).toBe(416);
    expect((await sandbox.files.getInfo(path)).size).toBe(size);
  });

  test("FR-51: 100 uploads into one new directory, 20 more cut in the middle", async () => {
    const dir = `${agent.dir}/new/a/b`;
    const content = Buffer.alloc(50_000, "y");
    await fetch(`${agent.url}/health`);
    const files = async () => (await Bun.$`ls -l /proc/${agent.pid}/fd`.text()).split("deleted").length;
    const opened = await files();
    const results = await Promise.all([
      ...Array.from({ length: 100 }, async (_, i) => (await put(`${dir}/file-${i}`, content)).status),
      ...Array.from({ length: 20 }, async (_, i) => {
        if (i % 2) await cut(octets(`${dir}/cut-${i}`, 99_999), content);
        else {
          const part = `--b\r\nContent-Disposition: form-data; name="file"; filename="${dir}/cut-${i}"\r\n\r\n`;
          await cut(
            "POST /files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 99999\r\n\r\n",
            part + content.toString(),
          );
        }
        return 200;
      }),
    ]);
    expect(results.every((s) => s === 200)).toBe(true);
    await eventually("no descriptor of them left", async () => (await files()) <= opened);
    expect(readdirSync(dir).sort()).toEqual(Array.from({ length: 100 }, (_, i) => `file-${i}`).sort());
    for (let i = 0; i < 100; i++) expect(statSync(`${dir}/file-${i}`).size).toBe(content.length);
  }, 120_000);

  test("an upload that is cut or refused leaves the old file as it was", async () => {
    const path = `${agent.dir}/kept`;
    writeFileSync(path, "the old content");
    chmodSync(path, 0o640);
    await Bun.$`setfattr -n user.mine -v 1 ${path}`.nothrow().quiet();
    await cut(octets(path, 1000), "new");
    expect(
      (await put(path, Bun.gzipSync("new").subarray(0, 15), { "content-encoding": "gzip" })).status,
    ).toBe(400);
    expect(readFileSync(path, "utf8")).toBe("the old content");
    expect((await put(path, "new")).status).toBe(200);
    const st = statSync(path);
    expect([readFileSync(path, "utf8"), st.mode & 0o7777, st.uid]).toEqual(["new", 0o640, 0]);
    // other names of the same file, and links to it, keep meaning it
    linkSync(path, `${agent.dir}/kept-too`);
    symlinkSync(path, `${agent.dir}/kept-link`);
    await put(path, "through the name");
    expect(readFileSync(`${agent.dir}/kept-too`, "utf8")).toBe("through the name");
    await put(`${agent.dir}/kept-link`, "through the link");
    expect(readFileSync(path, "utf8")).toBe("through the link");
    symlinkSync(`${agent.dir}/not-yet`, `${agent.dir}/dangling`);
    await put(`${agent.dir}/dangling`, "made");
    expect(readFileSync(`${agent.dir}/not-yet`, "utf8")).toBe("made");
    expect(lstatSync(`${agent.dir}/dangling`).isSymbolicLink()).toBe(true);
    expect(readdirSync(agent.dir).filter((name) => name.startsWith(".aenv"))).toEqual([]);
    expect(readdirSync("/").filter((name) => name.startsWith(".aenv-upload"))).toEqual([]);
  });

  test("FR-53: names and contents of every kind", async () => {
    const names = [
      ".env",
      "with space",
      "a#b",
      "100%",
      "50%25",
      "it's",
      'say "hi"',
      "two\nlines",
      "tab\there",
      "日本語.txt",
      "back\\slash",
      "-rf",
      "*?[x]",
      "e\u0301",
      "semi;colon",
      "a&b=c+d",
      "x".repeat(255),
    ];
    const dir = `${agent.dir}/odd`;
    for (const [i, name] of names.entries()) {
      const content = `content ${i}`;
      await sandbox.files.write(`${dir}/${name}`, content);
      expect(readFileSync(`${dir}/${name}`, "utf8")).toBe(content);
      expect(await sandbox.files.read(`${dir}/${name}`)).toBe(content);
      expect((await sandbox.files.getInfo(`${dir}/${name}`)).name).toBe(name);
      const header = (await fetch(at(`${dir}/${name}`))).headers.get("content-disposition") ?? "";
      const star = /filename\*=utf-8''(.*)$/.exec(header)?.[1];
      const quoted = /filename="(.*)"$/.exec(header)?.[1]?.replaceAll(/\\(.)/g, "$1");
      const plain = /filename=([^"]*)$/.exec(header)?.[1];
      expect(star === undefined ? (quoted ?? plain) : decodeURIComponent(star)).toBe(name);
    }
    expect((await sandbox.files.list(dir)).map((e) => e.name).sort()).toEqual([...names].sort());
    const uploaded = await sandbox.files.write(
      names.map((name) => ({ path: `${dir}/many/${name}`, data: name })),
    );
    expect(uploaded.length).toBe(names.length);
    for (const name of names) expect(readFileSync(`${dir}/many/${name}`, "utf8")).toBe(name);
    // bytes that are no text: exact by HTTP, shown with replacements
    const path = `${dir}/%ff%fe`;
    const raw = `${agent.url}/files?path=${encodeURIComponent(dir)}/%FF%FE`;
    const headers = { "content-type": "application/octet-stream" };
    expect((await fetch(raw, { method: "POST", headers, body: "bytes" })).status).toBe(200);
    expect(await (await fetch(raw)).text()).toBe("bytes");
    expect(existsSync(path)).toBe(false);
    expect((await sandbox.files.list(dir)).map((e) => e.name)).toContain("\ufffd\ufffd");
    await sandbox.files.remove(dir);
    expect(existsSync(dir)).toBe(false);
    // empty file, gzip body
    await sandbox.files.write(`${agent.dir}/empty`, "");
    expect(statSync(`${agent.dir}/empty`).size).toBe(0);
    const zipped = await put(`${agent.dir}/unzipped`, Bun.gzipSync("plain text"), {
      "content-encoding": "gzip",
    });
    expect([zipped.status, readFileSync(`${agent.dir}/unzipped`, "utf8")]).toEqual([200, "plain text"]);
  }, 120_000);
});

interface Watch extends AsyncDisposable {
  readonly seen: string[];
  readonly set: Set<string>;
  readonly ended: Promise<Frame["error"]>;
}
async function watch(path: string, recursive: boolean): Promise<Watch> {
  const stop = new AbortController();
  const seen: string[] = [];
  const set = new Set<string>();
  const response = await openStream(agent, `${F}/WatchDir`, { path, recursive }, {}, stop.signal);
  const ended = (async () => {
    try {
      for await (const f of frames(response)) {
        if (f.start) seen.push("start");
        if (f.filesystem) {
          const text = `${f.filesystem.type.slice(11)} ${f.filesystem.name}`;
          seen.push(text);
          set.add(text);
        }
        if (f.end) return f.error;
      }
    } catch (error) {
      if (!stop.signal.aborted) throw error;
    }
    return undefined;
  })();
  await eventually("watch armed", () => seen.includes("start"));
  return {
    seen,
    set,
    ended,
    async [Symbol.asyncDispose]() {
      stop.abort();
      await ended;
    },
  };
}

describe("watches", () => {
  test("FR-52: a tree made in one go, renames, 20,000 files in it", async () => {
    const dir = `${agent.dir}/burst`;
    mkdirSync(dir);
    await using w = await watch(dir, true);
    await Bun.$`mkdir -p ${dir}/a/b/c && echo x > ${dir}/a/b/c/f`;
    await eventually("deep file", () => w.set.has("CREATE a/b/c/f") && w.set.has("WRITE a/b/c/f"));
    await Bun.$`mv ${dir}/a/b ${dir}/moved && echo y >> ${dir}/moved/c/f && rm -r ${dir}/moved`;
    for (const want of ["RENAME a/b", "CREATE moved", "WRITE moved/c/f", "REMOVE moved/c/f", "REMOVE moved"])
      await eventually(want, () => w.set.has(want));
    for (let i = 1; i <= 20; i++) mkdirSync(`${dir}/many/${i}`, { recursive: true });
    const made = Bun.spawn(
      [
        "bash",
        "-c",
        'for d in $(seq 20); do for i in $(seq 1000); do : > "$1/many/$d/$i"; done; done',
        "x",
        dir,
      ],
      { stdio: ["ignore", "ignore", "inherit"] },
    );
    expect(await made.exited).toBe(0);
    await eventually("all 20,000", () => w.set.has("CREATE many/20/1000"));
    let missing = 0;
    for (let d = 1; d <= 20; d++)
      for (let i = 1; i <= 1000; i++) if (!w.set.has(`CREATE many/${d}/${i}`)) missing++;
    expect(missing).toBe(0);
    expect(w.seen.filter((s) => s === "CREATE many/7/7").length).toBe(1);
  }, 120_000);

  test("FR-52: lost events are an error, not silence", async () => {
    const dir = `${agent.dir}/flood`;
    mkdirSync(dir);
    // a client that does not read: the kernel's queue runs over
    const body = Buffer.from(frame(JSON.stringify({ path: dir })));
    const socket = connect(agent.port, "127.0.0.1");
    let text = "";
    await new Promise<void>((done) => {
      socket.once("connect", () => {
        socket.write(
          Buffer.concat([
            Buffer.from(
              `POST /${F}/WatchDir HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nContent-Length: ${body.length}\r\n\r\n`,
            ),
            body,
          ]),
        );
        socket.once("data", () => {
          socket.pause();
          done();
        });
      });
    });
    const limit = Number(readFileSync("/proc/sys/fs/inotify/max_queued_events", "utf8"));
    const name = "n".repeat(200);
    // the socket and the agent hold some of them before the queue fills up
    const flood = Bun.spawn(
      [
        "python3",
        "-c",
        "import os,sys\nd,n,p=sys.argv[1:4]\nfor i in range(int(n)):\n f=f'{d}/{p}-{i%50}'\n os.close(os.open(f,os.O_CREAT|os.O_WRONLY))\n os.unlink(f)\n",
        dir,
        String(limit * 2),
        name,
      ],
      { stdio: ["ignore", "ignore", "inherit"] },
    );
    expect(await flood.exited).toBe(0);
    socket.on("data", (d) => {
      text = (text + d.toString("latin1")).slice(-2000);
    });
    socket.resume();
    await eventually("the end of the stream", () => text.includes("overflow"));
    expect(text).toContain('"code":"internal"');
    socket.destroy();
    // queued by the polling interface
    const { body: made } = await call(agent, `${F}/CreateWatcher`, { path: dir });
    const watcherId = made.watcherId as string;
    await sh(agent, `cd ${dir}; for i in $(seq 50); do : > q$i; done`);
    const first = await call(agent, `${F}/GetWatcherEvents`, { watcherId });
    expect((first.body.events as Json[]).length).toBe(50);
    await Bun.$`rm -r ${dir}`;
    await eventually("reported", async () => {
      const r = await call(agent, `${F}/GetWatcherEvents`, { watcherId });
      return r.status === 500 && (r.body.message as string).includes("gone");
    });
    expect((await call(agent, `${F}/RemoveWatcher`, { watcherId })).status).toBe(200);
  }, 120_000);

  test("an upload is one creation or one write under its own name, and nothing else", async () => {
    const dir = `${agent.dir}/quiet`;
    mkdirSync(dir);
    await using w = await watch(dir, false);
    await using above = await watch("/", false); // where unnamed files wait
    await put(`${dir}/f`, "one");
    await eventually("made", () => w.set.has("WRITE f"));
    const made = w.seen.splice(0);
    expect(made.filter((s) => s !== "start")).toEqual(["CREATE f", "WRITE f"]);
    await put(`${dir}/f`, "two");
    await eventually("changed", () => w.seen.includes("WRITE f"));
    await Bun.sleep(50);
    expect(w.seen).toEqual(["WRITE f"]);
    expect(above.seen.filter((s) => /#\d|aenv/.test(s))).toEqual([]);
  });
});

describe("who this machine is", () => {
  const init = async (a: Agent, sandboxID: string) =>
    (await fetch(`${a.url}/init`, { method: "POST", body: JSON.stringify({ sandboxID }) })).status;

  test("FR-29: a new id makes a new machine id, name and SSH host keys; the same id changes nothing", async () => {
    await using a = await startAgent();
    const etc = `${a.dir}/etc`;
    mkdirSync(`${etc}/ssh`);
    if (Bun.which("ssh-keygen"))
      for (const type of ["ed25519", "ecdsa"])
        await Bun.$`ssh-keygen -q -t ${type} -N "" -f ${etc}/ssh/ssh_host_${type}_key`.quiet();
    else console.warn("without ssh-keygen here the host keys are not looked at");
    writeFileSync(`${etc}/machine-id`, `${"a".repeat(32)}\n`);
    writeFileSync(`${etc}/hosts`, "127.0.0.1 localhost\n1.2.3.4 mine\n");
    const key = (type: string) => {
      const path = `${etc}/ssh/ssh_host_${type}_key.pub`;
      return existsSync(path) ? readFileSync(path, "utf8") : "";
    };
    const state = () => ({
      id: readFileSync(`${etc}/machine-id`, "utf8"),
      keys: [key("ed25519"), key("ecdsa")],
    });
    const other = async (old: ReturnType<typeof state>, name: string) => {
      expect(await init(a, name)).toBe(204);
      if (Bun.which("ssh-keygen"))
        await eventually("new keys", () => state().keys.every((k, i) => k !== "" && k !== old.keys[i]));
      expect(readFileSync(`${etc}/hosts`, "utf8")).toBe(
        `127.0.0.1 localhost\n1.2.3.4 mine\n127.0.1.1\t${name}\t# this sandbox\n`,
      );
      expect(state().id).toMatch(/^[0-9a-f]{32}\n$/);
      expect(state().id).not.toBe(old.id);
      return state();
    };
    const one = await other(state(), "sandbox-one");
    await init(a, "sandbox-one");
    await Bun.sleep(100);
    expect(state()).toEqual(one);
    const two = await other(one, "sandbox-two");
    if (Bun.which("ssh-keygen")) {
      const owner = `${etc}/ssh/.aenv-sandbox`;
      await eventually(
        "all is said",
        () => existsSync(owner) && readFileSync(owner, "utf8") === "sandbox-two",
      );
      // Its next boot, from the same disk: an agent that knows nothing of the one before.
      await using again = await startAgent(["--root", a.dir]);
      expect(await init(again, "sandbox-two")).toBe(204);
      await Bun.sleep(100);
      expect(state()).toEqual(two);
      expect(statSync(`${etc}/ssh/ssh_host_ed25519_key`).mode & 0o777).toBe(0o600);
      expect(readdirSync(`${etc}/ssh`).filter((n) => n.startsWith("."))).toEqual([".aenv-sandbox"]);
    }
    expect(await a.errors()).toBe("");
  }, 120_000);

  test("an image without machine id and keys gets none", async () => {
    await using a = await startAgent();
    await init(a, "sandbox");
    expect(existsSync(`${a.dir}/etc/machine-id`)).toBe(false);
    expect(existsSync(`${a.dir}/etc/ssh`)).toBe(false);
  });
});

test("/init: certificates go into every trust store the image has, once; hosts line of the event service", async () => {
  await using a = await startAgent();
  const init = async (body: object) =>
    (await fetch(`${a.url}/init`, { method: "POST", body: JSON.stringify(body) })).status;
  const pem = `-----BEGIN CERTIFICATE-----\n${"QUJD".repeat(12)}\n-----END CERTIFICATE-----\n`;
  const read = (path: string) => readFileSync(`${a.dir}${path}`, "utf8");
  expect(await init({ caBundle: "no certificate" })).toBe(400);
  expect(await init({ caBundle: pem })).toBe(204);
  expect(read("/etc/ssl/certs/ca-certificates.crt")).toBe(pem);
  mkdirSync(`${a.dir}/etc/pki/tls/certs`, { recursive: true });
  writeFileSync(`${a.dir}/etc/pki/tls/certs/ca-bundle.crt`, "# others");
  symlinkSync("certs/ca-certificates.crt", `${a.dir}/etc/ssl/cert.pem`);
  for (let i = 0; i < 2; i++) expect(await init({ caBundle: pem, hyperloopIP: `10.0.0.${i + 1}` })).toBe(204);
  expect(read("/etc/ssl/cert.pem")).toBe(pem);
  expect(read("/etc/pki/tls/certs/ca-bundle.crt")).toBe(`# others\n${pem}`);
  expect(read("/etc/hosts")).toBe("10.0.0.2 events.e2b.local\n");
  expect((await sh(a, "echo $E2B_EVENTS_ADDRESS")).stdout).toBe("http://10.0.0.2\n");
  expect(await a.errors()).toBe("");
});

test("the first Python client gets only the fields it knows", async () => {
  const headers = { "user-agent": "connect-python" };
  const list = async (more: Record<string, string>) => {
    const r = await fetch(`${agent.url}/${F}/ListDir`, {
      method: "POST",
      headers: { "content-type": "application/json", ...more },
      body: JSON.stringify({ path: `${agent.dir}/etc` }),
    });
    const { entries } = (await r.json()) as { entries: object[] };
    return [r.headers.get("x-e2b-legacy-sdk"), Object.keys(entries[0] ?? {}).length];
  };
  expect(await list(headers)).toEqual(["true", 3]);
  expect((await list({}))[0]).toBeNull();
  expect((await list({ "user-agent": "connect-python/1" }))[0]).toBeNull();
});

test("after all of that no descriptor is left over", async () => {
  // connections that the client keeps for its next request are its own affair
  const held = async () =>
    (await Bun.$`ls -l /proc/${agent.pid}/fd`.text())
      .split("\n")
      .filter((line) => line.includes("->") && !line.includes("socket:"));
  await eventually("few open files", async () => (await held()).length <= 8);
  expect(await agent.errors()).toBe("");
});
