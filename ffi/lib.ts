import { dlopen, type FFIFunction } from "bun:ffi";
import { readFileSync } from "node:fs";
import shimPath from "../build/libaenv.so" with { type: "file" };

/**
 * The shim library is embedded in the executable. It is loaded from a memfd, so that no file is left
 * behind and no writable temporary directory is needed.
 */
let loadedPath: string | undefined;

function shimLibraryPath(): string {
  if (loadedPath !== undefined) return loadedPath;
  const libc = dlopen("libc.so.6", {
    memfd_create: { args: ["ptr", "u32"], returns: "i32" },
    write: { args: ["i32", "ptr", "u64"], returns: "i64" },
  });
  const name = Buffer.from("libaenv.so\0");
  const MFD_CLOEXEC = 1;
  const fd = libc.symbols.memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) throw new Error("memfd_create failed: the shim library cannot be loaded");
  const bytes = readFileSync(shimPath);
  for (let offset = 0; offset < bytes.length; ) {
    const written = Number(libc.symbols.write(fd, bytes.subarray(offset), bytes.length - offset));
    if (written <= 0) throw new Error("writing the shim library to a memfd failed");
    offset += written;
  }
  loadedPath = `/proc/self/fd/${fd}`;
  return loadedPath;
}

/** Binds functions of the shim. Every function returns a count or `-errno`, see c/shim/*.h. */
export function bindShim<const Symbols extends Record<string, FFIFunction>>(symbols: Symbols) {
  return dlopen(shimLibraryPath(), symbols).symbols;
}
