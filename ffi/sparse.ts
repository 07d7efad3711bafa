import { check } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Bindings of c/shim/sparse.h: copies of sparse files that keep the holes. */
const shim = bindShim({
  aenv_clone_file: { args: ["i32", "i32"], returns: "i32" },
  aenv_copy_sparse: { args: ["i32", "i32", "f64", "f64", "ptr"], returns: "i32" },
});

/** Shares all blocks of a file with an empty one; false where the file system cannot. */
export function cloneFile(fromFd: number, toFd: number): boolean {
  return shim.aenv_clone_file(fromFd, toFd) === 0;
}

/**
 * Copies the data from `offset` on, about `budgetBytes` of it; returns the offset to go on from, or undefined
 * at the end of the source. Holes are skipped; the size of the target is set by the caller.
 */
export function copySparse(
  fromFd: number,
  toFd: number,
  offset: number,
  budgetBytes: number,
): number | undefined {
  const next = new Float64Array(new ArrayBuffer(8));
  const more = check(shim.aenv_copy_sparse(fromFd, toFd, offset, budgetBytes, next), "copying a memory file");
  return more === 1 ? next[0] : undefined;
}
