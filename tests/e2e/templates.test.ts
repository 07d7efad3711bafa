import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  rmSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type LogEntry, Sandbox, Template, waitForFile, waitForPort } from "e2b";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { eventually } from "../support/eventually.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/*
 * Template builds through the unmodified SDK against the executable, a real registry and real VMs. The tests
 * share one server; each has its own template.
 */

let server: TestServer;
let registry: LocalRegistry;
let connection: { apiKey: string; apiUrl: string; sandboxUrl: string };
let context: string;
const SMALL = { cpuCount: 1, memoryMB: 384 };

beforeAll(async () => {
  server = await TestServer.create({ toml: "[image.cache]\nvirtual_size_gib = 4\n" });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  connection = await server.connection();
  context = mkdtempSync(join(tmpdir(), "image6-context-"));
  mkdirSync(join(context, "app/sub dir"), { recursive: true });
  mkdirSync(join(context, "conf.d"));
  writeFileSync(join(context, "app/main.py"), "print('main')\n");
  writeFileSync(join(context, "app/sub dir/näme"), "odd");
  writeFileSync(join(context, "app/run.sh"), "#!/bin/sh\necho ran\n");
  chmodSync(join(context, "app/run.sh"), 0o755);
  symlinkSync("main.py", join(context, "app/link"));
  writeFileSync(join(context, "a.txt"), "a");
  writeFileSync(join(context, "b.txt"), "b");
  writeFileSync(join(context, "conf.d/one.conf"), "1");
  writeFileSync(join(context, "conf.d/two.conf"), "2");
  writeFileSync(join(context, "secret.env"), "no");
  writeFileSync(join(context, ".dockerignore"), "# not these\n*.env\n");
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
  if (context !== undefined) rmSync(context, { recursive: true, force: true });
}, 180_000);

interface Built {
  readonly templateId: string;
  readonly buildId: string;
  readonly messages: string[];
  readonly seconds: number;
}

type AnyTemplate = Parameters<typeof Template.build>[0];

async function build(
  template: AnyTemplate,
  name: string,
  options: { skipCache?: boolean } = {},
): Promise<Built> {
  const messages: string[] = [];
  const began = performance.now();
  const info = await Template.build(template, name, {
    ...connection,
    ...SMALL,
    ...options,
    onBuildLogs: (entry: LogEntry) => void messages.push(entry.message),
  });
  return { ...info, messages, seconds: (performance.now() - began) / 1000 };
}

async function inside<T>(template: string, use: (sandbox: Sandbox) => Promise<T>): Promise<T> {
  const sandbox = await Sandbox.create(template, { ...connection, timeoutMs: 300_000 });
  try {
    return await use(sandbox);
  } finally {
    await sandbox.kill();
  }
}

const sh = async (sandbox: Sandbox, script: string, user = "root"): Promise<string> =>
  (await sandbox.commands.run(script, { user })).stdout.trim();

const api = (method: string, path: string) =>
  fetch(`${server.url}${path}`, { method, headers: { "x-api-key": connection.apiKey } });

test("fromDockerfile (FR-57): several sources, directories, links, owners, ENV, USER and WORKDIR as with docker", async () => {
  const dockerfile = `FROM ${registry.debian}
ENV GREETING=hello EMPTY=
ARG VERSION=1.2
RUN useradd -m app && mkdir -p /existing/sub && echo old > /existing/old
WORKDIR /srv/work
COPY a.txt b.txt files/
COPY app /existing
COPY --chown=app:app app/ ./mine/
COPY conf.d/*.conf /etc/conf/
COPY a.txt /renamed
USER app
RUN id -un > who && echo "$GREETING $VERSION" > said
`;
  const template = Template({ fileContextPath: context }).fromDockerfile(dockerfile);
  // The directory a WORKDIR makes belongs to root here, as USER comes later.
  await expect(build(template, "docker-refused")).rejects.toThrow(/who|[Pp]ermission/);

  const fixed = Template({ fileContextPath: context }).fromDockerfile(
    dockerfile.replace("USER app\n", "RUN chown app /srv/work\nUSER app\n"),
  );
  const built = await build(fixed, "docker");
  expect(built.messages.some((line) => line.startsWith("CACHED [3/"))).toBe(true);
  await inside("docker", async (sandbox) => {
    // Defaults of the final state.
    const defaults = await sandbox.commands.run('id -un; pwd; echo "$GREETING|$EMPTY|$VERSION"');
    expect(defaults.stdout).toBe("app\n/srv/work\nhello||1.2\n");
    expect(await sh(sandbox, "cat /srv/work/who /srv/work/said")).toBe("app\nhello 1.2");
    expect(await sh(sandbox, "cat files/a.txt files/b.txt; ls -A files", "app")).toBe("aba.txt\nb.txt");
    // A directory's content merges into one that exists; what was there stays.
    expect(await sh(sandbox, "cd /existing && find . | LC_ALL=C sort")).toBe(
      [".", "./link", "./main.py", "./old", "./run.sh", "./sub", "./sub dir", "./sub dir/näme"].join("\n"),
    );
    expect(await sh(sandbox, "readlink /existing/link; stat -c %a /existing/run.sh; /existing/run.sh")).toBe(
      "main.py\n755\nran",
    );
    expect(await sh(sandbox, "stat -c %U:%G /srv/work/mine /srv/work/mine/main.py /existing/main.py")).toBe(
      "app:app\napp:app\nroot:root",
    );
    expect(await sh(sandbox, "ls /etc/conf; cat /renamed")).toBe("one.conf\ntwo.conf\na");
  });
}, 180_000);

test("fromImage, copy, runCmd, skipCache (FR-66): the step cache: a changed step reuses those before it; a new mtime changes nothing; skipCache runs all", async () => {
  const make = (last: string, force = false) => {
    let template = Template({ fileContextPath: context }).fromImage(registry.debian);
    if (force) template = template.skipCache();
    template = template.setUser("root").copy("app", "/app");
    for (let i = 3; i <= 8; i++)
      template = template.runCmd(`head -c 16 /dev/urandom | od -An -tx1 > /random-${i}`);
    return template.runCmd(`echo ${last} > /last`).runCmd("cat /last > /copy");
  };
  const contents = (name: string) =>
    inside(name, (sandbox) => sh(sandbox, "cat /random-3 /random-8; cat /last /copy"));
  const first = await build(make("one"), "cached");
  expect(first.messages.filter((line) => line.startsWith("CACHED"))).toEqual([]);
  const before = await contents("cached");

  const now = new Date();
  utimesSync(join(context, "app/main.py"), now, now);
  const second = await build(make("two"), "cached");
  expect(second.templateId).toBe(first.templateId);
  expect(second.buildId).not.toBe(first.buildId);
  const cached = second.messages.filter((line) => line.startsWith("CACHED"));
  expect(cached.map((line) => line.split(" ")[1])).toEqual([1, 2, 3, 4, 5, 6, 7, 8].map((i) => `[${i}/10]`));
  expect(second.messages).toContain("Skipping upload of 'app', already cached");
  expect(await contents("cached")).toBe(before.replace("one\none", "two\ntwo"));
  console.log(
    `first build ${first.seconds.toFixed(1)} s, with steps 9 and 10 changed ${second.seconds.toFixed(1)} s`,
  );
  expect(second.seconds).toBeLessThan(Math.max(15, first.seconds));

  const whole = await build(make("two"), "cached");
  expect(whole.messages.filter((line) => line.startsWith("CACHED")).length).toBe(10);
  const forced = await build(make("two"), "cached", { skipCache: true });
  expect(forced.messages.filter((line) => line.startsWith("CACHED"))).toEqual([]);
  expect(await contents("cached")).not.toBe(before.replace("one\none", "two\ntwo"));
}, 240_000);

test("setStartCmd, fromTemplate: start command and readiness: the process of the snapshot answers in every sandbox; fromTemplate goes on", async () => {
  const port = 8080;
  const template = Template()
    .fromImage(registry.debian)
    .setUser("root")
    .setWorkdir("/srv")
    .runCmd("echo served > index.html")
    .setStartCmd(
      `python3 -m http.server ${port}`,
      `python3 -c 'import socket; socket.create_connection(("127.0.0.1", ${port}))'`,
    );
  await build(template, "served");
  await inside("served", async (sandbox) => {
    const url = `${server.url}/index.html`;
    const headers = { "e2b-sandbox-id": sandbox.sandboxId, "e2b-sandbox-port": String(port) };
    const token = (sandbox as unknown as { trafficAccessToken?: string }).trafficAccessToken;
    const reply = await fetch(url, {
      headers: { ...headers, ...(token === undefined ? {} : { "e2b-traffic-access-token": token }) },
    });
    expect(await reply.text()).toBe("served\n");
  });
  const child = Template()
    .fromTemplate("served")
    .runCmd("pgrep -f http.server > /pid || ls -d /proc/[0-9]* > /pid");
  await build(child, "served-child");
  await inside("served-child", async (sandbox) => {
    expect(await sh(sandbox, "pwd; cat index.html; test -s /pid && echo there")).toBe("/srv\nserved\nthere");
  });
}, 180_000);

test("waitForPort (FR-59) is for that port alone: a listener on 8080 is not one on 80", async () => {
  // The image has no iproute2: the machine's own `ss` with its libraries, as a COPY of a directory.
  const ss = Bun.which("ss");
  if (ss === null) throw new Error("ss is not installed (iproute2)");
  mkdirSync(join(context, "ss"));
  copyFileSync(ss, join(context, "ss/ss"));
  const linked = Bun.spawnSync(["ldd", ss]).stdout.toString();
  for (const [, name, path] of linked.matchAll(/^\s*(\S+) => (\/\S+)/gm))
    if (!/^lib(c|m|dl|pthread)\.so/.test(name!)) copyFileSync(path!, join(context, "ss", name!));
  const template = Template({ fileContextPath: context })
    .fromImage(registry.debian)
    .setUser("root")
    .copy("ss", "/opt/ss/", { mode: 0o755 })
    .runCmd(
      "printf '#!/bin/sh\\nLD_LIBRARY_PATH=/opt/ss exec /opt/ss/ss \"$@\"\\n' > /usr/bin/ss && chmod 755 /usr/bin/ss && ss -Htuln",
    )
    .setStartCmd("python3 -m http.server 8080 & sleep 5; exec python3 -m http.server 80", waitForPort(80));
  await build(template, "ports");
  await inside("ports", async (sandbox) => {
    expect(await sh(sandbox, "ss -Htln | grep -cE ':(80|8080) '")).toBe("2");
  });
}, 180_000);

test("FR-60: a start command that fails ends the build with its output", async () => {
  const template = Template()
    .fromImage(registry.debian)
    .setUser("root")
    .setStartCmd("echo going down >&2; exit 1", waitForFile("/never"));
  await expect(build(template, "failing")).rejects.toThrow(/start command: exit status 1: going down/);
}, 180_000);

test("tags, exists, buildInBackground, getBuildStatus (FR-62): background build and its status", async () => {
  expect(await Template.exists("tagged", connection)).toBe(false);
  const template = Template().fromImage(registry.debian).setUser("root").runCmd("echo tagged > /tag");
  const info = await Template.buildInBackground(template, "tagged:v1", {
    ...connection,
    ...SMALL,
    tags: ["stable"],
  });
  expect(info.tags.toSorted()).toEqual(["stable", "v1"]);
  let offset = 0;
  const seen: string[] = [];
  let status = "";
  for (let i = 0; i < 600 && status !== "ready"; i++) {
    const now = await Template.getBuildStatus(info, { ...connection, logsOffset: offset });
    offset += now.logEntries.length;
    seen.push(...now.logEntries.map((entry) => entry.message));
    status = now.status;
    if (status === "error") throw new Error(now.reason?.message);
    await Bun.sleep(100);
  }
  const tail = await Template.getBuildStatus(info, { ...connection, logsOffset: offset });
  seen.push(...tail.logEntries.map((entry) => entry.message));
  expect(seen).toContain("[2/2] RUN echo tagged > /tag");
  expect(new Set(seen).size).toBe(seen.length);
  expect(await Template.exists("tagged", connection)).toBe(true);
  expect(await Template.exists("tagged:v1", connection)).toBe(true);
  expect(await Template.exists("tagged:stable", connection)).toBe(true);
  expect(await Template.exists("tagged:missing", connection)).toBe(false);
  await inside("tagged:stable", async (sandbox) => {
    expect(await sh(sandbox, "cat /tag")).toBe("tagged");
    // Deleted while it is in use: its users have what they need, also across a pause.
    expect((await api("DELETE", `/templates/${info.templateId}`)).status).toBe(204);
    expect(await Template.exists("tagged", connection)).toBe(false);
    await sandbox.pause();
    const again = await Sandbox.connect(sandbox.sandboxId, connection);
    expect(await sh(again, "cat /tag; sha256sum /usr/bin/python3 | wc -c")).toBe("tagged\n83");
  });
}, 180_000);

describe("bounds", () => {
  test("FR-59, FR-60: steps that fail, by exit code and by a full disk, name themselves and give their last lines", async () => {
    const template = Template()
      .fromImage(registry.debian)
      .setUser("root")
      .runCmd("seq -f 'line %g' 1 5000; echo broken >&2; exit 7");
    const info = await Template.buildInBackground(template, "fails", { ...connection, ...SMALL });
    const failed = await ended(info);
    expect(failed.reason).toMatchObject({ step: "2" });
    expect(failed.reason.message).toMatch(/exit status 7: broken/);
    expect(failed.reason.logEntries).toHaveLength(50);
    const lines = failed.reason.logEntries.map((entry) => entry.message);
    expect(lines).toContain("line 5000");
    expect(failed.reason.logEntries.find((entry) => entry.message === "broken")?.level).toBe("warn");

    const full = Template().fromImage(registry.debian).setUser("root").runCmd("fallocate -l 8G /big");
    await expect(build(full, "full")).rejects.toThrow(/No space left|fallocate/);
  }, 180_000);

  test("FR-60: a build that hangs is cancelled, and the template can be built again and deleted", async () => {
    const template = Template().fromImage(registry.debian).setUser("root").runCmd("echo began; sleep 3600");
    const info = await Template.buildInBackground(template, "hangs", { ...connection, ...SMALL });
    await logged(info, "began");
    // Readers of the log that go away in the middle change nothing.
    const status = `/templates/${info.templateId}/builds/${info.buildId}/status`;
    await Promise.all(
      Array.from({ length: 20 }, async () => {
        const gone = new AbortController();
        const reading = fetch(`${server.url}${status}?logsOffset=0`, {
          headers: { "x-api-key": connection.apiKey },
          signal: gone.signal,
        });
        gone.abort();
        await expect(reading).rejects.toThrow(/abort/i);
      }),
    );
    expect(((await (await api("GET", status)).json()) as { status: string }).status).toBe("building");
    expect((await api("DELETE", `/templates/${info.templateId}`)).status).toBe(409);
    expect((await api("DELETE", `/templates/${info.templateId}/builds/${info.buildId}`)).status).toBe(204);
    expect((await ended(info)).reason).toMatchObject({ message: "the build was cancelled", step: "2" });
    expect((await api("DELETE", `/templates/${info.templateId}/builds/${info.buildId}`)).status).toBe(409);
    expect((await hostObjects(server)).filter((line) => line.includes("qemu"))).toEqual([]);
    expect((await api("DELETE", `/templates/${info.templateId}`)).status).toBe(204);
  }, 180_000);

  test("an image that does not exist, and files that were not uploaded", async () => {
    const missing = Template().fromImage(`${registry.host}/no/such:1`);
    await expect(build(missing, "missing")).rejects.toThrow(/no\/such/);
    const { body } = await start("nofiles");
    const steps = [{ type: "COPY", args: ["a", "/a", "", ""], filesHash: "0".repeat(64) }];
    await startBuild(body, { fromImage: registry.debian, steps });
    expect((await ended({ templateId: body.templateID, buildId: body.buildID })).reason).toMatchObject({
      step: "1",
      message: expect.stringContaining("not uploaded"),
    });
  }, 180_000);

  test("FR-60: a server killed in mid-build: the build has failed after the restart, with the log it had", async () => {
    const template = Template()
      .fromImage(registry.debian)
      .setUser("root")
      .runCmd("echo early line; sleep 3600");
    const info = await Template.buildInBackground(template, "killed", { ...connection, ...SMALL });
    await logged(info, "early line");
    // The log goes to its file now and then.
    await eventually("the log is kept", async () => {
      const named =
        await Bun.$`find ${server.home} -name ${`${info.buildId}.jsonl`} -exec grep -F ${'"early line"'} {} +`
          .quiet()
          .nothrow();
      return named.stdout.length > 0;
    });
    await server.kill9();
    await server.start();
    const failed = await ended(info);
    expect(failed.reason.message).toContain("restarted while the build ran");
    expect(failed.reason.logEntries.map((entry) => entry.message)).toContain("early line");
    await eventually("no VM is left", async () =>
      (await hostObjects(server)).every((line) => !line.includes("qemu")),
    );
    // Cached steps are still there.
    const again = Template().fromImage(registry.debian).setUser("root").runCmd("echo tagged > /tag");
    const built = await build(again, "killed");
    expect(built.messages.some((line) => line.startsWith("CACHED [2/2]"))).toBe(true);
  }, 180_000);
});

interface StatusJson {
  readonly status: string;
  readonly logEntries: { readonly message: string; readonly level: string }[];
  readonly reason: {
    readonly message: string;
    readonly step?: string;
    readonly logEntries: { readonly message: string; readonly level: string }[];
  };
}

async function status(info: { templateId: string; buildId: string }): Promise<StatusJson> {
  const reply = await api("GET", `/templates/${info.templateId}/builds/${info.buildId}/status`);
  expect(reply.status).toBe(200);
  return (await reply.json()) as StatusJson;
}

async function ended(info: { templateId: string; buildId: string }): Promise<StatusJson> {
  for (let i = 0; i < 600; i++) {
    const now = await status(info);
    if (now.status === "error") return now;
    if (now.status === "ready") throw new Error("the build succeeded");
    await Bun.sleep(100);
  }
  throw new Error("the build did not end");
}

async function logged(info: { templateId: string; buildId: string }, line: string): Promise<void> {
  for (let i = 0; i < 600; i++) {
    const { logEntries } = await status(info);
    if (logEntries.some((entry) => entry.message === line)) return;
    await Bun.sleep(100);
  }
  throw new Error(`the log never had: ${line}`);
}

async function post(path: string, body: unknown): Promise<Response> {
  return fetch(`${server.url}${path}`, {
    method: "POST",
    headers: { "x-api-key": connection.apiKey, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function start(name: string): Promise<{ body: { templateID: string; buildID: string } }> {
  const reply = await post("/v3/templates", { name, ...SMALL });
  expect(reply.status).toBe(202);
  return { body: (await reply.json()) as { templateID: string; buildID: string } };
}

async function startBuild(body: { templateID: string; buildID: string }, request: unknown): Promise<void> {
  const reply = await post(`/v2/templates/${body.templateID}/builds/${body.buildID}`, request);
  expect(reply.status).toBe(202);
}

test("after all: nothing is left of any build", async () => {
  // Network slots are made ahead and kept while the server runs.
  const vms = (await hostObjects(server)).filter((line) => line.includes("qemu"));
  expect(vms).toEqual([]);
  expect(await server.stop()).toBe(0);
  expect(await hostObjects(server)).toEqual([]);
}, 180_000);
