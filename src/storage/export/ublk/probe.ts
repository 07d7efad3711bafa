import { AenvError, errorChain } from "../../../lib/errors.ts";
import { BufferPool } from "../nbd/index.ts";
import { UblkServer } from "./server.ts";

/** Whether this host can serve disks over ublk, and if not, why and what helps. */
export interface ProbeVerdict {
  readonly usable: boolean;
  readonly reason: string;
  readonly cure?: string;
}

/** Of devices that a probe adds: never an owner's. */
const PROBE_STAMP = 2 ** 48;

/**
 * Asks the kernel for its features, adds a device and deletes it. Some kernels hang in that: run it in a
 * process of its own that can be given up, see blockd's `--probe-ublk`.
 */
export async function probeUblkHere(): Promise<ProbeVerdict> {
  try {
    await using server = UblkServer.open(new BufferPool());
    const info = await server.add(PROBE_STAMP, -1);
    await server.remove(info.id);
    return { usable: true, reason: "devices can be added, served and taken over" };
  } catch (error) {
    const cure = error instanceof AenvError ? error.remediation : undefined;
    return { usable: false, reason: errorChain(error).join(": "), ...(cure === undefined ? {} : { cure }) };
  }
}
