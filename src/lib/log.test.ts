import { expect, test } from "bun:test";
import { appendFileSync, closeSync, mkdtempSync, openSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fillDisk } from "../../tests/support/full-disk.ts";
import { runCommand, tryCommand } from "./command.ts";
import { createLogger, logFormat, logLevel, withLogContext } from "./log.ts";
import { formatRecord } from "./log-format.ts";

/** Lines that `work` logs in the format. */
async function logged(format: string, work: (log: ReturnType<typeof createLogger>) => unknown) {
  const dir = mkdtempSync(join(tmpdir(), "aenv-log-"));
  const before = process.env.AENV_LOG_FORMAT;
  try {
    process.env.AENV_LOG_FORMAT = format;
    const path = join(dir, "log");
    const log = createLogger("test", openSync(path, "a"));
    log.level = "debug";
    await work(log);
    return readFileSync(path, "utf8");
  } finally {
    if (before === undefined) delete process.env.AENV_LOG_FORMAT;
    else process.env.AENV_LOG_FORMAT = before;
    rmSync(dir, { recursive: true });
  }
}

test("level and format come from the environment, and nonsense is not fatal", () => {
  expect(logLevel({})).toBe("info");
  expect(logLevel({ AENV_LOG_LEVEL: "DEBUG" })).toBe("debug");
  expect(logLevel({ AENV_LOG_LEVEL: "loud" })).toBe("info");
  expect(logLevel({ RUST_LOG: "warn" })).toBe("warn");
  expect(logLevel({ RUST_LOG: "info,agentenv=trace,envd=error" })).toBe("trace");
  expect(logLevel({ AENV_LOG_LEVEL: "error", RUST_LOG: "debug" })).toBe("error");
  expect(logLevel({ RUST_LOG: "off" })).toBe("silent");
  expect(
    ["json", "PRETTY", "compact", "xml", undefined].map((text) => logFormat({ AENV_LOG_FORMAT: text })),
  ).toEqual(["json", "pretty", "compact", "compact", "compact"]);
});

test("the ids of the work are in every line of it, also after a wait, and nowhere else", async () => {
  const text = await logged("json", async (log) => {
    await Promise.all(
      ["a", "b"].map((requestId) =>
        withLogContext({ requestId }, async () => {
          await Bun.sleep(1);
          log.child({ room: "x" }).info({ n: 1 }, "inner");
          withLogContext({ sandboxId: `s-${requestId}` }, () => log.warn("deeper"));
        }),
      ),
    );
    log.info("outside");
  });
  const lines = text
    .trim()
    .split("\n")
    .map((line) => JSON.parse(line));
  const of = (msg: string) =>
    lines
      .filter((line) => line.msg === msg)
      .map(({ requestId, sandboxId, n }) => ({ requestId, sandboxId, n }));
  expect(of("inner")).toEqual([
    { requestId: "a", sandboxId: undefined, n: 1 },
    { requestId: "b", sandboxId: undefined, n: 1 },
  ]);
  expect(of("deeper")).toEqual([
    { requestId: "a", sandboxId: "s-a", n: undefined },
    { requestId: "b", sandboxId: "s-b", n: undefined },
  ]);
  expect(of("outside")).toEqual([{ requestId: undefined, sandboxId: undefined, n: undefined }]);
});

test.each(["json", "compact", "pretty"])("format %s: fields, errors, and no secrets", async (format) => {
  const text = await logged(format, (log) => {
    log.info({ sandboxId: "s1", apiKey: "SECRET-1", reply: { envdAccessToken: "SECRET-2" } }, "made");
    log.error({ err: new Error("it broke"), headers: { "x-api-key": "SECRET-3" } }, "failed");
  });
  expect(text).toContain("s1");
  expect(text).toContain("it broke");
  expect(text).not.toContain("SECRET");
  expect(text.endsWith("\n")).toBe(true);
  if (format === "compact") {
    expect(text.split("\n")[0]).toMatch(/^\d{4}-\S+Z INFO {2}test: made sandboxId=s1 apiKey=\[redacted\]/);
  }
});

test("a line that is no record passes as it is", () => {
  expect(formatRecord("oops\n", "compact")).toBe("oops\n");
});

test("a full disk: logging never throws, what waits is written once there is room, the rest is counted", async () => {
  const dir = mkdtempSync(join(tmpdir(), "aenv-log-"));
  const mounted = await tryCommand(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", dir]);
  if (mounted.exitCode !== 0) {
    rmSync(dir, { recursive: true });
    console.warn(`tmpfs cannot be mounted here, the full disk is not tried: ${mounted.stderr.trim()}`);
    return;
  }
  const path = join(dir, "log");
  const fd = openSync(path, "a");
  try {
    const log = createLogger("test", fd);
    log.level = "info";
    log.info("before");
    // No room in the last page either.
    appendFileSync(path, "-".repeat(4096 - (statSync(path).size % 4096)));
    const filler = fillDisk(dir);
    log.error("while full");
    expect(readFileSync(path, "utf8")).not.toContain("while full");
    rmSync(filler);
    log.info("room again");
    const text = readFileSync(path, "utf8");
    expect(text).toContain("while full");
    expect(text.indexOf("room again")).toBeGreaterThan(text.indexOf("while full"));

    appendFileSync(path, "-".repeat(4096 - (statSync(path).size % 4096)));
    const second = fillDisk(dir);
    for (let i = 0; i < 20; i++) log.info("x".repeat(100_000));
    rmSync(second);
    log.info("the last");
    const all = readFileSync(path, "utf8");
    expect(all).toContain("the last");
    expect(all).toMatch(/log lines were lost: the log could not be written.*lost=1\d\b/);
  } finally {
    closeSync(fd);
    await runCommand(["umount", dir]);
    rmSync(dir, { recursive: true });
  }
});
