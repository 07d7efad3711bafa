import { check } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Bindings of c/shim/clock.h. */
const shim = bindShim({ aenv_tick_sample: { args: ["ptr"], returns: "i32" } });

/** The processor's counter (TSC on x86) and the raw monotonic clock, read at the same moment. */
export function tickSample(): { ticks: number; nanoseconds: number } {
  const sample = new Float64Array(new ArrayBuffer(16));
  check(shim.aenv_tick_sample(sample), "reading the processor's counter");
  return { ticks: sample[0]!, nanoseconds: sample[1]! };
}
