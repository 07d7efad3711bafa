import { expect, test } from "bun:test";
import { CliError } from "./command.ts";
import { DetachDetector, detachKeys } from "./detach.ts";

const fail = (message: string) => new CliError(message, { exitCode: 2 });

/** What is passed on of chunks of keys, and whether they detached. */
function typed(sequence: string, ...chunks: string[]): { passed: string; detached: boolean } {
  let passed = "";
  let detached = false;
  using detector = new DetachDetector(
    Buffer.from(sequence),
    (bytes) => {
      passed += bytes.toString();
    },
    () => {
      detached = true;
    },
  );
  for (const chunk of chunks) if (!detached) detector.typed(Buffer.from(chunk));
  return { passed, detached };
}

test("the sequence detaches, however it is cut; all else is passed on, in order", () => {
  expect(typed("\x1d\x1d", "ls\r", "\x1d", "\x1d")).toEqual({ passed: "ls\r", detached: true });
  expect(typed("\x1d\x1d", "ls\r\x1d\x1drest")).toEqual({ passed: "ls\r", detached: true });
  expect(typed("\x1d\x1d", "\x1d", "x")).toEqual({ passed: "\x1dx", detached: false });
  expect(typed("\x10q", "\x10\x10", "q")).toEqual({ passed: "\x10", detached: true });
  expect(typed("aab", "aaab")).toEqual({ passed: "a", detached: true });
  expect(typed("aab", "aa", "c", "ab")).toEqual({ passed: "aacab", detached: false });
  expect(typed("", "\x1d\x1d")).toEqual({ passed: "\x1d\x1d", detached: false });
});

test("keys that are held back are keys after a moment", async () => {
  const { promise, resolve } = Promise.withResolvers<string>();
  using detector = new DetachDetector(
    Buffer.from("\x1d\x1d"),
    (bytes) => resolve(bytes.toString()),
    () => resolve("detached"),
  );
  detector.typed(Buffer.from("\x1d"));
  expect(await promise).toBe("\x1d");
});

test("names of keys", () => {
  expect([...detachKeys("ctrl-p,ctrl-q", fail)]).toEqual([16, 17]);
  expect([...detachKeys("ctrl-],d", fail)]).toEqual([29, 100]);
  expect([...detachKeys("ctrl-@,ctrl-[,ctrl-\\", fail)]).toEqual([0, 27, 28]);
  expect(detachKeys("none", fail).length).toBe(0);
  for (const wrong of ["ctrl-", "ctrl-P", "é", "ab", "ctrl-a,,b"]) {
    expect(() => detachKeys(wrong, fail)).toThrow("are no detach keys");
  }
});
