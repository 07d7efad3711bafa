/**
 * Writer for the cpio "newc" format the kernel unpacks initial file systems from
 * (Documentation/driver-api/early-userspace/buffer-format.rst). The same entries give the same bytes:
 * no times, owner root, inode numbers in order.
 */
export type CpioEntry =
  | { readonly kind: "directory"; readonly path: string; readonly mode: number }
  | { readonly kind: "file"; readonly path: string; readonly mode: number; readonly content: Uint8Array }
  | {
      readonly kind: "character-device";
      readonly path: string;
      readonly mode: number;
      readonly major: number;
      readonly minor: number;
    };

const TYPE_BITS = { directory: 0o040000, file: 0o100000, "character-device": 0o020000 } as const;

/** Paths are relative, parents come before children. */
export function writeCpio(entries: readonly CpioEntry[]): Uint8Array {
  const parts: Uint8Array[] = [];
  let length = 0;
  const push = (bytes: Uint8Array) => {
    parts.push(bytes);
    length += bytes.length;
    const padding = -length & 3;
    if (padding > 0) {
      parts.push(new Uint8Array(padding));
      length += padding;
    }
  };
  const header = (
    path: string,
    ino: number,
    mode: number,
    links: number,
    size: number,
    major = 0,
    minor = 0,
  ) => {
    const name = Buffer.from(`${path}\0`);
    // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
    const numbers = [ino, mode, 0, 0, links, 0, size, 0, 0, major, minor, name.length, 0];
    const text = numbers.map((value) => value.toString(16).padStart(8, "0")).join("");
    push(Buffer.concat([Buffer.from(`070701${text}`), name]));
  };
  for (const [index, entry] of entries.entries()) {
    if (entry.path.startsWith("/") || entry.path === "")
      throw new Error(`cpio path must be relative: ${entry.path}`);
    const mode = TYPE_BITS[entry.kind] | entry.mode;
    const links = entry.kind === "directory" ? 2 : 1;
    if (entry.kind === "file") {
      header(entry.path, index + 1, mode, links, entry.content.length);
      push(entry.content);
    } else if (entry.kind === "character-device") {
      header(entry.path, index + 1, mode, links, 0, entry.major, entry.minor);
    } else {
      header(entry.path, index + 1, mode, links, 0);
    }
  }
  header("TRAILER!!!", 0, 0, 1, 0);
  const archive = new Uint8Array(length);
  let offset = 0;
  for (const part of parts) {
    archive.set(part, offset);
    offset += part.length;
  }
  return archive;
}
