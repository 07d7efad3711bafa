import type { VmIdentity } from "./types.ts";

export { checkDriveCount, checkKernelLine } from "./common.ts";
export { checkMode, createFirecrackerDriver, type FirecrackerDriverOptions } from "./firecracker/driver.ts";
export { sweepJails } from "./firecracker/jail.ts";
export { createQemuDriver, killVm, type QemuDriverOptions } from "./qemu/driver.ts";
export type * from "./types.ts";

/** Two measurements of one host's counter differ by far less, two kinds of host by more. */
const TSC_TOLERANCE = 0.002;

/**
 * Why a state made by one VMM cannot run on another, in words for the user; undefined when it can. A
 * device state fits only the VMM version, the mode and the CPU model that wrote it, and a guest's clock only the
 * TSC it was told of. The kernel may differ: the restored guest brings its own.
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
  compare("CPU template", made.cpuTemplate ?? "none", here.cpuTemplate ?? "none");
  // A state with the device needs it; one without is loaded with it, too.
  if (made.balloon === true && here.balloon !== true)
    compare("a balloon device", "for memory given back", "none");
  const [wasKHz, isKHz] = [made.tscKHz, here.tscKHz];
  if (wasKHz !== undefined && isKHz !== undefined && Math.abs(wasKHz / isKHz - 1) > TSC_TOLERANCE) {
    compare("TSC frequency", `${(wasKHz / 1000).toFixed(1)} MHz`, `${(isKHz / 1000).toFixed(1)} MHz`);
  }
  return differences.length === 0 ? undefined : `it was made with ${differences.join(", ")}`;
}
