/** Longest stretch of work before other events get their turn. */
const STRETCH_MS = 10;

/**
 * Returns a function to await between the steps of long synchronous work: it gives way to the event loop
 * when the current stretch has lasted long enough, and costs nothing before.
 */
export function pacer(): () => Promise<void> | undefined {
  let since = performance.now();
  return () => {
    if (performance.now() - since < STRETCH_MS) return undefined;
    return new Promise((resolve) =>
      setImmediate(() => {
        since = performance.now();
        resolve();
      }),
    );
  };
}
