import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { FileLock, lockHolder } from "../lib/file-lock.ts";

/**
 * Takes the home directory for this process until the lock is disposed or the process ends, however it
 * ends. Error `home_in_use` 409 names the process that has it.
 */
export function lockHome(homeDir: string): Disposable {
  mkdirSync(homeDir, { recursive: true, mode: 0o700 });
  const path = join(homeDir, "server.lock");
  const lock = FileLock.tryAcquire(path, "agentenv serve");
  if (lock !== undefined) return lock;
  const pid = lockHolder(path);
  throw new AenvError({
    code: "home_in_use",
    status: 409,
    message: `${homeDir} is in use by another server${pid === undefined ? "" : ` (process ${pid})`}`,
    remediation: "stop that server, or give this one a home of its own with AENV_HOME_PATH",
  });
}
