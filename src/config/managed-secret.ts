import { randomBytes } from "node:crypto";
import {
  closeSync,
  constants,
  fchmodSync,
  fstatSync,
  fsyncSync,
  linkSync,
  mkdirSync,
  openSync,
  readSync,
  rmSync,
  type Stats,
  writeSync,
} from "node:fs";
import { basename, dirname, join } from "node:path";
import { errorCode } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";

/**
 * Secrets this node makes and keeps: `$AENV_HOME/secrets/<name>`. Directory and file are refused unless
 * they are ours alone, because whoever can write them can choose the secret.
 */
const DIR_NAME = "secrets";
const DIR_MODE = 0o700;
const FILE_MODE = 0o600;

function refuse(path: string, what: string, cure: string): AenvError {
  return new AenvError({ code: "secret_refused", message: `${path} ${what}`, remediation: cure });
}

function effectiveUid(): number {
  const uid = process.geteuid?.();
  if (uid === undefined) {
    throw new AenvError({
      code: "secrets_unsupported",
      message: "managed secrets need a system with Unix file permissions",
      remediation: "give the secret in the environment",
    });
  }
  return uid;
}

function octal(mode: number): string {
  return `0${(mode & 0o7777).toString(8).padStart(3, "0")}`;
}

/** Expected and found values of whatever does not fit. */
function requireOwnership(path: string, stats: Stats, mode: number): void {
  const uid = effectiveUid();
  if (stats.uid !== uid) {
    throw refuse(path, `belongs to uid ${stats.uid}, expected ${uid}`, `chown ${uid} ${path}`);
  }
  if ((stats.mode & 0o7777) !== mode) {
    throw refuse(
      path,
      `has mode ${octal(stats.mode)}, expected ${octal(mode)}`,
      `chmod ${octal(mode)} ${path}`,
    );
  }
}

/** Opens the checked directory; undefined when it does not exist. */
function openDirectory(dir: string): number | undefined {
  if (basename(dir) !== DIR_NAME) {
    throw refuse(
      dir,
      `is not a directory named "${DIR_NAME}"`,
      "keep managed secrets under $AENV_HOME/secrets",
    );
  }
  let fd: number;
  try {
    fd = openSync(dir, constants.O_RDONLY | constants.O_DIRECTORY | constants.O_NOFOLLOW);
  } catch (error) {
    const code = errorCode(error);
    if (code === "ENOENT") return undefined;
    if (code === "ENOTDIR" || code === "ELOOP") {
      throw refuse(dir, "is not a real directory (a symbolic link is refused)", "replace it by a directory");
    }
    throw error;
  }
  try {
    requireOwnership(dir, fstatSync(fd), DIR_MODE);
    return fd;
  } catch (error) {
    closeSync(fd);
    throw error;
  }
}

/** At most `maxBytes` of an open file; undefined when it is longer. */
function readBounded(fd: number, maxBytes: number): string | undefined {
  const buffer = Buffer.alloc(maxBytes + 1);
  let length = 0;
  for (;;) {
    const count = readSync(fd, buffer, length, buffer.length - length, length);
    length += count;
    if (length > maxBytes) return undefined;
    if (count === 0) return buffer.toString("latin1", 0, length);
  }
}

/** A regular file's text, opened without blocking; undefined when there is none. Symlinks are followed. */
export function readSecretFile(path: string, maxBytes: number): string | undefined {
  return readFile(path, path, maxBytes, 0, () => undefined);
}

function readFile(
  path: string,
  shownPath: string,
  maxBytes: number,
  flags: number,
  checkStats: (stats: Stats) => void,
): string | undefined {
  let fd: number;
  try {
    fd = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK | flags);
  } catch (error) {
    const code = errorCode(error);
    if (code === "ENOENT") return undefined;
    if (code === "ELOOP") throw refuse(shownPath, "is a symbolic link", "replace it by a regular file");
    throw new AenvError({
      code: "secret_not_readable",
      message: `${shownPath} cannot be opened: ${code ?? String(error)}`,
      remediation: "let the server's user read it, or remove it",
      cause: error,
    });
  }
  try {
    const stats = fstatSync(fd);
    if (!stats.isFile()) throw refuse(shownPath, "is not a regular file", "replace it by a regular file");
    checkStats(stats);
    const text = readBounded(fd, maxBytes);
    if (text === undefined) {
      throw refuse(
        shownPath,
        `is larger than the ${maxBytes} bytes expected`,
        "write the secret alone into it",
      );
    }
    return text;
  } finally {
    closeSync(fd);
  }
}

function readManagedIn(dirFd: number, path: string, maxBytes: number): string | undefined {
  // Through the open directory: what was checked is what is used.
  return readFile(`/proc/self/fd/${dirFd}/${basename(path)}`, path, maxBytes, constants.O_NOFOLLOW, (stats) =>
    requireOwnership(path, stats, FILE_MODE),
  );
}

/** The managed secret's text, or undefined when it does not exist. Throws when it is not ours alone. */
export function readManagedSecret(path: string, maxBytes: number): string | undefined {
  const dirFd = openDirectory(dirname(path));
  if (dirFd === undefined) return undefined;
  try {
    return readManagedIn(dirFd, path, maxBytes);
  } finally {
    closeSync(dirFd);
  }
}

/**
 * Makes the secret if there is none and returns what is there then: of several processes that try at once
 * one wins and all return its text. On stable storage when this returns.
 */
export function createManagedSecret(path: string, content: string, maxBytes: number): string {
  const dir = dirname(path);
  mkdirSync(dirname(dir), { recursive: true });
  try {
    mkdirSync(dir, { mode: DIR_MODE });
  } catch (error) {
    if (errorCode(error) !== "EEXIST") throw error;
  }
  const dirFd = openDirectory(dir);
  if (dirFd === undefined) throw refuse(dir, "vanished while a secret was made", "start again");
  const inDir = (name: string) => join(`/proc/self/fd/${dirFd}`, name);
  const temporary = inDir(`.${basename(path)}.${randomBytes(8).toString("hex")}.tmp`);
  try {
    const fd = openSync(
      temporary,
      constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | constants.O_NOFOLLOW,
      FILE_MODE,
    );
    try {
      fchmodSync(fd, FILE_MODE);
      const bytes = Buffer.from(content);
      for (let offset = 0; offset < bytes.length; ) offset += writeSync(fd, bytes, offset);
      fsyncSync(fd);
    } finally {
      closeSync(fd);
    }
    try {
      linkSync(temporary, inDir(basename(path)));
    } catch (error) {
      if (errorCode(error) !== "EEXIST") throw error;
    }
    rmSync(temporary);
    fsyncSync(dirFd);
    const text = readManagedIn(dirFd, path, maxBytes);
    if (text === undefined) throw refuse(path, "vanished right after it was made", "start again");
    return text;
  } finally {
    rmSync(temporary, { force: true });
    closeSync(dirFd);
  }
}
