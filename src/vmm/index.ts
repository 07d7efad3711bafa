import type { VmIdentity } from "./types.ts";

export { createQemuDriver, killVm, type QemuDriverOptions } from "./qemu/driver.ts";
export type * from "./types.ts";

/**
 * Why a state made by one VMM cannot run on another, in words for the user; undefined when it can. A
 * device state fits only the VMM version, the mode and the CPU model that wrote it. The kernel may differ:
 * the restored guest brings its own.
 */
export function identityMismatch(made: VmIdentity, here: VmIdentity): string | undefined {
  const differences: string[] = [];
  const compare = (what: string, was: string, is: string): void => {
    if (was !== is) differences.push(`${what} ${was} (here: ${is})`);
  };
  compare("VMM", made.vmm, here.vmm);
  compare("VMM version", made.vmmVersion, here.vmmVersion);
  compare("virtualization mode", made.mode, here.mode);
  compare("CPU model", made.cpuModel, here.cpuModel);
  return differences.length === 0 ? undefined : `it was made with ${differences.join(", ")}`;
}
