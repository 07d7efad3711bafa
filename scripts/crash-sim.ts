/**
 * Crash simulation of the storage engine: `bun scripts/crash-sim.ts [--seeds N] [--first SEED]`. Prints how many
 * crashes were simulated; on a failure the seed, with which `--first SEED --seeds 1` repeats it.
 */
import { parseArgs } from "node:util";
import { SimulationFailure } from "../src/storage/overlaybd/testing/crash-sim.ts";
import { simulate } from "../src/storage/overlaybd/testing/run-sim.ts";

const { values } = parseArgs({ options: { seeds: { type: "string" }, first: { type: "string" } } });
const seeds = Number(values.seeds ?? process.env.SEEDS ?? 2000);
const first = Number(values.first ?? Math.floor(Math.random() * 2 ** 31));
const start = performance.now();
try {
  const total = simulate(first, seeds);
  const seconds = ((performance.now() - start) / 1000).toFixed(1);
  console.log(
    `crash-sim: ${total.seeds} seeds from ${first}: ${total.kills} kills and ${total.powerLosses} power losses ` +
      `(${total.images} disk images) in ${total.operations} disk operations, ` +
      `${total.indexRewrites} indexes and ${total.movedBytes >> 20} MiB of data compacted, 0 acknowledged writes lost, ${seconds} s`,
  );
} catch (error) {
  if (!(error instanceof SimulationFailure)) throw error;
  console.error(`crash-sim: FAILED: ${error.message}`);
  process.exitCode = 1;
}
