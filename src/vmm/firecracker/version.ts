import { AenvError } from "../../lib/errors.ts";

export interface FirecrackerVersion {
  readonly major: number;
  readonly minor: number;
  /** As printed, e.g. `1.13.1`. */
  readonly text: string;
  /** What an operator should know about this release, though it is used. */
  readonly warnings: readonly string[];
  atLeast(major: number, minor: number): boolean;
}

/** The first release whose snapshot load can name other host devices for the guest's network interfaces. */
const OLDEST: readonly [number, number] = [1, 12];

/** Releases that must not run sandboxes, with the reason (upstream's changelog). */
const REFUSED: Readonly<Record<string, string>> = {};

/** From the first line of `firecracker --version`; throws when it is not one, too old or known as bad. */
export function parseFirecrackerVersion(
  output: string,
  binary: string,
  refused: Readonly<Record<string, string>> = REFUSED,
): FirecrackerVersion {
  const match = /^Firecracker v(\d+)\.(\d+)\.(\d+\S*)/m.exec(output);
  if (match === null) {
    throw new AenvError({
      code: "firecracker_invalid",
      message: `${binary} does not say which Firecracker it is: ${JSON.stringify(output.slice(0, 200))}`,
      remediation: "set [firecracker].binary_path to a Firecracker executable",
    });
  }
  const [major, minor] = [Number(match[1]), Number(match[2])];
  const text = `${major}.${minor}.${match[3]}`;
  const atLeast = (wantedMajor: number, wantedMinor: number): boolean =>
    major > wantedMajor || (major === wantedMajor && minor >= wantedMinor);
  const bad = refused[text];
  if (!atLeast(...OLDEST) || bad !== undefined) {
    throw new AenvError({
      code: "firecracker_version_refused",
      message: `Firecracker ${text} (${binary}) is not used: ${bad ?? `it is older than ${OLDEST.join(".")} and cannot restore into another network`}`,
      remediation: "install a current release of Firecracker, or set vmm to qemu",
    });
  }
  return { major, minor, text, warnings: advisories(major, minor, Number.parseInt(match[3]!, 10)), atLeast };
}

/** CVE-2026-5747 (AWS bulletin 2026-015): 1.13.0 to 1.14.3 and 1.15.0, in the PCI transport that is off by default. */
function advisories(major: number, minor: number, patch: number): string[] {
  const affected =
    major === 1 && (minor === 13 || (minor === 14 && patch <= 3) || (minor === 15 && patch === 0));
  return affected
    ? [
        "this release has CVE-2026-5747 in its PCI transport, which guests are not given here; 1.14.4 and 1.15.1 are without",
      ]
    : [];
}
