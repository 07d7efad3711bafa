/** Where the parts a guest is started from are, checked. Returned by `resolveRuntime`. */
export interface RuntimeDeps {
  /** Uncompressed ELF vmlinux with a PVH entry. */
  readonly kernelPath: string;
  /** What `uname -r` prints in the guest, e.g. `6.12.95+deb12-cloud-amd64`. */
  readonly kernelVersion: string;
  /** cpio newc archive with `/init` (the guest agent) and `/lib/modules`. */
  readonly initrdPath: string;
  readonly qemu: QemuDeps;
}

export interface QemuDeps {
  readonly binary: string;
  /** E.g. `10.0.2`. */
  readonly version: string;
  /** Firmware directories for `-L`, in order. Empty: the binary finds its own. */
  readonly dataDirs: readonly string[];
  /** `QEMU_MODULE_DIR`, when the binary is not to look for itself. */
  readonly moduleDir?: string;
  /** `LD_LIBRARY_PATH`: libraries the host does not have. */
  readonly libraryPath?: string;
}
