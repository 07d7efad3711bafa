import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { API_KEY, CliRig } from "../../tests/support/cli-rig.ts";
import { newId } from "../lib/ids.ts";
import { version } from "../version.ts";
import { CliError } from "./command.ts";
import { COMMANDS, GROUPS, SERVER_PROGRAMS } from "./commands.ts";
import { findCredentials } from "./credentials.ts";
import { formatTable, formatTime, plainText } from "./output.ts";
import { parseLine } from "./program.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

/** Where nobody listens. */
async function freePort(): Promise<number> {
  const server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response() });
  await server.stop(true);
  return server.port!;
}

let rig: CliRig;
beforeAll(async () => {
  rig = await CliRig.start();
});
afterAll(() => rig[Symbol.asyncDispose]());

describe("aenv auth", () => {
  const config = () => join(rig.dir, "auth-config");
  const env = () => ({ XDG_CONFIG_HOME: config() });
  const file = () => join(config(), "aenv/credentials");
  const saved = () => readFileSync(file(), "utf8");

  test("piped: saved as a private file and nothing else", async () => {
    rmSync(config(), { recursive: true, force: true });
    const run = await rig.aenv(["auth"], { env: env(), stdin: `${rig.url}///\n${API_KEY}\n` });
    expect(run).toEqual({
      code: 0,
      out: "AENV server URL [http://localhost:8000]: API key: Credentials saved.\n",
      err: "",
    });
    expect(Bun.TOML.parse(saved())).toEqual({ url: rig.url, api_key: API_KEY });
    expect(statSync(file()).mode & 0o777).toBe(0o600);
    expect(readdirSync(join(config(), "aenv"))).toEqual(["credentials"]);
  });

  test("saved, and told, when the server refuses the key, does not answer or is none of ours", async () => {
    const auth = async (url: string, key: string) => {
      const { code, err } = await rig.aenv(["auth"], { env: env(), stdin: `${url}\n${key}\n` });
      expect(code).toBe(0);
      expect(Bun.TOML.parse(saved())).toEqual({ url, api_key: key });
      expect(err).not.toContain(key);
      return err;
    };
    expect(await auth(rig.url, "e2b_wrong")).toBe(
      `Warning: the server at ${rig.url} refuses this key; aenv auth asks again\n`,
    );
    const nobody = `http://127.0.0.1:${await freePort()}`;
    expect(await auth(nobody, API_KEY)).toStartWith(
      `Warning: not checked: cannot reach the server at ${nobody}: `,
    );
    using other = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch: () => new Response("<html>hello</html>"),
    });
    expect(await auth(`http://127.0.0.1:${other.port}`, API_KEY)).toContain("that is no AgentENV server");
  });

  test("no line end, blanks around, Windows line ends, the default URL", async () => {
    expect((await rig.aenv(["auth"], { env: env(), stdin: ` \r\n  ${API_KEY} ` })).code).toBe(0);
    expect(Bun.TOML.parse(saved())).toEqual({ url: "http://localhost:8000", api_key: API_KEY });
    writeFileSync(file(), "old", { mode: 0o644 });
    expect((await rig.aenv(["auth"], { env: env(), stdin: `https://a.b\r\n${API_KEY}\r\n` })).code).toBe(0);
    expect(statSync(file()).mode & 0o777).toBe(0o600);
  });

  test("bad answers change nothing", async () => {
    writeFileSync(file(), "kept");
    for (const [stdin, said] of [
      ["", "ended before the URL"],
      ["http://a\n", "ended before the API key"],
      ["http://a\n\n", "the API key is empty"],
      ["http://a\n   \n", "the API key is empty"],
      ["localhost:8000\nkey\n", '"localhost:8000" is not an http or https URL'],
      ["ftp://a\nkey\n", "is not an http or https URL"],
      ["http://me:secret@a\nkey\n", "no user, query or fragment"],
      ["http://a\nk\tey\n", "characters that no key has"],
      ["http://a\nschlüssel\n", "characters that no key has"],
    ] as const) {
      const run = await rig.aenv(["auth"], { env: env(), stdin });
      expect([stdin, run.code]).toEqual([stdin, 1]);
      expect(run.err).toContain(said);
      expect(run.out).not.toContain("saved");
    }
    expect(saved()).toBe("kept");
  });

  test("the place cannot be written", async () => {
    const blocked = join(rig.dir, "blocked");
    writeFileSync(blocked, "a file, not a directory");
    const run = await rig.aenv(["auth"], { env: { XDG_CONFIG_HOME: blocked }, stdin: `\n${API_KEY}\n` });
    expect(run.code).toBe(1);
    expect(run.err).toContain(
      `Error: cannot write the credentials file ${blocked}/aenv/credentials\n  caused by: `,
    );
  });

  const settings = '[ "$before" = "$(stty -g)" ] && s=same || s=changed';
  const onTerminal = () =>
    rig.terminal(`before=$(stty -g); aenv auth; rc=$?; ${settings}; echo "[rc $rc $s]"`, env());

  test("on a terminal the key is not shown; erase keys work", async () => {
    const terminal = onTerminal();
    await terminal.shows("AENV server URL [http://localhost:8000]: ");
    terminal.type("http://typed\r");
    await terminal.shows("API key: ");
    terminal.type("nonsense\x15secr\x7f\x7fcret-key\r");
    await terminal.shows("[rc 0 same]");
    expect(Bun.TOML.parse(saved())).toEqual({ url: "http://typed", api_key: "secret-key" });
    expect(terminal.screen()).not.toContain("key-");
    expect(terminal.screen()).not.toContain("secr");
  });

  test("Ctrl-C, Ctrl-D and a kill during the hidden prompt leave the terminal and the file alone", async () => {
    writeFileSync(file(), "kept");
    for (const [end, code] of [
      ["\x03", 130],
      ["\x04", 1],
      ["SIGTERM", 143],
      ["SIGHUP", 129],
    ] as const) {
      const terminal = onTerminal();
      await terminal.shows("8000]: ");
      terminal.type("\r");
      await terminal.shows("API key: ");
      terminal.type("half");
      if (end.startsWith("SIG")) process.kill(await terminal.aenvPid(), end);
      else {
        if (end === "\x04") terminal.type("\x15");
        terminal.type(end);
      }
      await terminal.shows(`[rc ${code} same]`);
    }
    expect(saved()).toBe("kept");
  });
});

describe("sandbox commands", () => {
  test("list is JSON for programs, with every page", async () => {
    rig.records.clear();
    expect(await rig.aenv(["list"])).toEqual({ code: 0, out: "[]\n", err: "" });
    const ids = Array.from({ length: 230 }, () => rig.sandbox());
    const run = await rig.aenv(["ls"]);
    expect(run.err).toBe("");
    const items = JSON.parse(run.out) as { sandboxID: string }[];
    expect(items.map((item) => item.sandboxID).sort()).toEqual(ids.sort());
    expect(items[0]).toMatchObject({
      state: "running",
      cpuCount: 2,
      memoryMB: 512,
      diskSizeMB: 10_240,
      alias: "debian",
    });
    expect(run.out).toStartWith("[\n  {\n    ");
    expect(run.out).toEndWith("\n]\n");
  });

  test("list is a table on a terminal, or when asked", async () => {
    rig.records.clear();
    const first = rig.sandbox();
    const second = rig.sandbox({ state: "paused", alias: undefined });
    const ends = formatTime(rig.records.get(first)?.endAt);
    const row = (id: string, name: string, state: string) => `${id}  ${name}  ${state}`;
    const template = rig.records.get(second)?.templateId ?? "";
    const lines = [
      `SANDBOX ID${" ".repeat(28)}TEMPLATE${" ".repeat(30)}STATE    CPU  MEM (MiB)  DISK (MiB)  STARTED               ENDS`,
      `${row(first, "debian".padEnd(36), "running")}  2    512        10240       2026-01-02 03:04:05Z  ${ends}`,
      `${row(second, template, "paused ")}  2    512        10240       2026-01-02 03:04:05Z  -`,
    ];
    const asked = await rig.aenv(["list", "--output", "table"]);
    expect(asked.out.split("\n").toSorted()).toEqual([...lines, ""].toSorted());
    const terminal = rig.terminal(
      "aenv list; stty cols 200; aenv ls --output=json | head -1; aenv ls --output json",
    );
    expect(await terminal.exited).toBe(0);
    for (const line of lines) expect(terminal.screen()).toContain(`${line}\r\n`);
    expect(terminal.screen()).toContain(`"sandboxID": "${first}"`);
  });

  test("start -d prints the id alone; pause, resume, timeout, delete tell what they did", async () => {
    const started = await rig.aenv(["start", "debian", "-d", "--timeout", "77", "--secure"]);
    const id = started.out.trim();
    expect(started).toEqual({ code: 0, out: `${id}\n`, err: "" });
    expect(rig.records.get(id)).toMatchObject({ alias: "debian", timeoutSeconds: 77 });
    expect(await rig.aenv(["pause", id])).toEqual({ code: 0, out: `Paused ${id}\n`, err: "" });
    expect(rig.records.get(id)?.state).toBe("paused");
    expect(await rig.aenv(["pause", id])).toEqual({ code: 0, out: `Paused ${id}\n`, err: "" });
    expect(await rig.aenv(["resume", id, "--timeout", "500"])).toEqual({
      code: 0,
      out: `Resumed ${id}\n`,
      err: "",
    });
    expect(rig.records.get(id)?.state).toBe("running");
    expect(await rig.aenv(["timeout", id, "600"])).toEqual({
      code: 0,
      out: `Timeout for ${id} set to 600s\n`,
      err: "",
    });
    expect(await rig.aenv(["rm", id])).toEqual({ code: 0, out: `Deleted sandbox ${id}\n`, err: "" });
    expect(rig.records.has(id)).toBe(false);
    const again = await rig.aenv(["delete", id]);
    expect(again.code).toBe(1);
    expect(again.err).toBe(
      `Error: HTTP 404: sandbox ${id} was not found\n  list the sandboxes there are with GET /v2/sandboxes or \`aenv list\`\n`,
    );
  });

  test("pause --no-memory asks for the disks alone, and does not take what is paused for it", async () => {
    const id = rig.sandbox({});
    expect(await rig.aenv(["pause", "--no-memory", id])).toEqual({ code: 0, out: `Paused ${id}\n`, err: "" });
    expect(rig.pausedWithMemory).toBe(false);
    const again = await rig.aenv(["pause", "--no-memory", id]);
    expect([again.code, again.out]).toEqual([1, ""]);
    expect(again.err).toContain("the sandbox is paused");
    await rig.aenv(["resume", id]);
    expect((await rig.aenv(["pause", id])).code).toBe(0);
    expect(rig.pausedWithMemory).toBe(true);
  });

  test("pause, resume and delete take several ids: what fails keeps nothing from the others", async () => {
    const [one, two, gone] = [rig.sandbox(), rig.sandbox(), newId()];
    expect(await rig.aenv(["pause", one, two])).toEqual({
      code: 0,
      out: `Paused ${one}\nPaused ${two}\n`,
      err: "",
    });
    expect((await rig.aenv(["resume", one, two, "--timeout", "500"])).out).toBe(
      `Resumed ${one}\nResumed ${two}\n`,
    );
    expect(await rig.aenv(["delete", one, gone, two, one])).toEqual({
      code: 1,
      out: `Deleted sandbox ${one}\nDeleted sandbox ${two}\n`,
      err: `Error: ${gone}: HTTP 404: sandbox ${gone} was not found\n  list the sandboxes there are with GET /v2/sandboxes or \`aenv list\`\n`,
    });
    expect((await rig.aenv(["delete", one, "../x"])).code).toBe(2);
  });

  test("an error shows the message, its causes and the way out", async () => {
    const run = await rig.aenv(["start", "missing", "-d"]);
    expect(run).toMatchObject({ code: 1, out: "" });
    expect(run.err).toMatch(
      /^Error: HTTP 400: template missing was not found\n( {2}caused by: no such alias\n)? {2}list the templates there are with `aenv template list`\n$/,
    );
    let text = JSON.stringify({
      code: 500,
      message: "no start",
      cause: ["no disk", "quota"],
      remediation: "buy one",
    });
    using failing = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch: () => new Response(text, { status: 500 }),
    });
    try {
      rig.login(`http://127.0.0.1:${failing.port}`);
      expect((await rig.aenv(["start", "a", "-d"])).err).toBe(
        "Error: HTTP 500: no start\n  caused by: no disk\n  caused by: quota\n  buy one\n",
      );
      text = JSON.stringify({ message: "one\r\ntwo\x1b[2J\x07three" });
      expect((await rig.aenv(["list"])).err).toBe("Error: HTTP 500: one\ntwo three\n");
      text = "  gateway says no ";
      expect((await rig.aenv(["list"])).err).toBe("Error: HTTP 500: gateway says no\n");
      text = "";
      expect((await rig.aenv(["list"])).err).toBe("Error: HTTP 500: no message\n");
    } finally {
      rig.login();
    }
  });

  test("a reader that leaves is no error, a full disk is one", async () => {
    rig.records.clear();
    for (let i = 0; i < 400; i++) rig.sandbox();
    rig.installCommand();
    const run = async (script: string) => {
      const child = Bun.spawn(["bash", "-c", script], { env: rig.env(), stdout: "pipe", stderr: "pipe" });
      const [out, err] = await Promise.all([
        new Response(child.stdout).text(),
        new Response(child.stderr).text(),
      ]);
      return { out, err, code: await child.exited };
    };
    expect(await run(`aenv list | head -c 5 >/dev/null; echo "\${PIPESTATUS[0]}"`)).toEqual({
      out: "0\n",
      err: "",
      code: 0,
    });
    expect(await run('aenv nonsense 2>&-; echo "$?"')).toEqual({ out: "2\n", err: "", code: 0 });
    const full = await run("aenv list > /dev/full");
    expect(full.code).toBe(1);
    expect(full.err).toStartWith("Error: cannot write to standard output\n");
    rig.records.clear();
  });
});

describe("template commands", () => {
  test("list, delete by name and id", async () => {
    const named = rig.template("base");
    const nameless = rig.template(undefined, "error");
    const items = JSON.parse((await rig.aenv(["template", "list"])).out) as { templateID: string }[];
    expect(items.map((item) => item.templateID).sort()).toEqual([named.id, nameless.id].sort());
    const table = (await rig.aenv(["templates", "ls", "--output", "table"])).out.split("\n");
    expect(table[0]).toMatch(/^NAME +TEMPLATE ID +STATUS +CPU +MEM \(MiB\) +DISK \(MiB\) +UPDATED$/);
    expect(table).toContain(`base  ${named.id}  ready   1    256        1024        2026-01-02 03:04:05Z`);
    expect(table).toContain(`-     ${nameless.id}  error   1    256        1024        2026-01-02 03:04:05Z`);
    expect(await rig.aenv(["template", "delete", "base"])).toEqual({
      code: 0,
      out: `Deleted template ${named.id}\n`,
      err: "",
    });
    expect((await rig.aenv(["template", "rm", nameless.id])).out).toBe(`Deleted template ${nameless.id}\n`);
    const gone = await rig.aenv(["template", "delete", "base"]);
    expect(gone.code).toBe(1);
    expect(gone.err).toContain("HTTP 404: template base was not found");
  });
});

describe("the way to the server", () => {
  test("no credentials, unusable credentials", async () => {
    const home = join(rig.dir, "elsewhere");
    const path = join(home, "aenv/credentials");
    const env = { XDG_CONFIG_HOME: home };
    expect(await rig.aenv(["list"], { env })).toEqual({
      code: 1,
      out: "",
      err: `Error: there are no credentials at ${path}\n  run: aenv auth (or set E2B_API_URL and E2B_API_KEY, both)\n`,
    });
    mkdirSync(join(home, "aenv"), { recursive: true });
    writeFileSync(path, 'url = "http://a"\napi_key = "top-secret\n');
    const broken = await rig.aenv(["list"], { env });
    expect(broken.code).toBe(1);
    expect(broken.err).toStartWith(`Error: the credentials file ${path} is not valid TOML (line 2,`);
    expect(broken.err).not.toContain("top-secret");
    for (const [text, said] of [
      ['url = "http://a"\n', "needs the texts url and api_key"],
      ["url = 1\napi_key = 2\n", "needs the texts url and api_key"],
      ['url = "a"\napi_key = "k"\n', '"a" is not an http or https URL'],
      ['url = "http://a"\napi_key = ""\n', "the API key is empty"],
    ] as const) {
      writeFileSync(path, text);
      const run = await rig.aenv(["list"], { env });
      expect(run.code).toBe(1);
      expect(run.err).toContain(said);
      expect(run.err).toContain("run: aenv auth");
    }
    rmSync(path);
    mkdirSync(path);
    expect((await rig.aenv(["list"], { env })).err).toStartWith(
      `Error: cannot read the credentials file ${path}\n`,
    );
    // Without XDG_CONFIG_HOME it is ~/.config.
    const fallback = await rig.aenv(["list"], { env: { XDG_CONFIG_HOME: "", HOME: home } });
    expect(fallback.err).toContain(`${home}/.config/aenv/credentials`);
  });

  test("E2B_API_URL and E2B_API_KEY win over the file, both or neither", async () => {
    rig.records.clear();
    const id = rig.sandbox();
    const elsewhere = {
      XDG_CONFIG_HOME: join(rig.dir, "none"),
      E2B_API_URL: `${rig.url}/`,
      E2B_API_KEY: API_KEY,
    };
    expect((await rig.aenv(["list"], { env: elsewhere })).out).toContain(id);
    expect((await rig.aenv(["doctor"], { env: elsewhere })).out).toContain("$E2B_API_URL and $E2B_API_KEY");
    const wrong = await rig.aenv(["list"], { env: { E2B_API_URL: rig.url, E2B_API_KEY: "another" } });
    expect(wrong.code).toBe(1);
    expect(wrong.err).toContain("the key is that of $E2B_API_KEY");
    expect((await rig.aenv(["list"], { env: { E2B_API_KEY: "another" } })).out).toContain(id);
    for (const key of [{}, { E2B_API_KEY: "" }] as Record<string, string>[]) {
      const alone = { E2B_API_URL: "http://127.0.0.1:9", ...key };
      const saved = await rig.aenv(["list"], { env: alone });
      expect(saved.out).toContain(id);
      expect(saved.err).toBe(
        `Warning: E2B_API_URL (http://127.0.0.1:9) is ignored: there is no E2B_API_KEY with it; the server is ${rig.url}\n`,
      );
      expect((await rig.aenv(["doctor"], { env: alone })).out).toContain(
        "E2B_API_URL (http://127.0.0.1:9) is ignored",
      );
      expect((await rig.aenv(["list"], { env: { E2B_API_URL: `${rig.url}/`, ...key } })).err).toBe("");
    }
    const bad = await rig.aenv(["list"], { env: { E2B_API_URL: "a", E2B_API_KEY: "top secret" } });
    expect(bad.err).toStartWith('Error: $E2B_API_URL: "a" is not an http or https URL');
    const auth = await rig.aenv(["auth"], { env: elsewhere, stdin: `${rig.url}\n${API_KEY}\n` });
    expect(auth.err).toBe("E2B_API_URL and E2B_API_KEY are set: they win over what was saved.\n");
  });

  test("an executable in dist/ of a checkout finds the credentials of its server", async () => {
    const checkout = join(rig.dir, "checkout");
    const path = join(checkout, ".aenv/home/client/aenv/credentials");
    mkdirSync(join(path, ".."), { recursive: true });
    writeFileSync(path, 'url = "http://a"\napi_key = "k"\n');
    const config = process.env.XDG_CONFIG_HOME;
    process.env.XDG_CONFIG_HOME = join(rig.dir, "no-config");
    try {
      const credentials = { url: "http://a", apiKey: "k" };
      expect(await findCredentials(join(checkout, "dist/agentenv"))).toEqual({ credentials, path });
      await expect(findCredentials(join(rig.dir, "bin/agentenv"))).rejects.toThrow(
        `there are no credentials at ${join(rig.dir, "no-config")}`,
      );
    } finally {
      if (config === undefined) delete process.env.XDG_CONFIG_HOME;
      else process.env.XDG_CONFIG_HOME = config;
    }
  });

  test("nobody there, a wrong key, no such server", async () => {
    try {
      rig.login("http://127.0.0.1:1");
      const refused = await rig.aenv(["list"]);
      expect(refused).toMatchObject({ code: 1, out: "" });
      expect(refused.err).toStartWith("Error: cannot reach the server at http://127.0.0.1:1\n  caused by: ");
      expect(refused.err).toContain("is it running?");

      rig.login(rig.url, "not-the-key");
      const wrong = await rig.aenv(["list"]);
      expect(wrong.code).toBe(1);
      expect(wrong.err).toMatch(/^Error: authentication failed: .*X-API-Key/);
      expect(wrong.err).toContain("aenv auth");
      expect(wrong.err).not.toContain("not-the-key");

      using page = Bun.serve({
        port: 0,
        hostname: "127.0.0.1",
        fetch: (request) =>
          request.url.includes("/v2/templates")
            ? Response.redirect("http://127.0.0.1:1/other", 302)
            : new Response("<html>hello</html>"),
      });
      rig.login(`http://127.0.0.1:${page.port}`);
      const html = await rig.aenv(["list"]);
      expect(html.code).toBe(1);
      expect(html.err).toBe(
        `Error: http://127.0.0.1:${page.port} answered HTTP 200 with a web page: that is no AgentENV server\n  is that the right address? set another one with \`aenv auth\`\n`,
      );
      const moved = await rig.aenv(["template", "list"]);
      expect(moved.code).toBe(1);
      expect(moved.err).toContain("sends on to http://127.0.0.1:1/other");
    } finally {
      rig.login();
    }
  });

  test("another server at the address: one line, whatever it says", async () => {
    const page = `<!DOCTYPE HTML>\n<html>${"<p>Not found</p>\n".repeat(500)}</html>`;
    try {
      for (const [status, type, text, what] of [
        [200, "text/html", page, "a web page"],
        [404, "text/html;charset=utf-8", page, "a web page"],
        [404, "", page, "a web page"],
        [401, "text/html", page, "a web page"],
        [502, "text/html", page, "a web page"],
        [404, "text/plain", "404 page not found\n", "something other than an error of ours"],
        [404, "application/json", '{"detail":"Not Found"}', "something other than an error of ours"],
        [200, "text/plain", "hello", "something other than JSON"],
        [200, "application/json", '{"items":[]}', "something other than a list"],
      ] as const) {
        using other = Bun.serve({
          port: 0,
          hostname: "127.0.0.1",
          fetch: () => new Response(text, { status, headers: type === "" ? {} : { "content-type": type } }),
        });
        const url = `http://127.0.0.1:${other.port}`;
        const hint =
          status === 502
            ? "a proxy in front of the server tells that it cannot reach it: is it running?"
            : "is that the right address? set another one with `aenv auth`";
        rig.login(url);
        expect(await rig.aenv(["list"])).toEqual({
          code: 1,
          out: "",
          err: `Error: ${url} answered HTTP ${status} with ${what}: that is no AgentENV server\n  ${hint}\n`,
        });
      }
    } finally {
      rig.login();
    }
  });

  test("proxies of the environment are not for this machine", async () => {
    const proxies = Object.fromEntries(
      ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"].map((name) => [
        name,
        "http://127.0.0.1:9",
      ]),
    );
    try {
      for (const host of ["127.0.0.1", "localhost"]) {
        rig.login(rig.url.replace("127.0.0.1", host));
        expect((await rig.aenv(["list"], { env: proxies })).code).toBe(0);
      }
    } finally {
      rig.login();
    }
  });
});

describe("usage", () => {
  const id = newId();

  test.each([
    [[]],
    [["frobnicate"]],
    [["--frobnicate"]],
    [["pul"]],
    [["list", "--frobnicate"]],
    [["list", "extra"]],
    [["list", "--output"]],
    [["list", "--output", "yaml"]],
    [["auth", "key"]],
    [["pull"]],
    [["pull", ""]],
    [["pull", "a", "b"]],
    [["pull", "a", "--cpu", "0"]],
    [["pull", "a", "--cpu", "1.5"]],
    [["pull", "a", "--memory", "much"]],
    [["pull", "a", "--probe", "70000"]],
    [["pull", "a", "--probe", "80", "--ready-cmd", "true"]],
    [["build", ".", "--name", "a", "--probe", "80", "--ready-cmd", "true"]],
    [["pull", "a", "-d", "--timeout", "5"]],
    [["pull", "a", "--timeout", "-5"]],
    [["pull", "host:5000/"]],
    [["start"]],
    [["start", "a", "--timeout", "0"]],
    [["start", "a", "--timeout", "1e3"]],
    [["start", "a", "--timeout=99999999999999"]],
    [["start", "a", "-dx"]],
    [["start", "a", "--detach=yes"]],
    [["exec"]],
    [["exec", id]],
    [["exec", "--user"]],
    [["exec", "", "ls"]],
    [["exec", "../x", "ls"]],
    [["connect"]],
    [["cn", "a", "b"]],
    [["pause"]],
    [["pause", ".."]],
    [["resume", id, "--timeout", "soon"]],
    [["timeout", id]],
    [["timeout", id, "soon"]],
    [["timeout", id, "-5"]],
    [["timeout", id, "0"]],
    [["delete", "a/b"]],
    [["template"]],
    [["template", "frobnicate"]],
    [["template", "delete"]],
    [["template", "delete", ".."]],
    [["template", "watch"]],
    [["completion"]],
    [["completion", "tcsh"]],
  ])("%p ends with 2 and touches nothing", async (args) => {
    const before = rig.calls.length;
    const run = await rig.aenv(args);
    expect(run.code).toBe(2);
    expect(run.out).toBe("");
    expect(run.err.split("\n").every((line) => args.length === 0 || line.length < 160)).toBe(true);
    if (args.length > 0) expect(run.err).toMatch(args[0] === "template" ? /^(Error|Usage): / : /^Error: /);
    expect(rig.calls.length).toBe(before);
  });

  test("every command: a wrong option, a missing, an extra, an empty and a huge argument are told in a line", () => {
    const options = { commands: COMMANDS, groups: GROUPS, serverPrograms: SERVER_PROGRAMS };
    const problem = (line: readonly string[]): unknown => {
      try {
        return parseLine(options, line);
      } catch (error) {
        return error;
      }
    };
    const huge = "x".repeat(10_240);
    let checked = 0;
    for (const command of COMMANDS) {
      const words = command.name.split(" ");
      const needed = command.arguments.filter((argument) => argument.optional !== true);
      const good = command.arguments.map((argument) => argument.choices?.[0] ?? "a");
      const must = command.flags.flatMap((flag) => (flag.required === true ? [`--${flag.name}`, "a"] : []));
      const base = [...words, ...must];
      const lines: string[][] = [
        [...base, "--frobnicate", ...good],
        [...base, `--${huge}`, ...good],
        [...base, "--frob'nicate", ...good],
        [...base, '--frob"\nnicate', ...good],
      ];
      const last = command.arguments.at(-1);
      if (last?.rest !== true && last?.many !== true)
        lines.push([...base, ...good, "extra"], [...base, ...good, huge]);
      if (needed.length > 0) lines.push(base, [...base, ...good.slice(0, needed.length - 1)]);
      for (const [i, argument] of command.arguments.entries()) {
        lines.push([...base, ...good.with(i, "")]);
        if (argument.rest !== true) lines.push([...base, ...good.with(i, huge)]);
      }
      for (const flag of command.flags.filter((entry) => entry.value !== undefined)) {
        lines.push([...base, ...(last?.rest === true ? [] : good), `--${flag.name}`]);
        if (flag.choices !== undefined) lines.push([...base, `--${flag.name}`, huge, ...good]);
      }
      for (const line of lines) {
        const shown = line.map((word) => word.slice(0, 40));
        const error = problem(line);
        if (!(error instanceof CliError))
          throw new Error(`${shown.join(" ")} is not refused: ${String(error)}`);
        expect([shown, error.exitCode]).toEqual([shown, 2]);
        expect([shown, error.message]).toEqual([shown, expect.stringMatching(/^[^\n]{5,200}$/)]);
        expect(error.hint).toStartWith(`usage: aenv ${command.name}`);
        expect(error.hint).toEndWith(`aenv ${command.name} --help tells more`);
        checked++;
      }
    }
    expect(checked).toBeGreaterThan(COMMANDS.length * 5);
  });

  test.each([
    [["timeout", id, "x".repeat(10_240)]],
    [["resume", id, "--timeout", "x".repeat(10_240)]],
    [["start", "a", "-d", "--env", "x".repeat(10_240)]],
    [["pull", "x".repeat(4_000).toUpperCase()]],
    [["download", id, "a'b\"c", ""]],
    [["x".repeat(10_240), "--help"]],
  ])("values that only the command knows: a line, a hint, 2 (case %#)", async (args) => {
    const run = await rig.aenv(args);
    expect([run.code, run.out]).toEqual([2, ""]);
    expect(run.err.split("\n").every((line) => line.length < 300)).toBe(true);
    expect(run.err).toMatch(/^Error: [^\n]+\n( {2}[^\n]+\n){1,2}$/);
  });

  test("an unknown command has no help; only a near miss is suggested", async () => {
    const nope = {
      code: 2,
      out: "",
      err: "Error: unknown command 'nope'\n  aenv --help lists the commands\n",
    };
    for (const line of [["nope"], ["nope", "--help"], ["nope", "-h"], ["help", "nope"]]) {
      expect(await rig.aenv(line)).toEqual(nope);
    }
    const inner = await rig.aenv(["template", "nope", "--help"]);
    expect([inner.code, inner.out]).toEqual([2, ""]);
    expect(inner.err).toStartWith("Error: unknown command 'nope'\n  its commands: list, watch");
  });

  test("an image that is none is told as one, before any request", async () => {
    for (const image of ["BAD IMAGE", "Debian:12", "a//b", "a/-b", "host:5000/Org/app"]) {
      const before = rig.calls.length;
      const run = await rig.aenv(["pull", image]);
      expect([image, run.code]).toEqual([image, 2]);
      expect(run.err).toStartWith(`Error: "${image}" is no image reference such as debian:12: `);
      expect(rig.calls.length).toBe(before);
    }
    for (const image of [
      "debian",
      "host:5000/org/app:V1.2",
      "Host.example/a__b/c-d@sha256:ab",
      "[::1]:5000/a",
    ]) {
      const run = await rig.aenv(["pull", image, "-d", "--name", "a"]);
      expect([image, run.err, run.code]).toEqual([image, "", 0]);
    }
  });

  test("what was probably meant", async () => {
    expect((await rig.aenv(["strat"])).err).toBe(
      "Error: unknown command 'strat' (Did you mean start?)\n  aenv --help lists the commands\n",
    );
    expect((await rig.aenv(["list", "--ouput", "json"])).err).toStartWith(
      "Error: unknown option '--ouput' (Did you mean --output?)\n  usage: aenv list [options]\n",
    );
    expect((await rig.aenv(["template", "lsit"])).err).toContain("Did you mean list?");
    expect((await rig.aenv(["qqqqqq"])).err).toContain("aenv --help");
  });

  test("help for everything, with examples, on standard output", async () => {
    const overview = await rig.aenv(["--help"]);
    expect(overview.code).toBe(0);
    expect(overview).toEqual(await rig.aenv(["-h"]));
    expect(overview).toEqual(await rig.aenv(["help"]));
    expect(overview.out).toMatch(/^ {2}completion /m);
    for (const command of COMMANDS) {
      const [word] = command.name.split(" ");
      if (command.hidden !== true) expect(overview.out).toMatch(new RegExp(`^  ${word}\\b`, "m"));
      const help = await rig.aenv([...command.name.split(" "), "--help"]);
      expect(help.code).toBe(0);
      expect(help.out).toContain(`Usage: aenv ${command.name}`);
      expect(command.examples.length).toBeGreaterThan(0);
      const flat = help.out.replace(/\s+/g, " ");
      for (const text of [...command.examples, ...command.flags.map((flag) => `--${flag.name}`)]) {
        expect(flat).toContain(text);
      }
      for (const line of help.out.split("\n"))
        if (!line.startsWith("  aenv")) expect(line.length).toBeLessThan(81);
    }
    expect(await rig.aenv(["help", "start"])).toEqual(await rig.aenv(["start", "-h"]));
    const group = await rig.aenv(["template", "--help"]);
    expect(group.code).toBe(0);
    expect(group.out).toMatch(/^ {2}watch /m);
    expect(await rig.aenv(["help", "templates"])).toEqual(group);
  });

  test("version", async () => {
    for (const word of ["--version", "-V"]) {
      expect((await rig.aenv([word])).out).toStartWith(`agentenv ${version} (`);
    }
  });

  test("hidden spellings and the words of exec", () => {
    const parse = (...words: string[]) => {
      const options = { commands: COMMANDS, groups: GROUPS, serverPrograms: SERVER_PROGRAMS };
      const line = parseLine(options, words);
      if (typeof line === "number") throw new Error("help");
      return line.invocation;
    };
    for (const spelling of ["--memory", "--memory-mb", "--mem"]) {
      expect(parse("pull", "a", spelling, "512").flags.integer("memory", 1, 9999)).toBe(512);
    }
    expect(parse("pull", "--cpu-count=4", "a").flags.integer("cpu", 1, 9)).toBe(4);
    expect(parse("exec", "id", "ls", "-l", "--help", "--").args).toEqual(["id", "ls", "-l", "--help", "--"]);
    expect(parse("exec", "id", "--", "--", "x").args).toEqual(["id", "--", "x"]);
    expect(parse("exec", "--", "id", "-x", "-y").args).toEqual(["id", "-x", "-y"]);
    const withFlags = parse("exec", "--user", "me", "--cwd=/x", "id", "cmd", "--user", "you");
    expect(withFlags.args).toEqual(["id", "cmd", "--user", "you"]);
    expect([withFlags.flags.text("user"), withFlags.flags.text("workdir")]).toEqual(["me", "/x"]);
  });
});

describe("output", () => {
  test("times say what zone they are of; a paused sandbox has no end, in list and info", async () => {
    rig.records.clear();
    const paused = rig.sandbox({ state: "paused" });
    for (const [zone, started] of [
      ["UTC", "2026-01-02 03:04:05Z"],
      ["Europe/Berlin", "2026-01-02 04:04:05+01:00"],
      ["America/St_Johns", "2026-01-01 23:34:05-03:30"],
    ] as const) {
      const env = { TZ: zone };
      const listed = (await rig.aenv(["list", "-o", "table"], { env })).out.split("\n")[1];
      expect(listed).toEndWith(`  ${started}  -`);
      const info = (await rig.aenv(["info", paused, "-o", "table"], { env })).out;
      expect(info).toMatch(/^ENDS +-$/m);
      expect(info).toContain(`  ${started}\n`);
    }
    rig.records.clear();
  });

  test("cells that are missing, wide or hostile", () => {
    expect(
      formatTable(
        ["A", "B"],
        [
          ["日本", undefined],
          ["x\x1b[31my\r\n\x07", ""],
          [0, null],
        ],
      ),
    ).toBe("A     B\n日本  -\nxy    -\n0     -\n");
  });

  test("foreign text cannot steer the terminal", () => {
    expect(plainText("a\x1b]0;title\x07b\x1b[2Jc\r\nd\te\x9b31mf ")).not.toMatch(/[\p{Cc}]/u);
    expect(plainText("plain äö → 日本\n")).toBe("plain äö → 日本");
  });
});
