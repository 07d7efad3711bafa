import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { FileLock, lockHolder } from "../lib/file-lock.ts";

function lockDirectory(directory: string, code: string, remediation: string): Disposable {
  mkdirSync(directory, { recursive: true, mode: 0o700 });
  const path = join(directory, "server.lock");
  const lock = FileLock.tryAcquire(path, "agentenv serve");
  if (lock !== undefined) return lock;
  const pid = lockHolder(path);
  throw new AenvError({
    code,
    status: 409,
    message: `${directory} is in use by another server${pid === undefined ? "" : ` (process ${pid})`}`,
    remediation,
  });
}

/**
 * Takes the home directory for this process until the lock is disposed or the process ends, however it
 * ends. Error `home_in_use` 409 names the process that has it.
 */
export function lockHome(homeDir: string): Disposable {
  return lockDirectory(
    homeDir,
    "home_in_use",
    "stop that server, or give this one a home of its own with AENV_HOME_PATH",
  );
}

/**
 * The same for the runtime directory: a server takes the devices and namespaces it finds there for its own. Error
 * `runtime_in_use`.
 */
export function lockRuntime(runtimePath: string): Disposable {
  return lockDirectory(
    runtimePath,
    "runtime_in_use",
    "stop that server, or give this one a runtime directory of its own with AENV_RUNTIME_PATH",
  );
}
