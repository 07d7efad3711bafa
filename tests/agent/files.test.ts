import { afterAll, beforeAll, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { lstatSync, readFileSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import {
  type Agent,
  call,
  eventually,
  frames,
  type Json,
  openStream,
  rssKiB,
  startAgent,
} from "./harness.ts";

let agent: Agent;
let home: string;
beforeAll(async () => {
  agent = await startAgent();
  home = `${agent.dir}/home/user`;
});
afterAll(async () => await agent[Symbol.asyncDispose]());

const at = (path: string, more = "") => `${agent.url}/files?path=${encodeURIComponent(path)}${more}`;
const put = async (
  path: string,
  body: string | Uint8Array<ArrayBuffer>,
  headers: Record<string, string> = {},
  more = "",
) =>
  await fetch(at(path, more), {
    method: "POST",
    headers: { "content-type": "application/octet-stream", ...headers },
    body,
  });
const get = async (path: string, headers: Record<string, string> = {}) =>
  await fetch(at(path), { headers: { "accept-encoding": "identity", ...headers } });

const all256 = Uint8Array.from({ length: 256 }, (_, i) => i);
const big = Buffer.alloc(8 << 20);
for (let i = 0; i < big.length; i += 4) big.writeUInt32LE(Math.imul(i, 2654435761) >>> 0, i);

test("round trips of 0 B, 1 B, all byte values, 8 MiB; raw and multipart", async () => {
  for (const [name, data] of [
    ["empty", Buffer.alloc(0)],
    ["one", Buffer.from("x")],
    ["all", Buffer.from(all256)],
    ["big", big],
  ] as const) {
    const path = `${agent.dir}/r/${name}`;
    expect(await (await put(path, data)).json()).toEqual([{ name, type: "file", path }]);
    const back = await get(path);
    expect(back.headers.get("content-length")).toBe(String(data.length));
    expect(Buffer.from(await back.arrayBuffer()).equals(data)).toBe(true);
    const form = new FormData();
    form.append("file", new Blob([data]), "ignored");
    expect((await fetch(at(`${path}-m`), { method: "POST", body: form })).status).toBe(200);
    expect(readFileSync(`${path}-m`).equals(data)).toBe(true);
  }
});

test("several files in one form, names kept whole", async () => {
  const names = [
    `${agent.dir}/m/a.txt`,
    "rel/.env",
    `${agent.dir}/m/sp ace #%"ü\n日本`,
    `${agent.dir}/m/empty`,
  ];
  const form = new FormData();
  form.append("other", "ignored");
  names.forEach((n, i) => {
    form.append("file", new Blob([i === 3 ? "" : `content ${i}`]), n);
  });
  const r = await fetch(`${agent.url}/files?username=user`, { method: "POST", body: form });
  const list = (await r.json()) as { name: string; path: string }[];
  expect(list.map((f) => f.path)).toEqual(names.map((n) => (n.startsWith("/") ? n : `${home}/${n}`)));
  expect(list[2]?.name).toBe('sp ace #%"ü\n日本');
  list.forEach((f, i) => {
    expect(readFileSync(f.path, "utf8")).toBe(i === 3 ? "" : `content ${i}`);
    expect([statSync(f.path).uid, statSync(f.path).gid, statSync(f.path).mode & 0o777]).toEqual([
      54321, 54321, 0o644,
    ]);
  });
  expect([statSync(`${agent.dir}/m`).uid, statSync(`${agent.dir}/m`).mode & 0o777]).toEqual([54321, 0o755]);
  expect(
    await (
      await fetch(`${agent.url}/files`, {
        method: "POST",
        body: (() => {
          const f = new FormData();
          f.append("x", "y");
          return f;
        })(),
      })
    ).json(),
  ).toEqual([]);
});

test("the same file twice: refused, the first one stays", async () => {
  const form = new FormData();
  form.append("file", new Blob(["first"]), `${agent.dir}/twice`);
  form.append("file", new Blob(["second"]), `${agent.dir}/./twice`);
  expect((await fetch(`${agent.url}/files`, { method: "POST", body: form })).status).toBe(400);
  expect(readFileSync(`${agent.dir}/twice`, "utf8")).toBe("first");
});

test("gzip uploads, and compressed download of text", async () => {
  const text = Buffer.from("line of text that repeats\n".repeat(40_000) + Math.random());
  expect((await put(`${agent.dir}/z`, Bun.gzipSync(text), { "content-encoding": "gzip" })).status).toBe(200);
  expect(readFileSync(`${agent.dir}/z`).equals(text)).toBe(true);
  for (const level of [0, 1, 9] as const) {
    await put(`${agent.dir}/z8`, Bun.gzipSync(big, { level }), { "content-encoding": "gzip" });
    expect(readFileSync(`${agent.dir}/z8`).equals(big)).toBe(true);
  }
  const part = `--b\r\nContent-Disposition: form-data; name="file"; filename="${agent.dir}/zm"\r\n\r\n${text}\r\n--b--\r\n`;
  const zippedForm = await fetch(`${agent.url}/files`, {
    method: "POST",
    headers: { "content-type": "multipart/form-data; boundary=b", "content-encoding": "gzip" },
    body: Bun.gzipSync(part),
  });
  expect([zippedForm.status, await zippedForm.text()]).toEqual([200, expect.stringContaining("zm")]);
  expect(readFileSync(`${agent.dir}/zm`).equals(text)).toBe(true);
  expect((await put(`${agent.dir}/z`, "not gzip", { "content-encoding": "gzip" })).status).toBe(400);
  expect(
    (await put(`${agent.dir}/z`, Bun.gzipSync(text).subarray(0, 90), { "content-encoding": "gzip" })).status,
  ).toBe(400);
  expect((await put(`${agent.dir}/z`, text, { "content-encoding": "br" })).status).toBe(400);
  await put(`${agent.dir}/z.txt`, text);
  const r = await fetch(at(`${agent.dir}/z.txt`), {
    headers: { "accept-encoding": "gzip" },
    decompress: false,
  } as RequestInit);
  const body = new Uint8Array(await r.arrayBuffer());
  expect([r.headers.get("content-encoding"), r.headers.get("content-length")]).toEqual(["gzip", null]);
  expect(body.length).toBeLessThan(text.length / 20);
  expect(Buffer.from(Bun.gunzipSync(body)).equals(text)).toBe(true);
});

test("download headers, ranges and conditions", async () => {
  const path = `${agent.dir}/h.txt`;
  writeFileSync(path, "0123456789");
  const whole = await get(path);
  const modified = whole.headers.get("last-modified")!;
  expect([
    whole.headers.get("content-disposition"),
    whole.headers.get("content-type"),
    whole.headers.get("accept-ranges"),
    whole.headers.get("vary"),
  ]).toEqual(["inline; filename=h.txt", "text/plain; charset=utf-8", "bytes", "Accept-Encoding"]);
  const range = async (value: string, more = {}) => {
    const r = await get(path, { range: value, ...more });
    return [r.status, r.headers.get("content-range"), await r.text()];
  };
  expect(await range("bytes=2-4")).toEqual([206, "bytes 2-4/10", "234"]);
  expect(await range("bytes=7-")).toEqual([206, "bytes 7-9/10", "789"]);
  expect(await range("bytes=-3")).toEqual([206, "bytes 7-9/10", "789"]);
  expect(await range("bytes=5-999")).toEqual([206, "bytes 5-9/10", "56789"]);
  expect(await range("bytes=10-")).toEqual([416, "bytes */10", ""]);
  expect(await range("bytes=4-2")).toEqual([416, "bytes */10", ""]);
  expect(await range("bytes=2-4", { "if-range": modified })).toEqual([206, "bytes 2-4/10", "234"]);
  expect(await range("bytes=2-4", { "if-range": "Thu, 01 Jan 1970 00:00:00 GMT" })).toEqual([
    200,
    null,
    "0123456789",
  ]);
  expect((await get(path, { "if-modified-since": modified })).status).toBe(304);
  expect((await get(path, { "if-modified-since": "Thu, 01 Jan 1970 00:00:00 GMT" })).status).toBe(200);
  expect((await get(path, { "accept-encoding": "identity;q=0" })).status).toBe(406);
  const odd = `${agent.dir}/sp "a"`;
  writeFileSync(odd, "");
  expect((await get(odd)).headers.get("content-disposition")).toBe('inline; filename="sp \\"a\\""');
  writeFileSync(`${agent.dir}/ü`, "");
  expect((await get(`${agent.dir}/ü`)).headers.get("content-disposition")).toBe(
    "inline; filename*=utf-8''%C3%BC",
  );
  expect(await (await get("/proc/self/comm")).text()).toBe("envd\n");
});

test("errors", async () => {
  expect((await get(`${agent.dir}/none`)).status).toBe(404);
  expect((await get(agent.dir)).status).toBe(400);
  expect((await get("/dev/null")).status).toBe(400);
  expect((await get("~other/x")).status).toBe(400);
  expect((await fetch(`${agent.url}/files?path=%zz`)).status).toBe(400);
  expect((await fetch(`${agent.url}/files?path=/x&username=nobody-here`)).status).toBe(401);
  expect((await put(agent.dir, "x")).status).toBe(400);
  expect((await put(`${agent.dir}/etc/passwd/x`, "x")).status).toBe(400);
  expect(
    (
      await fetch(`${agent.url}/files`, {
        method: "POST",
        headers: { "content-type": "application/octet-stream" },
        body: "x",
      })
    ).status,
  ).toBe(400);
  expect(
    (await fetch(at("/x"), { method: "POST", headers: { "content-type": "text/plain" }, body: "x" })).status,
  ).toBe(400);
  expect(
    (await fetch(at("/x"), { method: "POST", headers: { "content-type": "multipart/form-data" }, body: "x" }))
      .status,
  ).toBe(400);
  const cut = '--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf';
  expect(
    (
      await fetch(at(`${agent.dir}/cut`), {
        method: "POST",
        headers: { "content-type": "multipart/form-data; boundary=b" },
        body: cut,
      })
    ).status,
  ).toBe(400);
  expect((await fetch(at("/x"), { method: "DELETE" })).status).toBe(405);
  const error = (await (await get(`${agent.dir}/none`)).json()) as { code: number; message: string };
  expect(error.code).toBe(404);
  expect(error.message).toContain("No such file");
});

test("no space: 507", async () => {
  const dir = `${agent.dir}/full`;
  await Bun.$`mkdir -p ${dir} && mount -t tmpfs -o size=256k tmpfs ${dir}`;
  try {
    expect((await put(`${dir}/x`, Buffer.alloc(1 << 20, "x"))).status).toBe(507);
    const form = new FormData();
    form.append("file", new Blob([Buffer.alloc(1 << 20, "x")]), `${dir}/y`);
    expect((await fetch(`${agent.url}/files`, { method: "POST", body: form })).status).toBe(507);
  } finally {
    // The agent may close what it had open right after its answer.
    await eventually("unmounted", async () => (await Bun.$`umount ${dir}`.nothrow().quiet()).exitCode === 0);
  }
});

test("a slow downloader costs no memory", async () => {
  await put(`${agent.dir}/slow`, Buffer.alloc(32 << 20));
  const before = rssKiB(agent);
  const readers = await Promise.all(
    Array.from({ length: 8 }, async () => (await get(`${agent.dir}/slow`)).body!.getReader()),
  );
  for (const r of readers) await r.read();
  await Bun.sleep(100);
  expect(rssKiB(agent) - before).toBeLessThan(8 * 1024);
  for (const r of readers) await r.cancel();
});

test("metadata: stored, shown, replaced as a whole", async () => {
  const path = `${agent.dir}/meta`;
  const r = await put(path, "x", { "x-metadata-Author": "me", "x-metadata-n": "1" });
  expect(((await r.json()) as { metadata: object }[])[0]?.metadata).toEqual({ author: "me", n: "1" });
  const stat = async () =>
    ((await call(agent, "filesystem.Filesystem/Stat", { path })).body.entry as { metadata?: object })
      .metadata;
  expect(await stat()).toEqual({ author: "me", n: "1" });
  await put(path, "x", { "x-metadata-b": "2" });
  expect(await stat()).toEqual({ b: "2" });
  await put(path, "x");
  expect(await stat()).toBeUndefined();
  expect((await put(path, "x", { "x-metadata-a": "y".repeat(4096) })).status).toBe(400);
  expect((await put(path, "x", { [`x-metadata-${"k".repeat(247)}`]: "y" })).status).toBe(400);
});

test("signatures", async () => {
  await using a = await startAgent();
  const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
  await fetch(`${a.url}/init`, { method: "POST", body: JSON.stringify({ accessToken: token }) });
  const sign = (path: string, op: string, user: string, exp?: number) =>
    `v1_${createHash("sha256")
      .update(`${path}:${op}:${user}:${token}${exp ? `:${exp}` : ""}`)
      .digest("base64")
      .replace(/=+$/, "")}`;
  expect(sign("hello.txt", "read", "user")).toBe("v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E");
  const file = `${a.dir}/home/user/hello.txt`;
  writeFileSync(file, "hi");
  const url = (path: string, user: string, signature?: string, exp?: number) =>
    `${a.url}/files?path=${path}&username=${user}${signature ? `&signature=${encodeURIComponent(signature)}` : ""}${exp ? `&signature_expiration=${exp}` : ""}`;
  const now = Math.floor(Date.now() / 1000);
  const status = async (u: string, init?: RequestInit) => {
    const r = await fetch(u, init);
    return [r.status, r.status === 200 ? "" : ((await r.json()) as { message: string }).message];
  };
  expect(await status(url("hello.txt", "user", sign("hello.txt", "read", "user")))).toEqual([200, ""]);
  expect(
    await status(url("hello.txt", "user", sign("hello.txt", "read", "user", now + 60), now + 60)),
  ).toEqual([200, ""]);
  expect(await status(url("hello.txt", "user", sign("hello.txt", "read", "user", now - 5), now - 5))).toEqual(
    [401, "signature is already expired"],
  );
  expect(await status(url("hello.txt", "user"))).toEqual([401, "missing signature query parameter"]);
  for (const wrong of [sign("hello.txt", "write", "user"), sign("hello.txt", "read", "root"), "v1_", "x"])
    expect(await status(url("hello.txt", "user", wrong))).toEqual([401, "invalid signature"]);
  // a header token decides alone
  expect((await status(url("hello.txt", "user"), { headers: { "x-access-token": token } }))[0]).toBe(200);
  expect(
    (
      await status(url("hello.txt", "user", sign("hello.txt", "read", "user")), {
        headers: { "x-access-token": "no" },
      })
    )[0],
  ).toBe(401);
  const form = new FormData();
  form.append("file", new Blob(["up"]), "up.txt");
  const upload = `${a.url}/files?username=user&signature=${encodeURIComponent(sign("", "write", "user"))}`;
  expect((await status(upload, { method: "POST", body: form }))[0]).toBe(200);
  expect(readFileSync(`${a.dir}/home/user/up.txt`, "utf8")).toBe("up");
});

test("compose joins parts and removes them", async () => {
  for (const i of [0, 1, 2]) await put(`${agent.dir}/part${i}`, `<${i}>`);
  const compose = async (body: Json) =>
    await fetch(`${agent.url}/files/compose`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
  const parts = [0, 1, 2].map((i) => `${agent.dir}/part${i}`);
  const r = await compose({ source_paths: parts, destination: `${agent.dir}/new/whole`, username: "user" });
  expect([r.status, await r.json()]).toEqual([
    200,
    { name: "whole", type: "file", path: `${agent.dir}/new/whole` },
  ]);
  expect(readFileSync(`${agent.dir}/new/whole`, "utf8")).toBe("<0><1><2>");
  expect(statSync(`${agent.dir}/new/whole`).uid).toBe(54321);
  expect((await compose({ source_paths: parts, destination: `${agent.dir}/w2` })).status).toBe(404);
  expect((await compose({ source_paths: [], destination: "x" })).status).toBe(400);
  expect((await compose({ source_paths: ["a"], destination: "b", username: "nobody-here" })).status).toBe(
    401,
  );
});

const F = "filesystem.Filesystem";
const entry = async (path: string) =>
  (await call(agent, `${F}/Stat`, { path })).body.entry as Record<string, Json>;

test("Stat: files, directories, links", async () => {
  const dir = `${agent.dir}/st`;
  await Bun.$`mkdir ${dir} && printf abc > ${dir}/f && chown 54321:54400 ${dir}/f && chmod 4750 ${dir}/f && mkfifo ${dir}/p`;
  symlinkSync("f", `${dir}/l`);
  symlinkSync("none", `${dir}/broken`);
  symlinkSync(dir, `${dir}/d`);
  const f = await entry(`${dir}/f`);
  expect(f).toMatchObject({
    name: "f",
    type: "FILE_TYPE_FILE",
    path: `${dir}/f`,
    size: "3",
    mode: 0o750,
    permissions: "urwxr-x---",
    owner: "user",
    group: "extra",
  });
  expect(Math.abs(Date.parse(f.modifiedTime as string) - Date.now())).toBeLessThan(60_000);
  expect(await entry(`${dir}/l`)).toMatchObject({
    type: "FILE_TYPE_FILE",
    mode: 0o750,
    permissions: "Lrwxrwxrwx",
    symlinkTarget: `${dir}/f`,
    size: "1",
  });
  expect(await entry(`${dir}/d`)).toMatchObject({ type: "FILE_TYPE_DIRECTORY", symlinkTarget: dir });
  const broken = await entry(`${dir}/broken`);
  expect([broken.type, broken.mode, broken.symlinkTarget]).toEqual([undefined, undefined, `${dir}/broken`]);
  expect((await entry(`${dir}/p`)).permissions).toBe("prw-r--r--");
  expect((await entry("/tmp")).permissions).toBe("dtrwxrwxrwx");
  expect((await entry("/dev/null")).permissions).toBe("Dcrw-rw-rw-");
  expect((await call(agent, `${F}/Stat`, { path: `${dir}/none` })).body).toMatchObject({ code: "not_found" });
});

test("ListDir: depth, order, links", async () => {
  const dir = `${agent.dir}/ls`;
  await Bun.$`mkdir -p ${dir}/b/c/d ${dir}/a && touch ${dir}/B ${dir}/b/c/f ${dir}/a/x`;
  symlinkSync(`${dir}/b`, `${dir}/link`);
  const list = async (path: string, depth?: number) => {
    const { body } = await call(agent, `${F}/ListDir`, { path, ...(depth === undefined ? {} : { depth }) });
    return (
      body.code ?? (body.entries as { path: string }[] | undefined)?.map((e) => e.path.slice(path.length))
    );
  };
  expect(await list(dir)).toEqual(["/B", "/a", "/b", "/link"]);
  expect(await list(dir, 1)).toEqual(["/B", "/a", "/b", "/link"]);
  expect(await list(dir, 2)).toEqual(["/B", "/a", "/a/x", "/b", "/b/c", "/link"]);
  expect(await list(dir, 9)).toEqual(["/B", "/a", "/a/x", "/b", "/b/c", "/b/c/d", "/b/c/f", "/link"]);
  expect(await list(`${dir}/link`, 2)).toEqual(["/c", "/c/d", "/c/f"]);
  expect(await list(`${dir}/B`)).toBe("invalid_argument");
  expect(await list(`${dir}/none`)).toBe("not_found");
  symlinkSync("loop", `${dir}/loop`);
  expect(await list(`${dir}/loop`)).toBe("failed_precondition");
});

test("MakeDir, Move, Remove", async () => {
  const dir = `${agent.dir}/ops`;
  const user = { authorization: `Basic ${btoa("user:")}` };
  const make = async (path: string) => (await call(agent, `${F}/MakeDir`, { path }, user)).body;
  expect((await make(`${dir}/x/y`)).entry).toMatchObject({ type: "FILE_TYPE_DIRECTORY", owner: "user" });
  expect((await make(`${dir}/x/y/`)).code).toBe("already_exists");
  writeFileSync(`${dir}/file`, "1");
  expect((await make(`${dir}/file`)).code).toBe("invalid_argument");
  expect((await make(`${dir}/file/z`)).code).toBe("internal");
  const move = async (source: string, destination: string) =>
    (await call(agent, `${F}/Move`, { source, destination }, user)).body;
  expect((await move(`${dir}/file`, `${dir}/n/e/w`)).entry).toMatchObject({
    name: "w",
    path: `${dir}/n/e/w`,
  });
  expect((await move(`${dir}/file`, `${dir}/z`)).code).toBe("not_found");
  expect((await move(`${dir}/n`, `${dir}/x`)).code).toBe("internal"); // not empty
  expect((await move(`${dir}/n`, "/dev/shm/aenv-guest-test")).code).toBe("internal"); // another file system
  symlinkSync(`${dir}/x`, `${dir}/tox`);
  const remove = async (path: string) => (await call(agent, `${F}/Remove`, { path }, user)).body;
  expect(await remove(`${dir}/tox/`)).toEqual({});
  expect(lstatSync(`${dir}/x`).isDirectory()).toBe(true);
  await Bun.$`mkdir -p ${dir}/x/1/2/3 && touch ${dir}/x/1/2/3/f`;
  expect(await remove(dir)).toEqual({});
  expect(await remove(dir)).toEqual({});
  expect((await call(agent, `${F}/Stat`, { path: dir })).status).toBe(404);
  expect((await remove("/")).code).toBe("invalid_argument");
  expect((await remove("/tmp/../")).code).toBe("invalid_argument");
});

test("WatchDir: events of a tree that grows", async () => {
  const dir = `${agent.dir}/w`;
  await Bun.$`mkdir -p ${dir}/old`;
  const stop = new AbortController();
  const response = await openStream(
    agent,
    `${F}/WatchDir`,
    { path: dir, recursive: true, includeEntry: true },
    {},
    stop.signal,
  );
  const seen: string[] = [];
  let withEntry = 0;
  const reading = (async () => {
    try {
      for await (const f of frames(response)) {
        if (f.start) seen.push("start");
        if (f.filesystem) seen.push(`${f.filesystem.type.slice(11)} ${f.filesystem.name}`);
        if (f.filesystem?.entry) withEntry++;
      }
    } catch (error) {
      if (!stop.signal.aborted) throw error;
    }
  })();
  await eventually("start", () => seen.includes("start"));
  await Bun.$`mkdir -p ${dir}/a/b/c && echo x > ${dir}/a/b/c/f && echo y > ${dir}/old/g && mv ${dir}/old/g ${dir}/g && chmod 600 ${dir}/g && rm ${dir}/g`;
  for (const want of [
    "CREATE a",
    "CREATE a/b",
    "CREATE a/b/c",
    "CREATE a/b/c/f",
    "WRITE a/b/c/f",
    "CREATE old/g",
    "RENAME old/g",
    "CREATE g",
    "CHMOD g",
    "REMOVE g",
  ])
    await eventually(want, () => seen.includes(want));
  await Bun.$`rm -r ${dir}/a && mkdir -p ${dir}/a && touch ${dir}/a/again`;
  await eventually("again", () => seen.includes("CREATE a/again"));
  expect(seen.filter((s) => s === "CREATE a/b/c/f").length).toBe(1);
  expect(withEntry).toBeGreaterThan(0);
  stop.abort();
  await reading;
  const error = async (path: string) => {
    for await (const f of frames(await openStream(agent, `${F}/WatchDir`, { path }))) return f.error?.code;
    return "no frame";
  };
  expect(await error(`${dir}/none`)).toBe("not_found");
  expect(await error("/etc/passwd")).toBe("invalid_argument");
});

test("queued watcher", async () => {
  const dir = `${agent.dir}/q`;
  await Bun.$`mkdir -p ${dir}`;
  const { body } = await call(agent, `${F}/CreateWatcher`, { path: dir });
  const watcherId = body.watcherId as string;
  await Bun.$`touch ${dir}/x && mkdir ${dir}/sub && touch ${dir}/sub/y`;
  const events = await eventually("events", async () => {
    const r = (await call(agent, `${F}/GetWatcherEvents`, { watcherId })).body;
    return r.events as { name: string; type: string }[] | undefined;
  });
  expect(events).toContainEqual({ name: "x", type: "EVENT_TYPE_CREATE" });
  expect(events.some((e) => e.name.includes("/"))).toBe(false);
  expect((await call(agent, `${F}/RemoveWatcher`, { watcherId })).status).toBe(200);
  expect((await call(agent, `${F}/GetWatcherEvents`, { watcherId })).status).toBe(404);
});

async function cutOff(text: string): Promise<void> {
  await new Promise<void>((done) => {
    const s = connect(agent.port, "127.0.0.1", () => s.write(text, () => s.end()));
    s.on("data", () => s.resume());
    s.on("error", () => done());
    s.on("close", () => done());
  });
}

test("an upload cut off in the middle leaves no descriptor open", async () => {
  const count = async () => (await Bun.$`ls -l /proc/${agent.pid}/fd`.text()).split(agent.dir).length;
  const before = await count();
  for (let i = 0; i < 5; i++)
    await cutOff(
      `POST /files?path=${agent.dir}/half HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: 99\r\n\r\nabc`,
    );
  await eventually("closed", async () => (await count()) <= before);
});
