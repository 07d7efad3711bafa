import { expect, test } from "bun:test";
import { rmSync } from "node:fs";
import { requireRateLimits } from "../../src/network/index.ts";
import { holdPool } from "../support/pool.ts";
import { busyboxTemplate, startRealNode, testDeps } from "../support/real-node.ts";

const deps = testDeps();
const { pool: POOL } = holdPool();
const MIB = 1 << 20;

const rated = await requireRateLimits().then(
  () => true,
  (error: unknown) => {
    console.log(`skipped: a rate of the network (${error})`);
    return false;
  },
);

test.skipIf(deps === undefined)(
  "rate limits of disk and network hold in a guest, also after a resume",
  async () => {
    const rateLimit = { bandwidthBytesPerSec: 2 * MIB, bandwidthBurstBytes: 0, iops: 0, iopsBurst: 0 };
    const rates = { receiveBytesPerSec: 0, receiveBurstBytes: 0, sendBytesPerSec: MIB, sendBurstBytes: 0 };
    const node = await startRealNode({
      deps: deps!,
      pool: POOL,
      diskRateLimit: rateLimit,
      network: rated ? { rates } : {},
    });
    try {
      const { id } = await node.orchestrator.create({
        template: await busyboxTemplate(node),
        timeoutSeconds: 600,
        onTimeout: "kill",
        autoResume: false,
        secure: true,
        metadata: {},
        envVars: {},
      });
      // A lower bound only: a busy machine makes it slower, nothing makes it faster.
      const seconds = async (script: string) => {
        const started = performance.now();
        await node.sh(id, script);
        return (performance.now() - started) / 1000;
      };
      // A second's worth may go at once.
      const write = "dd if=/dev/zero of=/root/file bs=1M count=6 conv=fsync && sync";
      expect(await seconds(write)).toBeGreaterThan((6 - 2) / 2);
      await node.orchestrator.pause(id);
      await node.orchestrator.resume(id, 600);
      expect(await seconds(write)).toBeGreaterThan((6 - 2) / 2);
      if (rated)
        expect(await seconds(`head -c ${2.5 * MIB} /dev/zero | tr '\\0' x`)).toBeGreaterThan(2.5 - 1);
    } finally {
      await node[Symbol.asyncDispose]();
      for (const dir of [node.home, node.runtimeDir]) rmSync(dir, { recursive: true, force: true });
    }
  },
  180_000,
);
