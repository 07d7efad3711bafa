import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runCommand } from "../lib/command.ts";
import { createLogger } from "../lib/log.ts";
import { createLayerWriter, openStack } from "../storage/overlaybd/index.ts";
import { readProcessStat } from "../vmm/process.ts";
import { createMemoryService } from "./index.ts";

const MIB = 1 << 20;
const PAGE = 4096;
const SIZE = 16 * MIB;

test("memory that a VMM replaced or dropped: what was written since is captured, the rest is the base's", async () => {
  const dir = mkdtempSync(join(tmpdir(), "memory-balloon-"));
  await using scope = new AsyncDisposableStack();
  scope.defer(() => rmSync(dir, { recursive: true, force: true }));
  const program = join(dir, "vmm");
  await runCommand(["gcc", "-O1", "-o", program, join(import.meta.dir, "../../tests/support/balloon-vmm.c")]);

  const log = createLogger("test");
  log.level = "silent";
  const memory = createMemoryService({ cacheDir: join(dir, "cache"), maxCacheBytes: 1 << 30, log });
  const base = Buffer.alloc(SIZE);
  for (let page = 0; page < SIZE / PAGE; page++) base.fill(1 + (page % 100), page * PAGE, (page + 1) * PAGE);
  const writer = createLayerWriter(join(dir, "base"), { virtualSizeBytes: SIZE, uuid: crypto.randomUUID() });
  writer.append(0, new Uint8Array(base));
  const image = { sizeBytes: SIZE, layers: [writer.finish()] };
  const lease = scope.use(await memory.materialize(image));

  const vmm = Bun.spawn([program, lease.file], { stdio: ["ignore", "pipe", "inherit"] });
  scope.defer(async () => {
    vmm.kill("SIGKILL");
    await vmm.exited;
  });
  const { value } = await vmm.stdout.getReader().read();
  expect(Buffer.from(value!).toString()).toBe("ready\n");
  const captured = await memory.capture(
    {
      vmId: "vm",
      pid: vmm.pid,
      startTimeTicks: readProcessStat(vmm.pid)!.startTimeTicks,
      controlSocketPath: join(dir, "none"),
      workDir: dir,
      memoryFile: lease.file,
    },
    image,
    join(dir, "layer"),
  );

  const expected = Buffer.from(base);
  for (let at = 0; at < SIZE; at += 8 * PAGE) {
    const isGivenBack = (at >= 2 * MIB && at < 6 * MIB) || at >= 15 * MIB || (at >= 8 * MIB && at < 9 * MIB);
    if (!isGivenBack) expected.fill(0xa0, at, at + PAGE);
  }
  expected.fill(0xb0, 3 * MIB, 3 * MIB + PAGE);
  expected.fill(0, 4 * MIB, 4 * MIB + PAGE);
  expected.fill(0xb1, SIZE - PAGE);
  using stack = openStack({ lowers: captured.image.layers, virtualSizeBytes: SIZE });
  const found = Buffer.alloc(SIZE);
  stack.read(0, found);
  const differing: number[] = [];
  for (let at = 0; at < SIZE; at += PAGE)
    if (!found.subarray(at, at + PAGE).equals(expected.subarray(at, at + PAGE))) differing.push(at / PAGE);
  expect(differing).toEqual([]);
  // Nothing of what was given back takes up room.
  const kept = (16 - 4 - 1 - 1) * (MIB / (8 * PAGE));
  expect(captured.storedBytes).toBe((kept + 2) * PAGE);
  expect(captured.zeroedBytes).toBe(PAGE);
});
