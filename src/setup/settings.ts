import { resolve } from "node:path";
import { type Environment, loadConfig } from "../config/index.ts";
import { formatIpv4, parseCidr } from "../lib/ipv4.ts";

/** What setup and doctor need of the node's configuration, flags applied. */
export interface Settings {
  readonly home: string;
  readonly runtimePath: string;
  readonly depsDir: string;
  readonly kernelImagePath: string | undefined;
  readonly qemuBinaryPath: string | undefined;
  readonly apiAddress: string;
  readonly vmm: "qemu" | "firecracker";
  readonly mode: string;
  readonly diskExport: "auto" | "nbd" | "ublk";
  /** Of `[network.internal]`, as the network's lock names them: base addresses. */
  readonly pools: readonly string[];
  /** Whether guests' network has limits. */
  readonly networkRates: boolean;
}

/** Flags of both programs, as `parseArgs` options. */
export const SETTINGS_FLAGS = {
  config: { type: "string" },
  home: { type: "string" },
  deps: { type: "string" },
  "kernel-image": { type: "string" },
  "qemu-binary": { type: "string" },
} as const;

export const SETTINGS_HELP = `  --config PATH        configuration file (default: $AENV_CONFIG_PATH, else the packaged defaults)
  --home DIR           state directory instead of home_path
  --deps DIR           dependency directory instead of deps_path (HOME/deps)
  --kernel-image PATH  a kernel of your own (vmlinux or bzImage), as [kernel].image_path
  --qemu-binary PATH   a QEMU of your own, as [qemu].binary_path`;

export type SettingsFlags = { readonly [name in keyof typeof SETTINGS_FLAGS]?: string };

/** The same configuration the server reads; relative paths in flags count from the current directory. */
export function readSettings(flags: SettingsFlags, env: Environment): Settings {
  const config = loadConfig({
    path: flags.config,
    env: {
      ...env,
      ...(flags.home === undefined ? {} : { AENV_HOME_PATH: resolve(flags.home) }),
      // --home alone moves the dependencies with it.
      ...(flags.deps !== undefined
        ? { AENV_DEPS_PATH: resolve(flags.deps) }
        : flags.home !== undefined
          ? { AENV_DEPS_PATH: undefined }
          : {}),
    },
  });
  const path = (flag: string | undefined, configured: string | undefined) =>
    flag === undefined ? configured : resolve(flag);
  const { networkRateLimit } = config.machine;
  return {
    home: config.homePath,
    runtimePath: config.runtimePath,
    depsDir: config.depsPath,
    kernelImagePath: path(flags["kernel-image"], config.kernel.imagePath),
    qemuBinaryPath: path(flags["qemu-binary"], config.qemu.binaryPath),
    apiAddress: config.server.listen,
    vmm: config.vmm,
    mode: config.virtualizationMode,
    diskExport: config.ublk.export,
    pools: [config.network.internal.hostInteractionCidr, config.network.internal.vethCidr].map((cidr) => {
      const parsed = parseCidr(cidr);
      return parsed === undefined ? cidr : formatIpv4(parsed.base);
    }),
    networkRates:
      networkRateLimit.enabled &&
      (networkRateLimit.receiveBytesPerSec > 0 || networkRateLimit.sendBytesPerSec > 0),
  };
}
