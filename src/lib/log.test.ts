import { expect, test } from "bun:test";
import { mkdtempSync, openSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
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
