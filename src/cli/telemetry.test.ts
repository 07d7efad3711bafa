import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { API_KEY, CliRig } from "../../tests/support/cli-rig.ts";
import { newId } from "../lib/ids.ts";

setDefaultTimeout(60_000);

/** Answers of a server that the rig's own cannot give: long logs, partial failures, ends in the middle. */
let answer: (url: URL, request: Request) => Response | Promise<Response>;
let rig: CliRig;
let server: Bun.Server<undefined>;
const id = newId();

beforeAll(async () => {
  rig = await CliRig.start();
  server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) =>
      request.headers.get("x-api-key") === API_KEY
        ? answer(new URL(request.url), request)
        : new Response("", { status: 401 }),
  });
  rig.login(`http://127.0.0.1:${server.port}`);
});
afterAll(async () => {
  await server.stop(true);
  await rig[Symbol.asyncDispose]();
});

const gone = () => Response.json({ code: 404, message: `sandbox ${id} was not found` }, { status: 404 });

describe("aenv logs", () => {
  const line = (n: number, ms: number) => ({
    timestamp: new Date(1_700_000_000_000 + ms).toISOString(),
    level: n % 2 === 0 ? "info" : "warn",
    message: `line ${n}\x1b[2J`,
    fields: {},
  });
  /** As the server pages: from a millisecond on, that one included. */
  const pager = (entries: () => ReturnType<typeof line>[]) => (url: URL) => {
    const limit = Number(url.searchParams.get("limit"));
    const cursor = Number(url.searchParams.get("cursor") ?? "0");
    const forward = url.searchParams.get("direction") === "forward";
    const wanted = entries().filter((entry) => !forward || Date.parse(entry.timestamp) >= cursor);
    return Response.json({ logs: (forward ? wanted : wanted.toReversed()).slice(0, limit) });
  };

  test("all pages, each line once, several in one millisecond", async () => {
    const entries = Array.from({ length: 2_500 }, (_, i) => line(i, Math.floor(i / 7)));
    answer = pager(() => entries);
    const run = await rig.aenv(["logs", id]);
    expect(run.err).toBe("");
    expect([...run.out.matchAll(/line \d+$/gm)].map(String)).toEqual(entries.map((_, i) => `line ${i}`));
    expect(run.out).toMatch(/^2023-11-14 22:13:20Z {2}info {3}line 0\n/);
    const tail = await rig.aenv(["logs", "-n", "3", "-o", "json", id]);
    expect(
      tail.out
        .trimEnd()
        .split("\n")
        .map((text) => JSON.parse(text)),
    ).toEqual(entries.slice(-3));
    const head = Bun.spawn(
      ["bash", "-c", `"$@" | head -1; echo "\${PIPESTATUS[0]}"`, "bash", ...rig.command(["logs", id])],
      {
        env: rig.env(),
        stdout: "pipe",
      },
    );
    expect(await new Response(head.stdout).text()).toEndWith("line 0\n0\n");
  });

  test("followed: what comes later, equal lines too, until the sandbox is gone", async () => {
    let asked = 0;
    const same = line(1, 5);
    answer = (url) => {
      asked++;
      if (asked > 4) return gone();
      if (asked === 3) return new Response("", { status: 503 });
      return pager(() => [
        line(0, 0),
        same,
        ...(asked > 1 ? [same] : []),
        ...(asked > 3 ? [line(2, 9)] : []),
      ])(url);
    };
    const run = await rig.aenv(["logs", "--follow", id]);
    expect(run.code).toBe(0);
    expect([...run.out.matchAll(/line \d/g)].map(String)).toEqual(["line 0", "line 1", "line 1", "line 2"]);
    expect(run.err).toBe(
      `HTTP 503: no message; trying again\nThe server answers again.\nThe sandbox ${id} is gone.\n`,
    );
  });
});

const point = (second: number, patch: object = {}) => ({
  timestamp: new Date(second * 1000).toISOString(),
  timestampUnix: second,
  cpuUsedPct: 12.345,
  cpuCount: 2,
  memUsed: 256 * 1024 ** 2,
  memTotal: 1024 ** 3,
  memCache: 1024,
  diskUsed: 5 * 1024 ** 3,
  diskTotal: 10 * 1024 ** 3,
  ...patch,
});

describe("aenv metrics and top", () => {
  test("a table, JSON, nothing yet", async () => {
    answer = (url) => {
      expect(url.pathname).toBe(`/sandboxes/${id}/metrics`);
      const start = Number(url.searchParams.get("start"));
      expect(Math.abs(Date.now() / 1000 - 600 - start)).toBeLessThan(30);
      return Response.json([point(1_700_000_000)]);
    };
    const table = await rig.aenv(["metrics", id, "--last", "600", "--output", "table"]);
    expect(table.out).toBe(
      "TIME                  CPU %  CPU  MEM        MEM %  CACHE    DISK     DISK %\n" +
        "2023-11-14 22:13:20Z  12.3   2    256.0 MiB  25.0   1.0 KiB  5.0 GiB  50.0\n",
    );
    const json = await rig.aenv(["metrics", id, "--last", "600"]);
    expect(JSON.parse(json.out)).toEqual([point(1_700_000_000)]);
    answer = () => Response.json([]);
    expect((await rig.aenv(["metrics", id])).out).toBe("[]\n");
  });

  test("top: figures of more than a hundred sandboxes, in order, also of those without any", async () => {
    const ids = Array.from({ length: 130 }, () => newId());
    answer = (url) => {
      if (url.pathname === "/v2/sandboxes") {
        return Response.json(
          ids.map((sandboxID, i) => ({ sandboxID, templateID: "t", alias: `n${i}`, cpuCount: 1 })),
        );
      }
      const asked = url.searchParams.get("sandbox_ids")!.split(",");
      expect(asked.length).toBeLessThanOrEqual(100);
      const sandboxes = asked
        .filter((sandbox) => ids.indexOf(sandbox) > 0)
        .map((sandbox) => [sandbox, point(1_700_000_000, { memUsed: ids.indexOf(sandbox) })]);
      return Response.json({ sandboxes: Object.fromEntries(sandboxes) });
    };
    const run = await rig.aenv(["top", "--once", "--sort", "memory", "-o", "table"]);
    const rows = run.out.trimEnd().split("\n").slice(1);
    expect(rows.map((row) => row.split(/ +/)[1])).toEqual(
      Array.from({ length: 130 }, (_, i) => `n${129 - i}`),
    );
    expect(rows.at(-1)).toMatch(/ n0 +- +1 +- +- +- +-$/);
  });
});

describe("aenv fork, snapshot, info", () => {
  test("copies that started and one that did not", async () => {
    answer = async (url, request) => {
      expect([request.method, url.pathname, await request.json()]).toEqual([
        "POST",
        `/sandboxes/${id}/fork`,
        { count: 3, timeout: 60 },
      ]);
      return Response.json(
        [
          { sandbox: { sandboxID: "a" } },
          { error: { code: 507, message: "no\x1b[2J room" } },
          { sandbox: { sandboxID: "c" } },
        ],
        { status: 201 },
      );
    };
    expect(await rig.aenv(["fork", id, "--count", "3", "--timeout", "60"])).toEqual({
      code: 1,
      out: "a\nc\n",
      err: "Error: copy 2 of 3: no room\n",
    });
  });

  test("a snapshot's image is told; one is deleted by its name", async () => {
    const asked: string[] = [];
    answer = (url, request) => {
      asked.push(`${request.method} ${url.pathname}`);
      return Response.json({ snapshotID: "s1", names: ["a", "b:c"], imageRef: "host/repo:tag" });
    };
    expect((await rig.aenv(["snapshot", "create", id])).out).toBe(
      "Created snapshot s1\nImage: host/repo:tag\n",
    );
    expect((await rig.aenv(["snap", "rm", "b:c"])).out).toBe("Deleted snapshot s1\n");
    expect(asked).toEqual([
      `POST /sandboxes/${id}/snapshots`,
      "GET /snapshots/b%3Ac",
      "DELETE /templates/s1",
    ]);
  });

  test("no token stands in what info prints", async () => {
    const detail = {
      sandboxID: id,
      templateID: "t",
      state: "running",
      envdAccessToken: "SECRET-1",
      trafficAccessToken: "SECRET-2",
      metadata: { a: "b" },
      somethingNew: 1,
    };
    answer = () => Response.json(detail);
    const json = await rig.aenv(["sandbox", "info", id]);
    expect(JSON.parse(json.out)).toEqual({
      sandboxID: id,
      templateID: "t",
      state: "running",
      metadata: { a: "b" },
      somethingNew: 1,
    });
    const table = await rig.aenv(["info", id, "-o", "table"]);
    expect(table.out).toMatch(/^METADATA +a=b$/m);
    expect(json.out + table.out).not.toContain("SECRET");
  });

  test("start: what is told of a cold boot, variables, volumes; what makes no sense", async () => {
    answer = async (url, request) => {
      expect([url.pathname, await request.json()]).toEqual([
        "/sandboxes-cold",
        {
          image: "debian:12",
          timeout: 300,
          secure: true,
          cpuCount: 2,
          memoryMB: 512,
          diskSizeMB: 2048,
          envVars: { A: "1=2", B: "" },
          metadata: { k: "v" },
          volumeMounts: [{ name: "vol", path: "/data" }],
        },
      ]);
      return Response.json({ sandboxID: "new" }, { status: 201 });
    };
    const options = [
      "--cpu",
      "2",
      "--mem",
      "512",
      "--disk-mb",
      "2048",
      "-e",
      "A=1=2",
      "-e",
      "B=",
      "--metadata",
      "k=v",
    ];
    const started = await rig.aenv([
      "start",
      "-d",
      "--cold",
      ...options,
      "--volume",
      "/data/=vol",
      "debian:12",
    ]);
    expect(started).toEqual({ code: 0, out: "new\n", err: "" });
    for (const [args, said] of [
      [["--cpu", "2"], "--cpu goes with --cold"],
      [["--cold", "--disk-size-mb", "1500"], "multiple of 1024"],
      [["-e", "A"], "--env needs NAME=VALUE"],
      [["--volume", "data=v"], "needs an absolute path"],
      [["--volume", "/=v"], "needs an absolute path other than /"],
      [["--volume", "/a=v", "--volume", "/a/b=w"], "the mounts /a and /a/b overlap"],
      [["--detach-keys", "x,yz"], "are no detach keys"],
    ] as const) {
      const run = await rig.aenv(["start", "-d", ...args, "debian"]);
      expect([args, run.code, run.out]).toEqual([args, 2, ""]);
      expect(run.err).toContain(said);
    }
  });
});
