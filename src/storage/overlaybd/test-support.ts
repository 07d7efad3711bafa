import { mkdtempSync, rmSync } from "node:fs";

/** Directory that is removed when the scope ends. */
export function scratchDirectory(name: string): Disposable & { path: string } {
  const path = mkdtempSync(`/tmp/overlaybd-${name}-`);
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true, force: true }) };
}

/**
 * Random numbers below a limit from a printed seed; `AENV_TEST_SEED` repeats a run.
 */
export function testRandom(): (limit: number) => number {
  const seed = Number(process.env.AENV_TEST_SEED ?? Math.floor(Math.random() * 2 ** 31));
  console.info(`AENV_TEST_SEED=${seed}`);
  return seededRandom(seed);
}

export function seededRandom(seed: number): (limit: number) => number {
  let state = seed >>> 0;
  return (limit) => {
    state = (state + 0x6d2b79f5) >>> 0;
    let value = Math.imul(state ^ (state >>> 15), state | 1);
    value = (value + Math.imul(value ^ (value >>> 7), value | 61)) ^ value;
    return Math.floor((((value ^ (value >>> 14)) >>> 0) / 2 ** 32) * limit);
  };
}

/** Bytes that differ by sector and by `salt`; a part of them does not compress. */
export function fillPattern(target: Uint8Array, salt: number): Uint8Array {
  const random = seededRandom(salt);
  for (let at = 0; at < target.byteLength; at += 512) {
    const sector = target.subarray(at, at + 512);
    if (random(3) === 0) for (let i = 0; i < sector.byteLength; i++) sector[i] = random(256);
    else sector.fill(1 + random(255));
  }
  return target;
}

export function expectEqualBytes(got: Uint8Array, expected: Uint8Array, what: string): void {
  if (Buffer.compare(got, expected) === 0) return;
  let at = 0;
  while (got[at] === expected[at]) at++;
  throw new Error(
    `${what}: byte ${at} (sector ${Math.floor(at / 512)}) is ${got[at]}, expected ${expected[at]}`,
  );
}
