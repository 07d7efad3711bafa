import { join } from "node:path";
import type { Logger } from "../lib/log.ts";
import { readLive } from "./live.ts";

/** File that a running sandbox's VM appends its console output to; undefined when no VM of it runs. */
export async function consoleLogPath(
  rootDir: string,
  sandboxId: string,
  log: Logger,
): Promise<string | undefined> {
  const live = await readLive(rootDir, sandboxId, log);
  return live === undefined ? undefined : join(rootDir, sandboxId, live.generation, "console.log");
}
