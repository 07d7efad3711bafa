/**
 * Asks again and again until the answer is neither false, empty nor undefined, and resolves with it. The limit is for
 * what never comes, not for what takes long: a busy machine takes its time.
 *
 * @throws Error that names `what`, after `ms` milliseconds; the limit of a test should be higher.
 */
export async function eventually<T>(
  what: string,
  probe: () => T | Promise<T>,
  ms = 20_000,
): Promise<NonNullable<T>> {
  const until = performance.now() + ms;
  for (let pause = 2; ; pause = Math.min(pause * 2, 50)) {
    const value = await probe();
    if (value) return value;
    if (performance.now() > until) throw new Error(`not within ${ms} ms: ${what}`);
    await Bun.sleep(pause);
  }
}
