/**
 * Network slots, egress policies and the egress proxy, in a network namespace of the bench's own that plays
 * the host. `AENV_BENCH_SLOTS` is the number of slots of the crowded host (default 1,000), `AENV_BENCH_ONLY` one
 * section: slots, throughput or crowd.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createLogger } from "../../src/lib/log.ts";
import {
  createNetworkService,
  DEFAULT_POLICY,
  type NetworkService,
  type NetworkServiceOptions,
  type NetworkSlot,
  parseEgressPolicy,
} from "../../src/network/index.ts";
import {
  attachGuest,
  buildTapCable,
  inside,
  makeInternet,
  newNetns,
  run,
  startAgent,
  startProgram,
} from "../support/network-rig.ts";

if (process.env.AENV_NETNS_SUITE !== "1") {
  const argv = [
    "unshare",
    "--net",
    "--mount",
    "--propagation",
    "private",
    process.execPath,
    import.meta.path,
  ];
  const child = Bun.spawn(argv, {
    env: { ...process.env, AENV_NETNS_SUITE: "1" },
    stdio: ["ignore", "inherit", "inherit"],
  });
  process.exit(await child.exited);
}

const SLOTS = Number(process.env.AENV_BENCH_SLOTS ?? 1000);
const PUMP_MS = 2500;
const root = mkdtempSync(join(tmpdir(), "netpol-bench-"));
const log = createLogger("network-bench");
log.level = "error";

const HOST_WAN = "203.0.113.1";
const GATEWAY = "203.0.113.2";
const SERVER = "203.0.113.10";
const DNS_SERVER = "10.53.0.53";
const OPTIONS: NetworkServiceOptions = {
  runtimeDir: join(root, "run"),
  hostInteractionCidr: "10.11.0.0/16",
  vethCidr: "10.12.0.0/16",
  alwaysDeniedCidrs: ["10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
  dnsServer: DNS_SERVER,
};
const OPEN = parseEgressPolicy({ denyOut: ["198.51.100.0/24", "192.0.2.0/24"], allowOut: ["198.51.100.7"] });
const DOMAINS = parseEgressPolicy({
  denyOut: ["0.0.0.0/0"],
  allowOut: ["good.example", "*.wild.example", "198.51.100.7"],
});

function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? Number.NaN;
}

const shown = (values: readonly number[]) =>
  [Math.min(...values), median(values), Math.max(...values)].map((value) => value.toFixed(2)).join(" / ");

function row(name: string, value: string, note = ""): void {
  console.log(`| ${name.padEnd(52)} | ${value.padStart(24)} | ${note}`);
}

async function timed(rounds: number, work: (round: number) => PromiseLike<unknown>): Promise<number[]> {
  const times: number[] = [];
  for (let round = 0; round < rounds; round++) {
    const started = performance.now();
    await work(round);
    times.push(performance.now() - started);
  }
  return times;
}

/** Processor time of this process, all threads, from now on. */
function processorMs(): () => number {
  const before = process.cpuUsage();
  return () => {
    const { user, system } = process.cpuUsage(before);
    return (user + system) / 1000;
  };
}

async function withService<T>(
  options: Partial<NetworkServiceOptions>,
  work: (service: NetworkService) => PromiseLike<T>,
): Promise<T> {
  await using service = createNetworkService({ ...OPTIONS, ...options }, log);
  await service.start([]);
  return await work(service);
}

// ---- slots ------------------------------------------------------------------------------------------

async function benchSlots(): Promise<void> {
  await withService({}, async (service) => {
    const held: NetworkSlot[] = [];
    const processor = processorMs();
    const made = await timed(30, async () => held.push(await service.acquire()));
    const making = processor() / 30;
    const removing = processorMs();
    const removed = await timed(30, (round) => held[round]![Symbol.asyncDispose]());
    row("slot made, ms", shown(made), "min / median / max of 30");
    row("  processor time of it, ms", making.toFixed(2));
    row("slot removed, ms", shown(removed));
    row("  processor time of it, ms", (removing() / 30).toFixed(2));
  });
  await withService({ pool: { lowWatermark: 0, highWatermark: 4, maintenance: false } }, async (service) => {
    await (await service.acquire())[Symbol.asyncDispose]();
    const back: number[] = [];
    const reuse = async (policy = DEFAULT_POLICY) => {
      const taken: number[] = [];
      for (let i = 0; i < 30; i++) {
        const started = performance.now();
        const slot = await service.acquire(policy);
        taken.push(performance.now() - started);
        back.push(...(await timed(1, () => slot[Symbol.asyncDispose]())));
      }
      return taken;
    };
    row("slot from the pool, ms", shown(await reuse()));
    row("slot from the pool with domain rules, ms", shown(await reuse(DOMAINS)));
    row("slot back to the pool, ms", shown(back));
  });
}

// ---- policies ---------------------------------------------------------------------------------------

interface PolicyFigures {
  readonly update: number[];
  readonly connect: number[];
}

async function benchPolicies(slot: NetworkSlot): Promise<PolicyFigures> {
  const guest = await attachGuest(root, slot);
  const agent = await startAgent(guest.netns);
  try {
    const update = await timed(100, (round) => slot.applyPolicy(round % 2 === 0 ? DOMAINS : OPEN));
    const order = { op: "tcp", address: SERVER, port: 7000, until: "hello", timeoutMs: 5000 } as const;
    await timed(20, () => agent.do(order));
    const connect = await timed(200, () => agent.do(order));
    return { update, connect };
  } finally {
    await agent[Symbol.asyncDispose]();
    await guest[Symbol.asyncDispose]();
  }
}

async function benchCrowd(): Promise<void> {
  await withService({}, async (service) => {
    const slot = await service.acquire(OPEN);
    const alone = await benchPolicies(slot);
    const started = performance.now();
    const processor = processorMs();
    const crowd = await Promise.all(
      Array.from({ length: SLOTS - 1 }, (_, i) => service.acquire(i % 2 === 0 ? DOMAINS : OPEN)),
    );
    const each = (performance.now() - started) / (SLOTS - 1);
    row(`slots made, ${SLOTS - 1} at once with policies, ms each`, each.toFixed(2));
    row("  processor time of it, ms", (processor() / (SLOTS - 1)).toFixed(2));
    const crowded = await benchPolicies(slot);
    row("policy update, 1 slot, ms", shown(alone.update));
    row(`policy update, ${SLOTS} slots, ms`, shown(crowded.update));
    row("  ratio", (median(crowded.update) / median(alone.update)).toFixed(2), "of medians");
    row(
      "connection through a policy, 1 slot, ms",
      shown(alone.connect),
      "with the guest's cable and program",
    );
    row(`connection through a policy, ${SLOTS} slots, ms`, shown(crowded.connect));
    row("  ratio", (median(crowded.connect) / median(alone.connect)).toFixed(2), "of medians");
    const freed = performance.now();
    await Promise.all([slot, ...crowd].map((one) => one[Symbol.asyncDispose]()));
    row(`slots removed, ${SLOTS} at once, ms each`, ((performance.now() - freed) / SLOTS).toFixed(2));
  });
}

// ---- throughput -------------------------------------------------------------------------------------

/** A namespace joined to the slot's by a veth pair in the tap's place: no copying program in the way. */
function joinByVeth(slot: NetworkSlot): string {
  const guest = newNetns(root, "guest-veth");
  inside(slot.netnsPath, "ip", "link", "del", slot.tapName);
  const link = ["ip", "link", "add", slot.tapName, "type", "veth", "peer", "name", "eth0", "netns", guest];
  inside(slot.netnsPath, ...link);
  inside(
    slot.netnsPath,
    "ip",
    "addr",
    "add",
    `${slot.gatewayAddress}/${slot.prefixLength}`,
    "dev",
    slot.tapName,
  );
  inside(slot.netnsPath, "ip", "link", "set", slot.tapName, "up");
  inside(guest, "ip", "addr", "add", `${slot.guestAddress}/${slot.prefixLength}`, "dev", "eth0");
  inside(guest, "ip", "link", "set", "eth0", "up");
  inside(guest, "ip", "route", "add", "default", "via", slot.gatewayAddress);
  return guest;
}

/** The same number of links as a guest's path has, routed, without translation or rules of ours. */
function makePlainPath(internet: string): string {
  const router = newNetns(root, "plain-router");
  const guest = newNetns(root, "plain-guest");
  run("ip", "link", "add", "plain0", "type", "veth", "peer", "name", "up0", "netns", router);
  run("ip", "addr", "add", "192.0.2.1/30", "dev", "plain0");
  run("ip", "link", "set", "plain0", "up");
  inside(router, "ip", "link", "add", "down0", "type", "veth", "peer", "name", "eth0", "netns", guest);
  for (const [device, address] of [
    ["up0", "192.0.2.2/30"],
    ["down0", "192.0.2.5/30"],
  ] as const) {
    inside(router, "ip", "addr", "add", address, "dev", device);
    inside(router, "ip", "link", "set", device, "up");
  }
  inside(router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1");
  inside(router, "ip", "route", "add", "default", "via", "192.0.2.1");
  inside(guest, "ip", "addr", "add", "192.0.2.6/30", "dev", "eth0");
  inside(guest, "ip", "link", "set", "eth0", "up");
  inside(guest, "ip", "route", "add", "default", "via", "192.0.2.5");
  run("ip", "route", "add", "192.0.2.4/30", "via", "192.0.2.2");
  inside(internet, "ip", "route", "replace", "default", "via", HOST_WAN);
  return guest;
}

/** GB/s that `pump` brings to the sink. */
async function pump(netns: string, port: number, host?: string): Promise<number> {
  const script = join(import.meta.dir, "../rig/pump.ts");
  const argv = ["nsenter", `--net=${netns}`, process.execPath, script, SERVER, String(port), String(PUMP_MS)];
  // Not spawnSync: the proxy is in this process.
  const child = Bun.spawn(host === undefined ? argv : [...argv, host], { stdout: "pipe" });
  const [bytes, milliseconds] = (await new Response(child.stdout).text()).trim().split(" ").map(Number);
  return bytes! / milliseconds! / 1e6;
}

async function best(work: () => Promise<number>): Promise<number> {
  const values: number[] = [];
  for (let i = 0; i < 3; i++) values.push(await work());
  return Math.max(...values);
}

async function benchThroughput(internet: string): Promise<void> {
  await withService({}, async (service) => {
    await using slot = await service.acquire(OPEN);
    const plainGuest = makePlainPath(internet);
    const guest = joinByVeth(slot);
    try {
      const plain = await best(() => pump(plainGuest, 8080));
      const policy = await best(() => pump(guest, 8080));
      await slot.applyPolicy(DOMAINS);
      const proxied = await best(() => pump(guest, 80, "good.example"));
      row("throughput, plain veths, GB/s", plain.toFixed(2), "three links, routed; best of 3");
      row("throughput through a policy, GB/s", policy.toFixed(2), "three links, two translations");
      row("  ratio to plain veths", (policy / plain).toFixed(2));
      row(
        "throughput through the egress proxy, GB/s",
        proxied.toFixed(2),
        "client, proxy, server share the CPUs",
      );
      row("  ratio to plain veths", (proxied / plain).toFixed(2));
      const agent = await startAgent(guest);
      const order = {
        op: "many",
        address: SERVER,
        port: 443,
        until: "hello",
        timeoutMs: 20_000,
        count: 1000,
        sendHex: Buffer.from("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n").toString("hex"),
      } as const;
      await agent.do({ ...order, count: 50 });
      const times = await timed(3, () => agent.do(order));
      await agent[Symbol.asyncDispose]();
      row(
        "connections through the egress proxy, 1/s",
        ((1000 / Math.min(...times)) * 1000).toFixed(0),
        "1,000 at once",
      );
    } finally {
      run("ip", "link", "del", "plain0");
      for (const netns of [guest, plainGuest, join(root, "plain-router")]) run("umount", netns);
    }
  });
}

// ---- all --------------------------------------------------------------------------------------------

buildTapCable(root);
const internet = makeInternet(root, HOST_WAN, GATEWAY, [SERVER, DNS_SERVER]);
const servers = await startProgram(internet, "echo-server.ts", "tcp:7000", "tcp:443", "sink:8080", "sink:80");
const dns = await startProgram(internet, "dns-server.ts", DNS_SERVER, `good.example=${SERVER}`);
try {
  console.log(`network: ${SLOTS} slots on the crowded host`);
  const only = process.env.AENV_BENCH_ONLY;
  const wanted = (section: string) => only === undefined || only === section;
  if (wanted("slots")) await benchSlots();
  if (wanted("throughput")) await benchThroughput(internet);
  if (wanted("crowd")) await benchCrowd();
} finally {
  await servers[Symbol.asyncDispose]();
  await dns[Symbol.asyncDispose]();
  run("umount", internet);
  rmSync(root, { recursive: true, force: true });
}
process.exit(0);
