import { seededRandom } from "../test-support.ts";
import { type LifeResult, SimulationFailure, simulateLife } from "./crash-sim.ts";

/** Lives `count` lives from `firstSeed` on; the first that fails ends it with its seed in the message. */
export function simulate(
  firstSeed: number,
  count: number,
  untilMs = Number.POSITIVE_INFINITY,
): LifeResult & { seeds: number } {
  const total: LifeResult & { seeds: number } = {
    kills: 0,
    powerLosses: 0,
    images: 0,
    failures: 0,
    indexRewrites: 0,
    movedBytes: 0,
    operations: 0,
    seeds: 0,
  };
  for (let seed = firstSeed; seed < firstSeed + count && performance.now() < untilMs; seed++) {
    try {
      const result = simulateLife(seededRandom(seed));
      total.kills += result.kills;
      total.powerLosses += result.powerLosses;
      total.images += result.images;
      total.failures += result.failures;
      total.indexRewrites += result.indexRewrites;
      total.movedBytes += result.movedBytes;
      total.operations += result.operations;
      total.seeds++;
    } catch (error) {
      if (!(error instanceof SimulationFailure)) throw new Error(`seed ${seed}`, { cause: error });
      throw new SimulationFailure(`seed ${seed}: ${error.message}`);
    }
  }
  return total;
}
