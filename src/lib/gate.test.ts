import { expect, test } from "bun:test";
import { Gate } from "./gate.ts";

test("who gives up waiting leaves the queue at once, and the places stay right", async () => {
  const gate = new Gate(1, "work", 2);
  const hold = Promise.withResolvers<void>();
  const running = gate.run(() => hold.promise);
  const controller = new AbortController();
  const order: string[] = [];
  const gone = gate.run(async () => order.push("gone"), controller.signal);
  const stays = gate.run(async () => order.push("stays"));
  await expect(gate.run(async () => undefined)).rejects.toMatchObject({ status: 429 });
  controller.abort(new Error("not any more"));
  await expect(gone).rejects.toThrow("not any more");
  hold.resolve();
  await Promise.all([running, stays]);
  expect(order).toEqual(["stays"]);
  expect(gate.running).toBe(0);
  await expect(gate.run(async () => undefined, controller.signal)).rejects.toThrow("not any more");
  expect(gate.running).toBe(0);
});

test("an abort after a task began does not end it", async () => {
  const gate = new Gate(1, "work");
  const hold = Promise.withResolvers<string>();
  const first = Promise.withResolvers<void>();
  const controller = new AbortController();
  const running = gate.run(() => first.promise);
  const waited = gate.run(() => hold.promise, controller.signal);
  first.resolve();
  await running;
  controller.abort(new Error("too late"));
  hold.resolve("done");
  expect(await waited).toBe("done");
  expect(gate.running).toBe(0);
});
