import { expect } from "bun:test";

/** What this host lacks for suites in network namespaces; empty: nothing. */
export function lackingForNamespaces(...tools: string[]): string {
  if (process.geteuid?.() !== 0) return "needs root to make network namespaces";
  return ["nft", "ip", "nsenter", "unshare", "gcc", ...tools]
    .filter((tool) => Bun.which(tool) === null)
    .map((tool) => `needs ${tool}`)
    .join(", ");
}

/**
 * Runs a test file in a network and mount namespace of its own, so that nothing of this host is touched and
 * nothing can be left behind. The file checks AENV_NETNS_SUITE. Lines that begin with "measured:" or "| " are
 * printed.
 */
export async function runNetnsSuite(suite: string): Promise<void> {
  const run = Bun.spawn(
    [
      "unshare",
      "--net",
      "--mount",
      "--propagation",
      "private",
      process.execPath,
      "test",
      "--timeout",
      "120000",
      suite,
    ],
    { stdout: "pipe", stderr: "pipe", env: { ...process.env, AENV_NETNS_SUITE: "1" } },
  );
  const [stdout, stderr, exitCode] = await Promise.all([
    new Response(run.stdout).text(),
    new Response(run.stderr).text(),
    run.exited,
  ]);
  const output = `${stdout}\n${stderr}`;
  if (exitCode !== 0) console.error(output);
  for (const line of stdout.split("\n").filter((text) => /^(measured:|\| )/.test(text))) console.log(line);
  expect(exitCode).toBe(0);
  expect(output).toMatch(/\n 0 fail/);
  expect(output).toMatch(/\nRan [1-9]\d* tests/);
}
