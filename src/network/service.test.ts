import { expect, test } from "bun:test";
import { join } from "node:path";

/**
 * The real tests run in namespaces of their own (network and mounts), so that nothing of this host is
 * touched and nothing can be left behind: see service.netns.ts.
 */
const lacking =
  process.geteuid?.() !== 0
    ? "needs root to make network namespaces"
    : ["nft", "ip", "nsenter", "unshare", "gcc"]
        .filter((tool) => Bun.which(tool) === null)
        .map((tool) => `needs ${tool}`)
        .join(", ");
if (lacking !== "") console.warn(`skipped: network slots in real namespaces: ${lacking}`);

test.skipIf(lacking !== "")(
  "network slots in real namespaces",
  async () => {
    const suite = join(import.meta.dir, "service.netns.ts");
    const run = Bun.spawn(
      ["unshare", "--net", "--mount", "--propagation", "private", process.execPath, "test", suite],
      { stdout: "pipe", stderr: "pipe", env: { ...process.env, AENV_NETNS_SUITE: "1" } },
    );
    const [stdout, stderr, exitCode] = await Promise.all([
      new Response(run.stdout).text(),
      new Response(run.stderr).text(),
      run.exited,
    ]);
    const output = `${stdout}\n${stderr}`;
    if (exitCode !== 0) console.error(output);
    for (const line of stdout.split("\n").filter((text) => text.startsWith("measured:"))) console.log(line);
    expect(exitCode).toBe(0);
    expect(output).toMatch(/\n 0 fail/);
    expect(output).toMatch(/\nRan [1-9]\d* tests/);
  },
  90_000,
);
