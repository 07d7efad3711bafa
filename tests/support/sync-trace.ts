import { dirname } from "node:path";

/*
 * Reads a trace of system calls and tells what a loss of power at any moment would have taken: bytes that
 * were written and not synced, names that were made or removed in a directory that was not synced since.
 * Strict POSIX: syncing a new file does not sync its name.
 */

export const TRACED_CALLS = [
  ...["openat", "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat"],
  ...["unlink", "unlinkat", "rmdir", "write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate"],
  ...["copy_file_range", "sendfile", "fsync", "fdatasync", "close"],
].join(",");

/** Arguments for strace; the trace of a program that prints `MARK <text>` lines on its standard output. */
export const straceArguments = (output: string): string[] => [
  ...[
    "strace",
    "-f",
    "-y",
    "-qq",
    "-s",
    "80",
    "-e",
    `trace=${TRACED_CALLS}`,
    "-e",
    "signal=none",
    "-o",
    output,
  ],
];

type Relevance = (path: string, what: "bytes" | "made" | "removed") => boolean;

interface Inode {
  dirty: boolean;
}

export interface Moment {
  readonly mark: string;
  /** Everything that was not on stable storage then, in words. */
  readonly unsafe: readonly string[];
}

const CALL = /^(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)$/;

/** Quoted paths and descriptors with their paths, in order. */
function paths(text: string): string[] {
  return [...text.matchAll(/"((?:[^"\\]|\\.)*)"|\d+<(\/[^>]*)>/g)].map((match) => match[1] ?? match[2] ?? "");
}

export class SyncModel {
  readonly #relevant: Relevance;
  readonly #files = new Map<string, Inode>();
  /** Directory to the names in it that are not durable. */
  readonly #names = new Map<string, Map<string, "made" | "removed">>();
  readonly moments: Moment[] = [];
  /** Calls of relevant files that were seen: a trace that shows nothing proves nothing. */
  seen = 0;

  /** `relevant`: whose loss counts. */
  constructor(relevant: Relevance) {
    this.#relevant = relevant;
  }

  #touch(path: string, what: "made" | "removed"): void {
    const dir = dirname(path);
    const names = this.#names.get(dir) ?? new Map<string, "made" | "removed">();
    names.set(path, what);
    this.#names.set(dir, names);
  }

  #inode(path: string): Inode {
    const inode = this.#files.get(path) ?? { dirty: false };
    this.#files.set(path, inode);
    return inode;
  }

  /** One line of the trace, with unfinished calls already joined. */
  call(name: string, argumentsText: string): void {
    const result = argumentsText.slice(argumentsText.lastIndexOf(" = ") + 3);
    const failed = result.startsWith("-1");
    const [first, second] = paths(argumentsText.slice(0, argumentsText.lastIndexOf(" = ")));
    const mark = name === "write" ? /^1<[^>]*>, "MARK ([^"\\]*)/.exec(argumentsText)?.[1] : undefined;
    if (mark !== undefined) this.moments.push({ mark, unsafe: this.unsafe() });
    if (failed || first === undefined) return;
    if (this.#relevant(first, "bytes")) this.seen += 1;
    switch (name) {
      case "openat":
      case "creat":
        if (!argumentsText.includes("O_CREAT") && name !== "creat") return;
        // With O_EXCL it is new for sure; else it may have been there.
        if (argumentsText.includes("O_EXCL") || !this.#files.has(first)) this.#touch(first, "made");
        this.#inode(first);
        return;
      case "mkdir":
      case "mkdirat":
        this.#touch(first, "made");
        return;
      case "rename":
      case "renameat":
      case "renameat2":
        if (second === undefined) return;
        this.#files.set(second, this.#inode(first));
        this.#files.delete(first);
        this.#touch(first, "removed");
        this.#touch(second, "made");
        return;
      case "link":
      case "linkat":
        if (second === undefined) return;
        this.#files.set(second, this.#inode(first));
        this.#touch(second, "made");
        return;
      case "unlink":
      case "unlinkat":
      case "rmdir":
        this.#files.delete(first);
        this.#touch(first, "removed");
        return;
      case "write":
      case "pwrite64":
      case "writev":
      case "pwritev":
      case "pwritev2":
      case "ftruncate":
        this.#inode(first).dirty = true;
        return;
      case "copy_file_range":
      case "sendfile":
        this.#inode(name === "sendfile" ? first : (second ?? first)).dirty = true;
        return;
      case "fsync":
      case "fdatasync":
        this.#names.delete(first);
        this.#inode(first).dirty = false;
        return;
      default:
        return;
    }
  }

  unsafe(): string[] {
    const found: string[] = [];
    for (const [path, { dirty }] of this.#files) {
      if (dirty && this.#relevant(path, "bytes")) found.push(`bytes of ${path}`);
    }
    for (const names of this.#names.values()) {
      for (const [path, what] of names) {
        if (this.#relevant(path, what)) found.push(`name ${path} (${what})`);
      }
    }
    return found.sort();
  }
}

/** Works through a whole trace. */
export function readTrace(text: string, relevant: Relevance): SyncModel {
  const model = new SyncModel(relevant);
  const unfinished = new Map<string, string>();
  for (const line of text.split("\n")) {
    const match = CALL.exec(line);
    if (match === null) continue;
    const [, pid = "", name = "", rest = ""] = match;
    const key = `${pid} ${name}`;
    if (rest.endsWith("<unfinished ...>")) {
      unfinished.set(key, rest.slice(0, -"<unfinished ...>".length));
      continue;
    }
    const before = line.includes(" resumed>") ? (unfinished.get(key) ?? "") : "";
    unfinished.delete(key);
    model.call(name, before + rest);
  }
  return model;
}
