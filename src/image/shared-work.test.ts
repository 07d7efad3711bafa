import { expect, test } from "bun:test";
import { SharedWork } from "./shared-work.ts";

const never = new AbortController().signal;

test("one run per key, every caller's sink hears of it", async () => {
  await using work = new SharedWork<number>();
  const gate = Promise.withResolvers<void>();
  let runs = 0;
  const heard: string[] = [];
  const join = (name: string) =>
    work.run(
      "key",
      { signal: never, progress: ({ phase }) => heard.push(`${name}:${phase}`) },
      async (_signal, progress) => {
        runs++;
        await gate.promise;
        progress({ phase: "p" });
        return runs;
      },
    );
  const both = Promise.all([join("a"), join("b")]);
  gate.resolve();
  expect(await both).toEqual([1, 1]);
  expect(heard).toEqual(["a:p", "b:p"]);
  expect(await join("c")).toBe(2);
});

test("the last caller to leave ends the work and waits for its clean-up", async () => {
  await using work = new SharedWork<string>();
  const first = new AbortController();
  const second = new AbortController();
  const seen: string[] = [];
  const run = (signal: AbortSignal) =>
    work.run("key", { signal }, async (inner) => {
      await new Promise<void>((resolve) => inner.addEventListener("abort", () => resolve(), { once: true }));
      seen.push("aborted");
      await Bun.sleep(20);
      seen.push("clean");
      throw new Error("ended");
    });
  const results = [run(first.signal), run(second.signal)].map((promise) =>
    promise.catch((error: Error) => error.message),
  );
  first.abort(new Error("first left"));
  expect(await results[0]).toBe("first left");
  expect(seen).toEqual([]);
  second.abort(new Error("second left"));
  expect(await results[1]).toBe("second left");
  expect(seen).toEqual(["aborted", "clean"]);
});

test("a failure of the starter's own making does not fail the others", async () => {
  await using work = new SharedWork<string>();
  const run = (name: string, fails: boolean) =>
    work.run(
      "key",
      { signal: never },
      async () => {
        await Bun.sleep(5);
        if (fails) throw new Error(`${name}: no login`);
        return name;
      },
      (error) => error instanceof Error && error.message.includes("login"),
    );
  const failing = run("a", true).catch((error: Error) => error.message);
  const other = run("b", false);
  expect(await failing).toBe("a: no login");
  expect(await other).toBe("b");
});
