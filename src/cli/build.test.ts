import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type Build, CliRig } from "../../tests/support/cli-rig.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { Api } from "./api.ts";
import { followBuild, templateNameOf } from "./build.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

let rig: CliRig;
beforeAll(async () => {
  rig = await CliRig.start();
});
afterAll(() => rig[Symbol.asyncDispose]());

const entry = (message: string, level: "debug" | "info" | "warn" | "error" = "info") => ({
  timestamp: "2026-01-02T03:04:05.000Z",
  level,
  message,
});

/** A build that is at work until `finish` is called. */
function working(): { readonly build: Promise<Build> } {
  const { promise, resolve } = Promise.withResolvers<Build>();
  rig.onBuild = resolve;
  return { build: promise };
}

/** Until a look at a build, begun after this call, has been answered. */
async function lookedAt(): Promise<void> {
  const looks = () => rig.calls.filter((call) => /^GET .*\/builds\/.*\/status$/.test(call)).length;
  const before = looks();
  await eventually("the build is looked at", () => looks() > before + 1);
}

describe("aenv build", () => {
  let context: string;
  beforeAll(() => {
    context = mkdtempSync(join(tmpdir(), "image6-build-"));
    mkdirSync(join(context, "src"));
    writeFileSync(join(context, "src/main.py"), "print(1)\n");
    writeFileSync(join(context, "src/notes.md"), "not this\n");
    writeFileSync(join(context, ".dockerignore"), "**/*.md\n");
    const text = `ARG V=1
FROM golang:$V AS tools
RUN make
FROM debian
STOPSIGNAL SIGTERM
COPY --chown=1:2 src /app/
COPY --from=tools /bin/x /bin/
CMD ["a", "b c"]
`;
    writeFileSync(join(context, "Dockerfile"), text);
  });
  afterAll(() => rmSync(context, { recursive: true, force: true }));

  test("sends the stages' steps and the files that are not there yet; the log is shown", async () => {
    const { build } = working();
    const run = rig.aenv(["build", context, "--name", "app", "--build-arg", "V=2", "--memory", "512"]);
    const it = await build;
    it.logs.push(entry("[1/3] COPY src"), entry("said by it", "warn"));
    it.status = "ready";
    const { code, out, err } = await run;
    expect({ code, err }).toEqual({
      code: 0,
      err: expect.stringContaining("note: line 5: STOPSIGNAL has no"),
    });
    const id = [...rig.templates.keys()].at(-1);
    expect(out).toBe(`Created template ${id} (build ${id})\nTemplate ${id} is ready.\n`);
    expect(err).toContain("said by it\n");
    expect(err).toMatch(/ Uploading 1 file, \d+(\.\d)? (B|KiB)\n/);
    const [hash] = [...rig.uploads.keys()];
    expect(it.request).toEqual({
      fromImage: "debian",
      dockerfile: { escape: "\\" },
      stages: [{ name: "tools", fromImage: "golang:2", steps: [{ type: "RUN", args: ["make"] }] }],
      steps: [
        { type: "COPY", args: ["content", "/app/", "1:2", ""], filesHash: hash! },
        { type: "COPY", args: ["/bin/x", "/bin/", "", ""], from: 0 },
        { type: "CMD", args: ["a", "b c"], exec: true },
      ],
    });
    const tar = Bun.gunzipSync(Uint8Array.from(rig.uploads.get(hash!)!));
    expect(Buffer.from(tar).toString("latin1")).toContain("content/main.py");
    expect(Buffer.from(tar).toString("latin1")).not.toContain("notes.md");

    // The second time the files are there.
    rig.uploads.set(hash!, Buffer.from("kept"));
    const { build: second } = working();
    const again = rig.aenv(["build", context, "--name", "app", "--start-cmd", "", "--probe", "80"]);
    const next = await second;
    next.status = "ready";
    expect((await again).code).toBe(0);
    expect(rig.uploads.get(hash!)!.toString()).toBe("kept");
    expect(next.request).toMatchObject({
      startCmd: "",
      readyCmd: "bash -c 'exec 3<>/dev/tcp/127.0.0.1/80'",
    });
  });

  test("Ctrl-C and a deadline cancel the build", async () => {
    const { build } = working();
    const terminal = rig.terminal(`trap : INT; aenv build ${context} --name app; echo "[rc $?]"`);
    const it = await build;
    it.logs.push(entry("step one"));
    await terminal.shows("step one");
    terminal.type("\x03");
    await terminal.shows("[rc 130]");
    expect(terminal.screen()).toContain("Build cancelled.");
    expect(it.status).toBe("error");

    const { build: late } = working();
    const run = await rig.aenv(["build", context, "--name", "app", "--timeout", "1"]);
    expect(run.code).toBe(1);
    expect(run.err).toEndWith("Error: the build did not end within 1 s and was cancelled\n");
    expect((await late).status).toBe("error");
  });

  test("what is wrong is told before anything is sent", async () => {
    const before = rig.templates.size;
    const cases: [string[], number, RegExp][] = [
      [[context], 2, /name/],
      [[`${context}/nothing`, "--name", "x"], 2, /is not a directory/],
      [["https://example.com/x.git", "--name", "x"], 2, /must be a local directory/],
      [[context, "--name", "x", "-f", "nowhere"], 1, /cannot read the Dockerfile nowhere/],
      [[context, "--name", "x", "--build-arg", "1=2"], 2, /is not a name of a variable/],
      [[context, "--name", "x", "--progress", "loud"], 2, /progress/],
    ];
    for (const [args, code, words] of cases) {
      const run = await rig.aenv(["build", ...args]);
      expect({ args, code: run.code, err: run.err }).toEqual({
        args,
        code,
        err: expect.stringMatching(words),
      });
    }
    writeFileSync(join(context, "Wrong"), "FROM debian\nCOPY gone /\n");
    const wrong = await rig.aenv(["build", context, "--name", "x", "-f", join(context, "Wrong")]);
    expect(wrong).toMatchObject({
      code: 1,
      err: expect.stringContaining("Wrong:2: the context has no gone"),
    });
    expect(rig.templates.size).toBe(before);
  });
});

describe("aenv pull", () => {
  test("piped: plain lines with the log, no control sequences", async () => {
    const { build } = working();
    const run = rig.aenv([
      "pull",
      "registry.example:5000/org/app:1.2",
      "--cpu",
      "2",
      "--mem",
      "512",
      "--probe",
      "8080",
    ]);
    const it = await build;
    it.logs.push(
      entry("resolving image a:1"),
      entry("resolve image host/a:1"),
      entry("not shown", "debug"),
      entry("layer 1/2\r\x1b[31mred"),
    );
    await lookedAt();
    it.logs.push(entry("disk nearly full", "warn"));
    it.status = "ready";
    const { code, out, err } = await run;
    const id = [...rig.templates.keys()].at(-1);
    expect(code).toBe(0);
    expect(out).toBe(`Created template ${id} (build ${id})\nTemplate ${id} is ready.\n`);
    expect(err.split("\n").map((line) => line.replace(/^ *[\d.]+ s {2}/, ""))).toEqual([
      "resolving image a:1",
      "layer 1/2 red",
      "Build status: building",
      "warn: disk nearly full",
      "Build status: ready",
      "",
    ]);
    expect(err).not.toContain("\r");
    expect(err).not.toContain("\x1b");
    expect(it.request).toMatchObject({
      fromImage: "registry.example:5000/org/app:1.2",
      readyCmd: "bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080'",
    });
    expect(rig.templates.get(id!)?.aliases).toEqual(["app"]);
  });

  test("on a terminal: one line that is rewritten, problems above it", async () => {
    const { build } = working();
    const terminal = rig.terminal('aenv pull debian:12 --name mine; echo "[rc $?]"');
    const it = await build;
    it.logs.push(entry("layer 1/2"), entry("odd thing", "warn"));
    await terminal.shows("Build status: building - layer 1/2");
    await terminal.shows("Build status: building - layer 1/2\r\x1b[2K");
    expect(terminal.screen()).toContain("warn: odd thing\r\n");
    it.status = "ready";
    await terminal.shows("[rc 0]\r\n");
    const id = [...rig.templates.keys()].at(-1);
    expect(terminal.screen()).toEndWith(`\r\x1b[2KTemplate ${id} is ready.\r\n[rc 0]\r\n`);
    // Nothing but cleared and rewritten: no line per update.
    expect(terminal.screen().match(/Build status[^\r]*\n/g)).toBeNull();
  });

  test("a terminal that tells no width is taken for one of 80 columns", async () => {
    const { build } = working();
    const terminal = rig.terminal('stty cols 0; aenv pull debian:12 --name mine; echo "[rc $?]"');
    const it = await build;
    it.logs.push(entry("layer 1/2 of the image"));
    await terminal.shows("Build status: building - layer 1/2 of the image");
    it.status = "ready";
    await terminal.shows("[rc 0]");
  });

  test("on a terminal that cannot rewrite lines: plain", async () => {
    rig.onBuild = (build) => {
      build.status = "ready";
    };
    const terminal = rig.terminal('aenv pull debian:12; echo "[rc $?]"', { TERM: "dumb" });
    await terminal.shows("[rc 0]");
    expect(terminal.screen()).not.toContain("\x1b");
  });

  test("a failed build", async () => {
    rig.onBuild = (build) => {
      build.logs.push(
        ...Array.from({ length: 250 }, (_, i) => entry(`line ${i}`)),
        entry("no space", "error"),
      );
      build.status = "error";
      build.reason = { message: "the start command ended with 3", step: "startCmd" };
    };
    const run = await rig.aenv(["pull", "debian"]);
    expect(run.code).toBe(1);
    const id = [...rig.templates.keys()].at(-1);
    expect(run.err).toEndWith(
      "Error: Build failed: the start command ended with 3 (step: startCmd)\n" +
        `  the template keeps its name: build it again, or remove it with: aenv template delete ${id}\n`,
    );
    // All pages of the log were read before the end was believed.
    expect(run.err).toContain("line 0\n");
    expect(run.err).toContain("line 249\n");
    expect(run.err).toContain("error: no space\n");
  });

  test("a failure that is the log's last word is told once", async () => {
    const { build } = working();
    const running = rig.aenv(["pull", "debian"]);
    const it = await build;
    // The log may be read before the outcome is there.
    it.logs.push(entry("layer 1"), entry("registry.example cannot be resolved", "error"));
    await lookedAt();
    it.reason = { message: "registry.example cannot be resolved" };
    it.status = "error";
    const run = await running;
    expect(run.err.match(/registry\.example cannot be resolved/g)).toHaveLength(1);
    expect(run.err).toContain("Error: Build failed: registry.example cannot be resolved\n");
  });

  test("template cancel ends the build that a pull left running", async () => {
    const { build } = working();
    const { code, out } = await rig.aenv(["pull", "debian", "-d"]);
    expect(code).toBe(0);
    const it = await build;
    const id = /Created template (\S+)/.exec(out)![1]!;
    expect(await rig.aenv(["template", "cancel", id])).toEqual({
      code: 0,
      out: `Cancelled build ${id} of template ${id}\n`,
      err: "",
    });
    expect(it.status).toBe("error");
  });

  test("detached", async () => {
    working();
    const run = await rig.aenv(["pull", "debian", "-d"]);
    const id = [...rig.templates.keys()].at(-1);
    expect(run).toEqual({
      code: 0,
      out: `Created template ${id} (build ${id})\nBuild started.\nWatch it with: aenv template watch ${id}\n`,
      err: "",
    });
  });

  test("a deadline ends the watching only", async () => {
    working();
    const run = await rig.aenv(["pull", "debian", "--timeout", "1"]);
    const id = [...rig.templates.keys()].at(-1);
    expect(run.code).toBe(1);
    expect(run.err).toEndWith(
      `Error: the build did not end within 1 s; it goes on\n  watch it with: aenv template watch ${id}\n`,
    );
  });

  test("Ctrl-C ends the watching only", async () => {
    const { build } = working();
    const terminal = rig.terminal('trap : INT; aenv pull debian; echo "[rc $?]"');
    const it = await build;
    await terminal.shows("Build status: building");
    terminal.type("\x03");
    await terminal.shows("[rc 130]");
    const id = [...rig.templates.keys()].at(-1);
    expect(terminal.screen()).toContain(
      `Stopped watching; the build goes on. Watch it with: aenv template watch ${id}\r\n`,
    );
    expect(terminal.screen()).not.toContain("Error");
    expect(it.status).toBe("building");
    // And that is how it is watched again, by id and by name.
    const again = rig.aenv(["template", "watch", id!]);
    const named = rig.aenv(["templates", "watch", "debian"]);
    await lookedAt();
    it.status = "ready";
    expect(await again).toMatchObject({ code: 0, out: `Template ${id} is ready.\n` });
    expect(await named).toMatchObject({ code: 0, out: `Template ${id} is ready.\n` });
  });

  test("the server is away for a moment", async () => {
    const { build } = working();
    const run = rig.spawn(["pull", "debian"]);
    const it = await build;
    await lookedAt();
    await rig.silence();
    const told = `cannot reach the server at ${rig.url}; trying again\n`;
    let err = "";
    for await (const chunk of run.stderr) {
      const before = err.includes(told);
      err += Buffer.from(chunk).toString();
      if (before || !err.includes(told)) continue;
      it.status = "ready";
      rig.listen();
    }
    expect(await run.exited).toBe(0);
    expect(err).toContain(told);
  });

  test("the server stays away; errors that do not pass are told at once", async () => {
    const { id } = rig.template("far", "building");
    const api = new Api({ url: rig.url, apiKey: "wrong" });
    const pace = { pollMs: 10, retryDelaysMs: [10, 10] };
    await expect(followBuild(api, id, id, { pace })).rejects.toThrow("authentication failed");
    const nobody = new Api({ url: "http://127.0.0.1:1", apiKey: "k" });
    await expect(followBuild(nobody, id, id, { pace })).rejects.toMatchObject({
      message: "lost the server while watching the build, which may go on without it",
      hint: `watch it with: aenv template watch ${id}`,
    });
    let asked = 0;
    using busy = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch() {
        if (asked++ < 2) return new Response("", { status: 503 });
        return Response.json({ templateID: id, buildID: "another", status: "ready" });
      },
    });
    const mixed = new Api({ url: `http://127.0.0.1:${busy.port}`, apiKey: "k" });
    await expect(followBuild(mixed, id, id, { pace })).rejects.toThrow(
      `the server answered for build another`,
    );
    expect(asked).toBe(3);
  });

  test("an unknown status is shown and waited out", async () => {
    const { build } = working();
    const run = rig.aenv(["pull", "debian"]);
    await build;
    // The API's own schema has no such status: another server might.
    let status = "polishing";
    let asked = 0;
    using other = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch() {
        asked++;
        return Response.json({ templateID: "t", buildID: "b", status, logEntries: [] });
      },
    });
    const watched = followBuild(new Api({ url: `http://127.0.0.1:${other.port}`, apiKey: "k" }), "t", "b", {
      pace: { pollMs: 20, retryDelaysMs: [] },
    });
    await eventually("the status is asked for twice", () => asked > 1);
    status = "ready";
    expect(await watched).toBe(0);
    (await build).status = "ready";
    expect((await run).code).toBe(0);
  });
});

test("names of templates", () => {
  expect(templateNameOf("debian")).toBe("debian");
  expect(templateNameOf("debian:12")).toBe("debian");
  expect(templateNameOf("localhost:5000/org/app:1.2@sha256:0123")).toBe("app");
  expect(templateNameOf("ghcr.io/a/b@sha256:0123")).toBe("b");
});
