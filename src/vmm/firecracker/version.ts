import { readFileSync } from "node:fs";
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

/** What of a host decides whether a release can be used on it. */
export interface HostFacts {
  readonly kernel: readonly [major: number, minor: number];
  /** Guests are offered shadow stacks (CET). */
  readonly shadowStacks: boolean;
}

export function hostFacts(
  release = readFileSync("/proc/sys/kernel/osrelease", "utf8"),
  cpuinfo = readFileSync("/proc/cpuinfo", "utf8"),
): HostFacts {
  const [, major, minor] = /^(\d+)\.(\d+)/.exec(release) ?? [];
  return {
    kernel: [Number(major ?? 0), Number(minor ?? 0)],
    shadowStacks: /^flags\s*:.*\b(user_shstk|shstk)\b/m.test(cpuinfo),
  };
}

/**
 * Upstream's #5972, in 1.16.1 and 1.17.0: states lack the register that says which supervisor state a guest's threads
 * have. Linux 6.18 and later offer guests such a state, shadow stacks; restored from a state without it they crash.
 */
function losesSupervisorState(major: number, minor: number, patch: number, host: HostFacts): boolean {
  const mended = major > 1 || minor > 16 || (minor === 16 && patch >= 1);
  const offered = host.kernel[0] > 6 || (host.kernel[0] === 6 && host.kernel[1] >= 18);
  return !mended && offered && host.shadowStacks;
}

/** From the first line of `firecracker --version`; throws when it is not one, too old or known as bad. */
export function parseFirecrackerVersion(
  output: string,
  binary: string,
  host: HostFacts,
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
  const bad =
    refused[text] ??
    (losesSupervisorState(major, minor, Number.parseInt(match[3]!, 10), host)
      ? "on this kernel and processor it loses part of guests' processor state (shadow stacks) when it saves them, which 1.16.1 does not"
      : undefined);
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
