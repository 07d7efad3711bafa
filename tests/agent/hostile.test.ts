import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, type Socket } from "node:net";
import {
  type Agent,
  call,
  collect,
  eventually,
  frame,
  openFiles,
  openStream,
  raw,
  rssKiB,
  sh,
  startAgent,
} from "./harness.ts";

const notRoot = process.getuid?.() !== 0;
if (notRoot) console.warn("skipped, needs root: settings of the kernel, watches over mounts");

/* Clients that are broken, slow, many, or mean harm: each gets an answer or is cut off, and nobody else notices. */

const P = "process.Process";
const F = "filesystem.Filesystem";

let agent: Agent;
beforeAll(async () => {
  agent = await startAgent();
});
afterAll(async () => await agent[Symbol.asyncDispose]());

/** Sends the pieces as segments of their own and returns the whole answer; the connection closes at its end. */
async function send(to: Agent, pieces: readonly (string | Uint8Array)[], pauseMs = 0): Promise<string> {
  return await new Promise((done, failed) => {
    let text = "";
    const s = connect(to.port, "127.0.0.1", async () => {
      s.setNoDelay();
      for (const piece of pieces) {
        if (s.destroyed) return;
        s.write(piece);
        await (pauseMs ? Bun.sleep(pauseMs) : new Promise((r) => setImmediate(r)));
      }
    });
    s.on("data", (d) => {
      text += d.toString("latin1");
    });
    s.on("close", () => done(text));
    s.on("error", failed);
    s.setTimeout(20_000, () => s.destroy(new Error(`no answer to ${pieces.length} pieces; so far: ${text}`)));
  });
}
const open = async (to: Agent) =>
  await new Promise<Socket>((done, failed) => {
    const s = connect(to.port, "127.0.0.1", () => done(s));
    s.on("error", failed);
  });
const health = async (to: Agent) => (await raw(to, GET)).slice(9, 12);
const GET = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
const codes = (text: string) => [...text.matchAll(/^HTTP\/1\.1 (\d+)/gm)].map((m) => Number(m[1]));

function upload(
  path: string,
  content: string,
  more = "Connection: close\r\n",
): { head: string; body: string } {
  const body = `--bo\r\nContent-Disposition: form-data; name="x"\r\n\r\nignored\r\n--bo\r\nContent-Disposition: form-data; name="file"; filename="f"\r\nContent-Type: a/b\r\n\r\n${content}\r\n--bo--\r\n`;
  const head = `POST /files?path=${encodeURIComponent(path)} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=bo\r\n${more}Content-Length: ${body.length}\r\n\r\n`;
  return { head, body };
}

describe("segments of every kind", () => {
  // what looks like a boundary and is none, at the end as well
  const content = "one\r\n--b\r\n--bx\r\n\r\n--\r\n--b";

  test("an upload cut in two at every byte", async () => {
    const path = `${agent.dir}/cut-in-two`;
    const { head, body } = upload(path, content);
    const all = head + body;
    for (let at = 1; at < all.length; at += 16) {
      const cuts = Array.from({ length: Math.min(16, all.length - at) }, (_, i) => at + i);
      const answers = await Promise.all(
        cuts.map(async (cut) => [cut, codes(await send(agent, [all.slice(0, cut), all.slice(cut)]))]),
      );
      expect(answers).toEqual(cuts.map((cut) => [cut, [200]]));
    }
    expect(readFileSync(path, "utf8")).toBe(content);
  }, 120_000);

  test("byte by byte, with pauses, and in chunks of every size", async () => {
    const path = `${agent.dir}/bytes`;
    const { head, body } = upload(path, content);
    expect(codes(await send(agent, [...(head + body)]))).toEqual([200]);
    expect(readFileSync(path, "utf8")).toBe(content);
    rmSync(path);
    expect(
      codes(await send(agent, [head, body.slice(0, 40), body.slice(40, 90), body.slice(90)], 30)),
    ).toEqual([200]);
    expect(readFileSync(path, "utf8")).toBe(content);
    for (const size of [1, 2, 3, 5, 7, 64, body.length]) {
      rmSync(path);
      const chunks = Array.from({ length: Math.ceil(body.length / size) }, (_, i) => {
        const part = body.slice(i * size, (i + 1) * size);
        return `${part.length.toString(16)};ext=1\r\n${part}\r\n`;
      });
      const chunked = head.replace(/Content-Length: \d+/, "Transfer-Encoding: chunked");
      // head and body in one segment, the chunks as they come, and the last one by itself
      const text = await send(agent, [
        chunked + chunks[0]!,
        ...chunks.slice(1),
        "0\r\nTrailer: x\r\n",
        "\r\n",
      ]);
      expect([size, codes(text)]).toEqual([size, [200]]);
      expect(readFileSync(path, "utf8")).toBe(content);
    }
  }, 120_000);

  test("many requests in one segment, blank lines between them, a body nobody waited to be asked for", async () => {
    const paths = Array.from({ length: 20 }, (_, i) => `${agent.dir}/piped-${i}`);
    const text = paths
      .map((path, i) => {
        const { head, body } = upload(path, content + i, i % 2 ? "Expect: 100-continue\r\n" : "");
        return head + body + "\r\n".repeat(i % 4);
      })
      .join("");
    const answers = codes(await send(agent, [`\r\n\r\n\r\n${text}${GET}`]));
    expect(answers.filter((code) => code !== 100)).toEqual([...paths.map(() => 200), 204]);
    for (const [i, path] of paths.entries()) expect(readFileSync(path, "utf8")).toBe(content + i);
  }, 120_000);

  test("8 MiB in segments of odd sizes, several at a time, while another is asked small things", async () => {
    const piece = Buffer.alloc(8 << 20, "0123456789abcdef");
    const one = async (n: number) => {
      const path = `${agent.dir}/large-${n}`;
      const { head, body } = upload(path, "@");
      const [before, after] = body.split("@") as [string, string];
      const length = before.length + piece.length + after.length;
      const pieces: Uint8Array[] = [];
      for (let at = 0, k = n; at < piece.length; k++) {
        const size = [1, 4095, 65_537, 200_003, 16_384][k % 5]!;
        pieces.push(piece.subarray(at, at + size));
        at += size;
      }
      const start = head.replace(/Content-Length: \d+/, `Content-Length: ${length}`) + before;
      expect(codes(await send(agent, [start, ...pieces, after]))).toEqual([200]);
      expect(readFileSync(path).equals(piece)).toBe(true);
    };
    let asked = 0;
    let over = false;
    const asking = (async () => {
      for (; !over; asked++) expect(await health(agent)).toBe("204");
    })();
    await Promise.all(Array.from({ length: 8 }, (_, n) => one(n)));
    over = true;
    await asking;
    expect(asked).toBeGreaterThan(0);
  }, 120_000);
});

describe("too many of everything", () => {
  test("2,000 silent connections and 500 that never finish a head: others are served, memory stays small", async () => {
    await using a = await startAgent();
    const before = rssKiB(a);
    const sockets: Socket[] = [];
    for (let i = 0; i < 25; i++) {
      const more = await Promise.all(Array.from({ length: 100 }, async () => await open(a)));
      sockets.push(...more);
    }
    for (const s of sockets.slice(0, 500))
      s.write(`GET /health HTTP/1.1\r\nHost: x\r\nX: ${"y".repeat(3000)}`);
    for (const s of sockets) s.on("error", () => undefined);
    for (let i = 0; i < 20; i++) expect(await health(a)).toBe("204");
    expect((await sh(a, "echo on")).stdout).toBe("on\n");
    expect(rssKiB(a) - before).toBeLessThan(64 * 1024);
    // half of the descriptors are for connections
    const most = Number(/Max open files +(\d+)/.exec(readFileSync(`/proc/${a.pid}/limits`, "utf8"))?.[1]);
    expect(openFiles(a)).toBeGreaterThan(Math.min(2400, most / 2 - 100));
    for (const s of sockets) s.destroy();
    await eventually("all gone", () => openFiles(a) < 20);
  }, 120_000);

  test("with few descriptors idle connections make room, and what needs one is refused with the reason", async () => {
    await using a = await startAgent([], () => ["prlimit", "--nofile=80:80"]);
    const idle: Socket[] = [];
    for (let i = 0; i < 300; i++) {
      const s = await open(a);
      s.on("error", () => undefined);
      idle.push(s);
    }
    await eventually(
      "the oldest went",
      () => idle.filter((s) => s.destroyed || s.readyState !== "open").length > 0,
    );
    for (let i = 0; i < 10; i++) expect(await health(a)).toBe("204");
    expect((await sh(a, "echo on")).stdout).toBe("on\n");
    for (const s of idle) s.destroy();
    // processes until there is nothing left
    const stop = new AbortController();
    const refused: string[] = [];
    let running = 0;
    for (let i = 0; i < 40 && refused.length === 0; i++) {
      const body = { process: { cmd: "/bin/sleep", args: ["600"] }, tag: `many-${i}` };
      const response = await openStream(a, `${P}/Start`, body, {}, stop.signal);
      await Promise.race([
        collect(response, (f) => {
          if (f.event?.start) running++;
          if (f.error) refused.push(f.error.code);
        }).catch(() => undefined),
        eventually("started or refused", () => running + refused.length > i),
      ]);
    }
    expect(refused).toEqual(["resource_exhausted"]);
    expect(running).toBeGreaterThan(5);
    stop.abort();
    await eventually("room again", async () => (await health(a).catch(() => "")) === "204");
    for (let i = 0; i < running; i++)
      await call(a, `${P}/SendSignal`, { process: { tag: `many-${i}` }, signal: "SIGNAL_SIGKILL" });
    await eventually(
      "works again",
      async () => (await sh(a, "echo on").catch(() => undefined))?.stdout === "on\n",
    );
  }, 120_000);

  test("200 removals of trees and listings at once: each has its turn", async () => {
    const dir = `${agent.dir}/trees`;
    for (let i = 0; i < 100; i++) {
      mkdirSync(`${dir}/${i}/a/b`, { recursive: true });
      writeFileSync(`${dir}/${i}/a/b/f`, "");
    }
    const results = await Promise.all(
      Array.from({ length: 200 }, async (_, i) =>
        i % 2
          ? (await call(agent, `${F}/Remove`, { path: `${dir}/${(i - 1) / 2}` })).status
          : (await call(agent, `${F}/ListDir`, { path: `${agent.dir}/etc`, depth: 3 })).status,
      ),
    );
    expect(results).toEqual(results.map(() => 200));
    expect((await call(agent, `${F}/ListDir`, { path: dir })).body).toEqual({});
  }, 120_000);

  test("input for a process that reads nothing is bounded, also when the callers leave", async () => {
    const result = collect(
      await openStream(agent, `${P}/Start`, {
        process: { cmd: "/bin/sleep", args: ["600"] },
        tag: "deaf",
        stdin: true,
      }),
    );
    await eventually("started", async () =>
      JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("deaf"),
    );
    const before = rssKiB(agent);
    const field = (number: number, data: string | Uint8Array) => {
      const bytes = Buffer.from(data);
      const length: number[] = [];
      for (let n = bytes.length; ; n >>>= 7) {
        length.push(n > 127 ? (n & 127) | 128 : n);
        if (n <= 127) break;
      }
      return Buffer.concat([Buffer.from([(number << 3) | 2, ...length]), bytes]);
    };
    const body = Buffer.concat([field(1, field(2, "deaf")), field(2, field(1, Buffer.alloc(15 << 20)))]);
    const head = `POST /${P}/SendInput HTTP/1.1\r\nHost: x\r\nContent-Type: application/proto\r\nContent-Length: ${body.length}\r\n\r\n`;
    let refused = "";
    const sockets = await Promise.all(
      Array.from({ length: 6 }, async () => {
        const s = await open(agent);
        s.on("error", () => undefined);
        s.on("data", (d) => {
          refused += d.toString("latin1");
        });
        s.write(Buffer.concat([Buffer.from(head), body]));
        return s;
      }),
    );
    // four of them fill what there is room for
    const count = () => refused.split("HTTP/1.1 429 ").length - 1;
    await eventually("refused", () => count() === 2);
    for (const s of sockets) s.destroy();
    const again = { process: { tag: "deaf" }, input: { stdin: Buffer.alloc(5 << 20).toString("base64") } };
    expect((await call(agent, `${P}/SendInput`, again)).status).toBe(429);
    expect(rssKiB(agent) - before).toBeLessThan(130 * 1024);
    await call(agent, `${P}/SendSignal`, { process: { tag: "deaf" }, signal: "SIGNAL_SIGKILL" });
    await result;
    await eventually("given back", () => rssKiB(agent) - before < 48 * 1024);
  }, 120_000);

  test("a large tree that appears at once under a watch whose client does not read: bounded, and said", async () => {
    await using a = await startAgent();
    const dir = `${a.dir}/watched`;
    const name = "n".repeat(240);
    const tree = `${a.dir}/tree`;
    mkdirSync(dir);
    mkdirSync(`${tree}/${name}/${name}/${name}/${name}`, { recursive: true });
    await Bun.$`bash -c ${'cd "$1"/*/*/*/* && seq -f "$2%.0f" 1 22000 | xargs touch'} x ${tree} ${name}`;
    const body = Buffer.from(frame(JSON.stringify({ path: dir, recursive: true })));
    const s = await open(a);
    s.write(
      Buffer.concat([
        Buffer.from(
          `POST /${F}/WatchDir HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nContent-Length: ${body.length}\r\n\r\n`,
        ),
        body,
      ]),
    );
    await new Promise<void>((done) => s.once("data", () => done(void s.pause())));
    const before = rssKiB(a);
    await Bun.$`mv ${tree} ${dir}/tree`;
    await Bun.sleep(300);
    expect(await health(a)).toBe("204");
    let tail = "";
    s.on("data", (d) => {
      tail = (tail + d.toString("latin1")).slice(-2000);
    });
    s.resume();
    await eventually("the end of it", () => tail.includes("too slowly"));
    expect(rssKiB(a) - before).toBeLessThan(60 * 1024);
    s.destroy();
  }, 120_000);
});

describe("half-closed, cut, endless", () => {
  test("who closes the sending side after a request is answered, in the middle of one is dropped", async () => {
    const half = async (text: string) =>
      await new Promise<string>((done, failed) => {
        let out = "";
        const s = connect({ port: agent.port, host: "127.0.0.1", allowHalfOpen: true }, () => s.end(text));
        s.on("data", (d) => {
          out += d;
        });
        s.on("end", () => done(out));
        s.on("error", (e: NodeJS.ErrnoException) => (e.code === "ECONNRESET" ? done("reset") : failed(e)));
        s.setTimeout(20_000, () => s.destroy(new Error("no end")));
      });
    expect(codes(await half("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))).toEqual([204]);
    const { head, body } = upload(`${agent.dir}/half`, "half");
    expect(codes(await half(head + body))).toEqual([200]);
    expect(codes(await half(head + body.slice(0, 50)))).toEqual([]);
    expect(codes(await half("GET /health HT"))).toEqual([]);
  }, 120_000);

  test("a refused upload that never ends is answered, heard for a while, and cut", async () => {
    const before = openFiles(agent);
    const s = connect({ port: agent.port, host: "127.0.0.1", allowHalfOpen: true });
    let text = "";
    s.on("data", (d) => {
      text += d;
    });
    s.on("error", () => undefined);
    s.write("POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n");
    await eventually("answered", () => {
      if (!s.writableNeedDrain) s.write(Buffer.alloc(1 << 20));
      return text.includes("\r\n\r\n");
    });
    expect(codes(text)).toEqual([404]);
    expect(openFiles(agent)).toBeGreaterThan(before);
    // then it is silent: two seconds are enough
    await eventually("closed", () => openFiles(agent) <= before);
    s.destroy();
  }, 120_000);

  test("chunk lines and trailers without an end", async () => {
    const head = "POST /init HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    expect(codes(await raw(agent, `${head}1;${"x".repeat(70_000)}`))).toEqual([400]);
    expect(codes(await raw(agent, `${head}0\r\n${"A: b\r\n".repeat(5000)}`))).toEqual([400]);
    const stream = head
      .replace("/init", `/${P}/StreamInput`)
      .replace("Host: x", "Host: x\r\nContent-Type: application/connect+json");
    expect(codes(await raw(agent, `${stream}1;${"x".repeat(70_000)}`))).toEqual([400]);
    expect(await health(agent)).toBe("204");
  }, 120_000);
});

describe("files that are no files", () => {
  test("what never ends is read as far as it goes; nothing waits", async () => {
    const at = (path: string) => `${agent.url}/files?path=${encodeURIComponent(path)}`;
    await Bun.$`mkfifo ${agent.dir}/fifo`;
    expect((await fetch(at(`${agent.dir}/fifo`))).status).toBe(400);
    const kernel = await fetch(at("/proc/kmsg"), { signal: AbortSignal.timeout(10_000) });
    expect([200, 403, 500]).toContain(kernel.status);
    await kernel.text();
    expect(await health(agent)).toBe("204");
    // a pipe in the place of the accounts
    await using a = await startAgent();
    rmSync(`${a.dir}/etc/passwd`);
    await Bun.$`mkfifo ${a.dir}/etc/passwd`;
    expect((await sh(a, "echo on")).stdout).toBe("on\n");
  }, 120_000);

  test("times beyond every calendar", async () => {
    const path = `/dev/shm/times-${process.pid}`;
    writeFileSync(path, "content");
    try {
      for (const [seconds, http, json] of [
        [4e17, "Fri, 31 Dec 9999 23:59:59 GMT", "9999-12-31T23:59:59Z"],
        [-4e17, "Mon, 01 Jan 0001 00:00:00 GMT", "0001-01-01T00:00:00Z"],
      ] as const) {
        await Bun.$`python3 -c ${"import os,sys; t = int(sys.argv[2]); os.utime(sys.argv[1], (t, t))"} ${path} ${seconds}`;
        const file = await fetch(`${agent.url}/files?path=${path}`);
        expect([file.status, await file.text(), file.headers.get("last-modified")]).toEqual([
          200,
          "content",
          http,
        ]);
        const { entry } = (await call(agent, `${F}/Stat`, { path })).body as {
          entry: { modifiedTime: string };
        };
        expect(entry.modifiedTime).toBe(json);
      }
    } finally {
      rmSync(path);
    }
  });

  test.skipIf(notRoot)("a setting of the kernel can be written like a file", async () => {
    await using sleeper = Bun.spawn(["sleep", "600"], { stdio: ["ignore", "ignore", "ignore"] });
    const path = `/proc/${sleeper.pid}/oom_score_adj`;
    const put = async (path: string, body: string) =>
      await fetch(`${agent.url}/files?path=${encodeURIComponent(path)}`, {
        method: "POST",
        headers: { "content-type": "application/octet-stream" },
        body,
      });
    const answer = await put(path, "321");
    expect([answer.status, readFileSync(path, "utf8")]).toEqual([200, "321\n"]);
    expect((await put(`/proc/${sleeper.pid}/nothing`, "1")).status).toBe(404);
    expect((await put(path, "a lot")).status).toBe(400);
  });
});

describe("much in one request", () => {
  test("3,000 files in one form, the last one twice", async () => {
    const dir = `${agent.dir}/form`;
    const part = (name: string) =>
      `--b\r\nContent-Disposition: form-data; name="file"; filename="${dir}/${name}"\r\n\r\n${name}\r\n`;
    const names = Array.from({ length: 3000 }, (_, i) => `file-${i}`);
    const send = async (parts: string[]) =>
      await fetch(`${agent.url}/files`, {
        method: "POST",
        headers: { "content-type": "multipart/form-data; boundary=b" },
        body: `${parts.map(part).join("")}--b--\r\n`,
      });
    const all = await send(names);
    expect([all.status, ((await all.json()) as { name: string }[]).map((e) => e.name)]).toEqual([200, names]);
    for (const name of names) expect(readFileSync(`${dir}/${name}`, "utf8")).toBe(name);
    const twice = await send([...names, "file-1234"]);
    expect([twice.status, ((await twice.json()) as { message: string }).message]).toEqual([
      400,
      `you cannot upload twice to '${dir}/file-1234'`,
    ]);
  }, 120_000);

  test.skipIf(notRoot)(
    "a watch of everything stays out of the kernel's own directories",
    async () => {
      const mounted =
        'mkdir -p "$0/top/proc" "$0/top/tmp"; mount -t proc proc "$0/top/proc"; mount -t tmpfs tmpfs "$0/top/tmp"; exec "$@"';
      await using a = await startAgent([], (dir) => ["unshare", "-m", "sh", "-ec", mounted, dir]);
      const made = await call(a, `${F}/CreateWatcher`, { path: `${a.dir}/top`, recursive: true });
      expect(made.status).toBe(200);
      const watches = (await Bun.$`cat /proc/${a.pid}/fdinfo/*`.nothrow().text())
        .split("\n")
        .filter((l) => l.startsWith("inotify wd:"));
      expect(watches.length).toBe(2); // the top and its tmp
      await sh(a, `mkdir ${a.dir}/top/tmp/new; : > ${a.dir}/top/tmp/new/file`);
      const { watcherId } = made.body;
      const seen = new Set<string>();
      await eventually("events below a mount", async () => {
        const got = await call(a, `${F}/GetWatcherEvents`, { watcherId: watcherId! });
        for (const e of (got.body.events ?? []) as { name: string }[]) seen.add(e.name);
        return seen.has("tmp/new/file");
      });
    },
    120_000,
  );
});

test("after all of that nothing is left over", async () => {
  // connections that the client keeps for its next request are its own affair
  const held = async () =>
    (await Bun.$`ls -l /proc/${agent.pid}/fd`.text())
      .split("\n")
      .filter((line) => line.includes("->") && !line.includes("socket:"));
  await eventually("few open files", async () => (await held()).length <= 8);
  expect(await agent.errors()).toBe("");
});
