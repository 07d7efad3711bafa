import { AenvError } from "../../lib/errors.ts";

export interface QemuVersion {
  readonly major: number;
  readonly minor: number;
  /** As printed, e.g. `10.0.2`. */
  readonly text: string;
  atLeast(major: number, minor: number): boolean;
}

/** Oldest release whose options and device state we know to work. */
const OLDEST_MAJOR = 7;
const OLDEST_MINOR = 2;

/** From the first line of `qemu-system-x86_64 --version`; throws when it is not one or too old. */
export function parseQemuVersion(output: string, binary: string): QemuVersion {
  const match = /QEMU emulator version (\d+)\.(\d+)(\.\d+)*/.exec(output);
  if (match === null) {
    throw new AenvError({
      code: "qemu_invalid",
      message: `${binary} does not say that it is QEMU: ${output.trim().split("\n", 1)[0] ?? ""}`,
      remediation: "set [qemu].binary_path to a qemu-system-x86_64, or run agentenv setup",
    });
  }
  const major = Number(match[1]);
  const minor = Number(match[2]);
  const atLeast = (wantedMajor: number, wantedMinor: number): boolean =>
    major > wantedMajor || (major === wantedMajor && minor >= wantedMinor);
  const text = match[0].slice(match[0].lastIndexOf(" ") + 1);
  if (!atLeast(OLDEST_MAJOR, OLDEST_MINOR)) {
    throw new AenvError({
      code: "qemu_too_old",
      message: `${binary} is QEMU ${text}; ${OLDEST_MAJOR}.${OLDEST_MINOR} is the oldest that works`,
      remediation: "run agentenv setup, which provides a newer one without installing it on the host",
    });
  }
  return { major, minor, text, atLeast };
}
