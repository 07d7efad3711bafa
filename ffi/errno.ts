import { constants } from "node:os";
import { AenvError } from "../src/lib/errors.ts";

const NAMES = new Map<number, string>(Object.entries(constants.errno).map(([name, value]) => [value, name]));

export function errnoName(errno: number): string {
  return NAMES.get(errno) ?? `errno ${errno}`;
}

/** Turns a shim's result into a number or an error that names the call and what it was done to. */
export function check(result: number | bigint, what: string): number {
  const value = Number(result);
  if (value >= 0) return value;
  const name = errnoName(-value);
  throw new AenvError({
    code: name === "ENOSPC" ? "disk_full" : `os_${name.toLowerCase()}`,
    status: name === "ENOSPC" ? 507 : 500,
    message: `${what}: ${name}`,
    ...(name === "ENOSPC" ? { remediation: "free space on the file system that holds $AENV_HOME" } : {}),
  });
}
