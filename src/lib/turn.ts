/** Longest stretch of work before other events get their turn. */
const STRETCH_MS = 10;

/** When a turn that was asked for comes in any case, in milliseconds. */
const LATEST_MS = 5;

/**
 * Gives way to the event loop once. A timer stands by: a loop that runs within a callback of another one, as
 * test matchers that wait for a promise make, may leave out immediates while its timers go on.
 */
export function nextTurn(): Promise<void> {
  return new Promise((resolve) => {
    const immediate = setImmediate(() => {
      clearTimeout(timer);
      resolve();
    });
    const timer = setTimeout(() => {
      clearImmediate(immediate);
      resolve();
    }, LATEST_MS);
  });
}

/**
 * Returns a function to await between the steps of long synchronous work: it gives way to the event loop
 * when the current stretch has lasted long enough, and costs nothing before.
 */
export function pacer(): () => Promise<void> | undefined {
  let since = performance.now();
  return () => {
    if (performance.now() - since < STRETCH_MS) return undefined;
    return nextTurn().then(() => {
      since = performance.now();
    });
  };
}
