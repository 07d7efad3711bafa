import { NbdErrno } from "./codec.ts";

/** A code of ours (`disk_full`, `os_enospc`) or of the runtime (`ENOSPC`) anywhere in the chain of causes. */
function codes(error: unknown): string[] {
  const found: string[] = [];
  let current: unknown = error;
  for (let depth = 0; current instanceof Error && depth < 8; depth++) {
    if ("code" in current && typeof current.code === "string") found.push(current.code.toUpperCase());
    current = current.cause;
  }
  return found;
}

/** The protocol's number for a failure of the storage: out of space and memory by name, the rest is EIO. */
export function nbdErrnoOf(error: unknown): NbdErrno {
  for (const code of codes(error)) {
    const name = code.startsWith("OS_") ? code.slice(3) : code;
    if (name === "DISK_FULL" || name === "ENOSPC" || name === "EDQUOT" || name === "EFBIG")
      return NbdErrno.ENOSPC;
    if (name === "ENOMEM") return NbdErrno.ENOMEM;
    if (name === "EROFS" || name === "EPERM") return NbdErrno.EPERM;
  }
  return NbdErrno.EIO;
}
