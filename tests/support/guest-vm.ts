import { readFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import type { BootSpec, RunningSandbox } from "../../src/sandbox/types.ts";
import { createLayerWriter, type LayerRef } from "../../src/storage/overlaybd/index.ts";
import type { RealNode } from "./real-node.ts";

/** Machines with a root file system that the test makes, booted without a template around them. */

const MIB = 1 << 20;

export interface RootFs {
  readonly lowers: readonly LayerRef[];
  readonly virtualSizeBytes: number;
}

/** A directory as the only layer of an image. */
export async function rootFsOf(dir: string, workDir: string, sizeMiB: number): Promise<RootFs> {
  const raw = join(workDir, "guest.ext4");
  await runCommand(["truncate", "-s", `${sizeMiB}M`, raw]);
  await runCommand(["mke2fs", "-q", "-t", "ext4", "-d", dir, raw]);
  const file = join(workDir, "guest.lsmt");
  const writer = createLayerWriter(file, { virtualSizeBytes: sizeMiB * MIB, uuid: crypto.randomUUID() });
  const bytes = readFileSync(raw);
  const zeros = Buffer.alloc(65536);
  for (let at = 0; at < bytes.length; at += zeros.length) {
    const block = bytes.subarray(at, at + zeros.length);
    if (!block.equals(zeros)) writer.append(at, new Uint8Array(block));
  }
  writer.finish();
  const digest = `sha256:${new Bun.CryptoHasher("sha256").update(readFileSync(file)).digest("hex")}`;
  return { lowers: [{ file, digest }], virtualSizeBytes: sizeMiB * MIB };
}

export async function bootGuest(
  node: RealNode,
  sandboxId: string,
  rootfs: RootFs,
  more: Pick<BootSpec, "egress"> = {},
): Promise<RunningSandbox> {
  return await node.sandboxes.boot({
    identity: { sandboxId, templateId: "guest-test", envVars: {} },
    shape: { vcpuCount: 1, memoryMiB: 160 },
    rootfs,
    ...more,
  });
}
