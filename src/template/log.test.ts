import { expect, test } from "bun:test";
import { BuildLog } from "./log.ts";

test("a log is bounded in bytes, says so once, and keeps its end", () => {
  const log = new BuildLog();
  const lines = log.lines("info", "1");
  const line = Buffer.from(`${"a".repeat(7999)}\n`);
  for (let i = 0; i < 5000; i++) lines.write(line);
  lines.write(Buffer.from("the end\n"));
  expect(log.entries.at(-1)!.message).toContain("the log reached its limit of 50000 entries or 15 MiB");
  const seen = log.entries.length;
  log.close();
  expect(log.entries.filter(({ message }) => message.includes("reached its limit"))).toHaveLength(1);
  expect(log.entries[seen]!.message).toMatch(/^… \d+ entries left out …$/);
  expect(log.entries.at(-1)!.message).toBe("the end");
  expect(Buffer.byteLength(log.take())).toBeLessThan((16 << 20) + 1024);
});

test("a long message is cut, and says by how much", () => {
  const log = new BuildLog();
  log.add("info", "b".repeat(8192 + 5));
  expect(log.entries[0]!.message).toBe(`${"b".repeat(8192)}… (5 more characters)`);
});
