import { expect, spyOn, test } from "bun:test";
import { adoptVmm, ExitWatch, readProcessStat } from "./process.ts";

/** A process that is nobody's here. */
async function stranger(): Promise<number> {
  const child = Bun.spawn(["setsid", "-f", "sh", "-c", "echo $$; exec sleep 100"], { stdout: "pipe" });
  const { value } = await child.stdout.getReader().read();
  return Number(Buffer.from(value ?? []).toString());
}

function adopt(pid: number) {
  const vmm = adoptVmm(pid, readProcessStat(pid)?.startTimeTicks ?? "", "/dev/null");
  if (vmm === undefined) throw new Error(`process ${pid} is gone`);
  return vmm;
}

/** Whoever looks now and then fails. */
function withoutTimers(): Disposable {
  const refuse = () => {
    throw new Error("a timer was set");
  };
  const spies = new DisposableStack();
  spies.adopt(spyOn(globalThis, "setInterval").mockImplementation(refuse), (spy) => spy.mockRestore());
  spies.adopt(spyOn(globalThis, "setTimeout").mockImplementation(refuse as never), (spy) =>
    spy.mockRestore(),
  );
  spies.adopt(spyOn(Bun, "sleep").mockImplementation(refuse), (spy) => spy.mockRestore());
  return spies;
}

test("processes of others are watched: each is told when it ends, not before, and without looking now and then", async () => {
  using _ = withoutTimers();
  const pids = await Promise.all(Array.from({ length: 8 }, stranger));
  const vmms = pids.map(adopt);
  const ended = new Set<number>();
  for (const { pid, exited } of vmms) exited.then(() => ended.add(pid));
  for (const [i, vmm] of vmms.entries()) {
    // All but the first are watched twice.
    const again = i === 0 ? undefined : adopt(vmm.pid);
    process.kill(vmm.pid, "SIGKILL");
    expect(await vmm.exited).toEqual({ exitCode: null, signal: null, stderrTail: "" });
    await again?.exited;
    expect(ended.size).toBe(i + 1);
    expect(vmm.signal("SIGKILL")).toBe(false);
  }
  // With nobody to watch any more, and one that comes then.
  const late = adopt(await stranger());
  late.poke();
  expect(late.signal("SIGTERM")).toBe(true);
  await late.exited;
  expect(adoptVmm(late.pid, late.startTimeTicks, "/dev/null")).toBeUndefined();
});

test("a number that another process has by now is nobody's", async () => {
  const pid = await stranger();
  try {
    expect(adoptVmm(pid, "1", "/dev/null")).toBeUndefined();
  } finally {
    process.kill(pid, "SIGKILL");
  }
});

test("events that fail or end are told and asked for again, and what ended meanwhile is seen", async () => {
  const told: string[] = [];
  const waiting: PromiseWithResolvers<{ done: boolean }>[] = [];
  let cancelled = 0;
  const open = () => {
    if (told.length === 2) throw new Error("EMFILE");
    return {
      read: () => {
        const one = Promise.withResolvers<{ done: boolean }>();
        waiting.push(one);
        return one.promise;
      },
      cancel: async () => {
        cancelled++;
        waiting.at(-1)?.resolve({ done: true });
      },
    };
  };
  const watch = new ExitWatch(open, (error) => told.push(String(error)), 1);
  const asked = async (times: number) => {
    while (waiting.length < times) await Bun.sleep(1);
  };
  let looks = 0;
  const look = () => void looks++;
  watch.add(look);
  watch.start();
  await asked(1);
  expect(looks).toBe(1);
  waiting[0]!.reject(new Error("EIO"));
  await asked(2);
  expect(looks).toBe(2);
  waiting[1]!.resolve({ done: true });
  await asked(3);
  expect(looks).toBe(3);
  expect(told).toEqual(["Error: EIO", "Error: the events have an end", "Error: EMFILE"]);
  waiting[2]!.resolve({ done: false });
  await asked(4);
  expect(looks).toBe(4);
  // Nobody waits any more, and then somebody does.
  watch.delete(look);
  watch.add(look);
  watch.start();
  await asked(5);
  expect(looks).toBe(5);
  expect(told).toHaveLength(3);
  watch.delete(look);
  expect(cancelled).toBe(4);
});
