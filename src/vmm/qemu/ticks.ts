import { tickSample } from "../../../ffi/clock.ts";

/** A shorter distance between the two readings would make the guest's clock drift noticeably. */
const SHORTEST_MS = 40;
const LONG_ENOUGH_MS = 2000;

/**
 * Frequency of the host's counter in kHz. An emulated guest reads that counter as its TSC, and has to be
 * told how fast it runs: its own measurement against an emulated timer fails on a busy host, and then the
 * boot hangs, because a machine with reduced ACPI hardware has no other tick at that point.
 */
export function tickMeter(): () => Promise<number> {
  const start = tickSample();
  let known: number | undefined;
  return async () => {
    if (known !== undefined) return known;
    let now = tickSample();
    const elapsedMs = (now.nanoseconds - start.nanoseconds) / 1e6;
    if (elapsedMs < SHORTEST_MS) {
      await Bun.sleep(SHORTEST_MS - elapsedMs);
      now = tickSample();
    }
    const spanMs = (now.nanoseconds - start.nanoseconds) / 1e6;
    const kHz = Math.round((now.ticks - start.ticks) / spanMs);
    if (spanMs > LONG_ENOUGH_MS) known = kHz;
    return kHz;
  };
}
