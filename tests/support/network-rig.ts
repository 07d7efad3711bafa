/**
 * Network namespaces that play the world around a sandbox host. To be used in a network and mount namespace
 * of the test's own, which plays the host:
 *
 *   guest namespace --tap-cable-- tap0 [slot] vpeer -- veth-i [host] wan0 -- inet0 [internet]
 */
import { rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { NetworkSlot } from "../../src/network/types.ts";

const rigDir = join(import.meta.dir, "../rig");

export function run(...argv: string[]): string {
  const result = Bun.spawnSync(argv, { timeout: 10_000 });
  if (result.exitCode !== 0) throw new Error(`${argv.join(" ")}: ${result.stderr}${result.stdout}`);
  return result.stdout.toString();
}

export function inside(netns: string, ...argv: string[]): string {
  return run("nsenter", `--net=${netns}`, ...argv);
}

/** A namespace kept in a file of `root`; `umount` and remove the file to let it go. */
export function newNetns(root: string, name: string): string {
  const path = join(root, name);
  writeFileSync(path, "");
  run("unshare", `--net=${path}`, "true");
  inside(path, "ip", "link", "set", "lo", "up");
  return path;
}

export function buildTapCable(root: string): void {
  const flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"];
  run("gcc", ...flags, "-o", join(root, "tap-cable"), join(rigDir, "tap-cable.c"));
}

/** The namespace `internet` with the addresses, the host's default route leading there. */
export function makeInternet(
  root: string,
  hostWan: string,
  gateway: string,
  addresses: readonly string[],
): string {
  run("ip", "link", "set", "lo", "up");
  const internet = newNetns(root, "internet");
  run("ip", "link", "add", "wan0", "type", "veth", "peer", "name", "inet0", "netns", internet);
  run("ip", "addr", "add", `${hostWan}/24`, "dev", "wan0");
  run("ip", "link", "set", "wan0", "up");
  run("ip", "route", "add", "default", "via", gateway);
  inside(internet, "ip", "addr", "add", `${gateway}/24`, "dev", "inet0");
  inside(internet, "ip", "link", "set", "inet0", "up");
  for (const address of addresses) inside(internet, "ip", "addr", "add", `${address}/32`, "dev", "lo");
  return internet;
}

export interface Program extends AsyncDisposable {
  readonly pid: number;
  /** Lines printed after "ready". */
  readonly lines: string[];
  say(line: string): void;
}

/** A program of tests/rig in a namespace (undefined: the host); resolves when it says "ready". */
export async function startProgram(
  netns: string | undefined,
  script: string,
  ...args: string[]
): Promise<Program> {
  const argv = [process.execPath, join(rigDir, script), ...args];
  const child = Bun.spawn(netns === undefined ? argv : ["nsenter", `--net=${netns}`, ...argv], {
    stdin: "pipe",
    stdout: "pipe",
    stderr: "inherit",
  });
  const lines: string[] = [];
  const { promise: ready, resolve, reject } = Promise.withResolvers<void>();
  const reading = readLines(child.stdout, (line) => (line === "ready" ? resolve() : lines.push(line))).then(
    () => reject(new Error(`${script} ended`)),
  );
  await ready;
  return {
    pid: child.pid,
    lines,
    say(line) {
      child.stdin.write(`${line}\n`);
      child.stdin.flush();
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await child.exited;
      await reading;
    },
  };
}

async function readLines(stream: AsyncIterable<Uint8Array>, take: (line: string) => void): Promise<void> {
  let rest = "";
  for await (const chunk of stream) {
    const lines = (rest + Buffer.from(chunk).toString()).split("\n");
    rest = lines.pop() ?? "";
    lines.forEach(take);
  }
}

export interface Guest extends AsyncDisposable {
  readonly netns: string;
}

let guests = 0;

/** A namespace with the guest's address and MAC at the other end of the slot's tap. */
export async function attachGuest(root: string, slot: NetworkSlot): Promise<Guest> {
  const netns = newNetns(root, `guest-${guests++}`);
  const cable = Bun.spawn(
    [
      "nsenter",
      `--net=${slot.netnsPath}`,
      join(root, "tap-cable"),
      slot.tapName,
      netns,
      "eth0",
      slot.macAddress,
    ],
    { stdin: "pipe", stdout: "pipe", stderr: "inherit" },
  );
  const reader = cable.stdout.getReader();
  const said = Buffer.from((await reader.read()).value ?? []).toString();
  if (said !== "ready\n") throw new Error(`tap-cable said ${said}`);
  reader.releaseLock();
  inside(netns, "ip", "addr", "add", `${slot.guestAddress}/${slot.prefixLength}`, "dev", "eth0");
  inside(netns, "ip", "link", "set", "eth0", "up");
  inside(netns, "ip", "route", "add", "default", "via", slot.gatewayAddress);
  return {
    netns,
    async [Symbol.asyncDispose]() {
      cable.kill("SIGKILL");
      await cable.exited;
      run("umount", netns);
      rmSync(netns);
    },
  };
}

export interface TcpOrder {
  readonly address: string;
  readonly port: number;
  readonly sendHex?: string;
  /** Sent in this many pieces, 2 ms apart. */
  readonly pieces?: number;
  /** Reads nothing after the connection is open. */
  readonly stall?: boolean;
  /** Half-close after sending. */
  readonly end?: boolean;
  /** Answered when this has come; otherwise at the end or the time limit. */
  readonly until?: string;
  readonly timeoutMs: number;
}

export type GuestOrder =
  | ({ readonly op: "tcp" } & TcpOrder)
  | ({ readonly op: "many"; readonly count: number; readonly until: string } & TcpOrder)
  | {
      readonly op: "udp";
      readonly address: string;
      readonly port: number;
      readonly sendHex: string;
      readonly timeoutMs: number;
    }
  | {
      readonly op: "flow";
      readonly name: string;
      readonly address: string;
      readonly port: number;
      readonly sendHex: string;
      readonly until: string;
    };

export interface GuestAnswer {
  readonly outcome: "open" | "ended" | "reset" | "refused" | "unreachable" | "timeout" | "failed";
  /** Latin-1 text for TCP, hexadecimal for UDP. */
  readonly received: string;
}

export interface GuestAgent extends AsyncDisposable {
  do(order: GuestOrder): Promise<GuestAnswer>;
}

/** Programs in a guest's namespace, behind one process that stays (starting one per connection is slow). */
export async function startAgent(netns: string): Promise<GuestAgent> {
  const child = Bun.spawn(["nsenter", `--net=${netns}`, process.execPath, join(rigDir, "net-agent.ts")], {
    stdin: "pipe",
    stdout: "pipe",
    stderr: "inherit",
  });
  const waiting = new Map<number, (answer: GuestAnswer) => void>();
  const { promise: ready, resolve } = Promise.withResolvers<void>();
  const reading = readLines(child.stdout, (line) => {
    const { id, ...answer } = JSON.parse(line) as GuestAnswer & { id: number };
    if (id === -1) resolve();
    waiting.get(id)?.(answer);
    waiting.delete(id);
  });
  await ready;
  let next = 0;
  return {
    do(order) {
      const id = next++;
      return new Promise((answer) => {
        waiting.set(id, answer);
        child.stdin.write(`${JSON.stringify({ id, ...order })}\n`);
        child.stdin.flush();
      });
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await child.exited;
      await reading;
    },
  };
}

export interface Capture extends AsyncDisposable {
  /** The packets so far: `IP A.B.C.D.port > …`, one a line. */
  readonly seen: readonly string[];
  /** Waits until no more come in, then the packets so far. */
  lines(): Promise<string[]>;
}

/**
 * IPv4 packets on a device of the host, by tcpdump. Resets are left out: the host itself sends them in answer
 * to stragglers of connections whose sandbox is gone.
 */
export async function capture(device: string): Promise<Capture> {
  const child = Bun.spawn(
    [
      "tcpdump",
      "-i",
      device,
      "--immediate-mode",
      "-nn",
      "-l",
      "-q",
      "-t",
      "ip and tcp[tcpflags] & tcp-rst == 0 or udp or icmp",
    ],
    {
      stdout: "pipe",
      stderr: "pipe",
    },
  );
  const lines: string[] = [];
  const reading = readLines(child.stdout, (line) => lines.push(line));
  const { promise: ready, resolve } = Promise.withResolvers<void>();
  const errors = readLines(child.stderr, (line) => {
    if (line.startsWith("listening")) resolve();
  });
  await ready;
  return {
    seen: lines,
    async lines() {
      for (let count = -1; count !== lines.length; await Bun.sleep(120)) count = lines.length;
      return [...lines];
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGTERM");
      await child.exited;
      await Promise.all([reading, errors]);
    },
  };
}
