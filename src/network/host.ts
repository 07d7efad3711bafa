import { constants } from "node:fs";
import { access, readFile, writeFile } from "node:fs/promises";
import { netProbeRates } from "../../ffi/netns.ts";
import { runCommand, tryCommand } from "../lib/command.ts";
import { AenvError, errorChain } from "../lib/errors.ts";
import { formatIpv4, parseIpv4 } from "../lib/ipv4.ts";

const CAP_NET_ADMIN = 12n;
const CAP_SYS_ADMIN = 21n;
const FORWARD_SWITCH = "/proc/sys/net/ipv4/ip_forward";
const RESOLVER_FILES = ["/run/systemd/resolve/resolv.conf", "/etc/resolv.conf"];
const FALLBACK_DNS_SERVER = "8.8.8.8";

/** Both capabilities are needed: one for devices and rules, one for namespaces and mounts. */
export function lacksCapabilities(procStatus: string): string[] {
  const effective = BigInt(`0x${/^CapEff:\s*([0-9a-f]+)$/m.exec(procStatus)?.[1] ?? "0"}`);
  return [
    ...((effective >> CAP_NET_ADMIN) & 1n ? [] : ["CAP_NET_ADMIN"]),
    ...((effective >> CAP_SYS_ADMIN) & 1n ? [] : ["CAP_SYS_ADMIN"]),
  ];
}

/** Names of all network devices of this process's network namespace. */
export async function hostDevices(): Promise<ReadonlySet<string>> {
  const text = await readFile("/proc/self/net/dev", "utf8");
  return new Set(Array.from(text.matchAll(/^ *([^\s|]+):/gm), ([, name]) => name ?? ""));
}

/** Throws an error with the cure when this host or process cannot make network slots. */
export async function requireHostSupport(): Promise<void> {
  const missing = lacksCapabilities(await readFile("/proc/self/status", "utf8"));
  if (missing.length > 0) {
    throw new AenvError({
      code: "network_not_permitted",
      message: `making network slots needs ${missing.join(" and ")}, which this process does not have`,
      remediation: "run the server as root, or give it both capabilities (AmbientCapabilities= in its unit)",
    });
  }
  for (const [tool, debianPackage] of [
    ["nft", "nftables"],
    ["ip", "iproute2"],
  ] as const) {
    if (Bun.which(tool) !== null) continue;
    throw new AenvError({
      code: "network_tool_missing",
      message: `${tool} is not installed`,
      remediation: `install the package ${debianPackage}`,
    });
  }
  try {
    await access("/dev/net/tun", constants.R_OK | constants.W_OK);
  } catch (cause) {
    throw new AenvError({
      code: "network_tun_missing",
      message: "/dev/net/tun cannot be opened for reading and writing",
      remediation: "load the kernel module with `modprobe tun`; in a container pass the device through",
      cause,
    });
  }
}

/** Error `network_rates_unsupported` where the kernel has no token buckets for network devices. */
export async function requireRateLimits(): Promise<void> {
  try {
    await netProbeRates();
  } catch (cause) {
    throw new AenvError({
      code: "network_rates_unsupported",
      message: `machine.network_rate_limit is set, but network rates cannot be limited here: ${errorChain(cause).join(": ")}`,
      remediation: "use a kernel with the module sch_tbf, or set enabled to false",
      cause,
    });
  }
}

/** Turns IPv4 forwarding on; true when it was off. */
export async function enableForwarding(): Promise<boolean> {
  if ((await readFile(FORWARD_SWITCH, "utf8")).trim() !== "0") return false;
  try {
    await writeFile(FORWARD_SWITCH, "1");
  } catch (cause) {
    throw new AenvError({
      code: "network_forwarding_off",
      message: "IPv4 forwarding is off and this process may not turn it on",
      remediation: "run `sysctl -w net.ipv4.ip_forward=1` as root and put it into /etc/sysctl.d",
      cause,
    });
  }
  return true;
}

/** Makes an IPv4 address (host byte order) one of this host's, without giving it to a device; or undoes it. */
export async function ownLocalAddress(address: number, owned: boolean): Promise<void> {
  const route = ["local", `${formatIpv4(address)}/32`, "dev", "lo", "table", "local"];
  if (owned) {
    await runCommand(["ip", "route", "replace", ...route]);
    return;
  }
  const { exitCode, stderr } = await tryCommand(["ip", "route", "del", ...route]);
  // ESRCH: it is gone already.
  if (exitCode !== 0 && !/No such process/.test(stderr)) {
    throw new AenvError({
      code: "command_failed",
      message: `ip route del ${route.join(" ")}: ${stderr.trim()}`,
    });
  }
}

/** The first IPv4 name server outside 127.0.0.0/8 in a resolver file. */
export function firstUsableNameServer(resolverFile: string): string | undefined {
  for (const line of resolverFile.split("\n")) {
    const address = /^\s*nameserver\s+(\S+)/.exec(line)?.[1];
    const value = address === undefined ? undefined : parseIpv4(address);
    if (value !== undefined && value >>> 24 !== 127 && value !== 0) return address;
  }
  return undefined;
}

/** The server that answers guests: the host's own when it has one that is reachable from outside it. */
export async function chooseDnsServer(files: readonly string[] = RESOLVER_FILES): Promise<string> {
  for (const path of files) {
    const file = Bun.file(path);
    const found = (await file.exists()) ? firstUsableNameServer(await file.text()) : undefined;
    if (found !== undefined) return found;
  }
  return FALLBACK_DNS_SERVER;
}
