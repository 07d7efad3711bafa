import { afterEach, expect, spyOn, test } from "bun:test";
import { nextTurn, pacer } from "./turn.ts";

const spies: { mockRestore(): void }[] = [];
afterEach(() => {
  for (const spy of spies.splice(0)) spy.mockRestore();
});

test("other events have their turn before work goes on", async () => {
  const order: string[] = [];
  setImmediate(() => order.push("other"));
  await nextTurn();
  order.push("work");
  expect(order).toEqual(["other", "work"]);
});

test("where immediates are left out the timer does it", async () => {
  const cleared = spyOn(globalThis, "clearImmediate");
  spies.push(cleared, spyOn(globalThis, "setImmediate").mockImplementation((() => 0) as never));
  await nextTurn();
  expect(cleared).toHaveBeenCalledTimes(1);
});

test("a pacer asks for a turn after a stretch of work, and not before", async () => {
  let now = 1000;
  spies.push(spyOn(performance, "now").mockImplementation(() => now));
  const breathe = pacer();
  now += 9;
  expect(breathe()).toBeUndefined();
  now += 1;
  await breathe();
  now += 9;
  expect(breathe()).toBeUndefined();
});
