/**
 * Every kind of egress rule on every way a real guest can start. Started by network.test.ts in a network and
 * mount namespace of its own, which plays the host (see tests/support/network-rig.ts). A packet capture on the
 * internet's side of the cable, and what the internet's DNS server was asked, tell what left the host.
 *
 * The sandboxes come from a snapshot in which a program sends without end to an address that most policies
 * deny: the first packets of every start are its, sent before anybody could change a rule.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import { parseEgressPolicy } from "../../src/network/index.ts";
import type { NetworkUpdate } from "../../src/orchestrator/types.ts";
import { createAgentClient } from "../../src/sandbox/index.ts";
import type { RunningSandbox } from "../../src/sandbox/types.ts";
import { clientHello } from "../support/client-hello.ts";
import { dnsQuery, readDnsAnswer } from "../support/dns-query.ts";
import { bootGuest, type RootFs, rootFsOf } from "../support/guest-vm.ts";
import {
  type Capture,
  capture,
  inside,
  makeInternet,
  type Program,
  run,
  startProgram,
} from "../support/network-rig.ts";
import { busyboxTemplate, leftovers, type RealNode, startRealNode, testDeps } from "../support/real-node.ts";

if (process.env.AENV_NETNS_SUITE !== "1")
  throw new Error("run network.test.ts: this suite changes the host's network");

const GATEWAY = "203.0.113.2";
const HOST_WAN = "203.0.113.1";
const DNS_SERVER = "10.53.0.53";
const OTHER_DNS = "198.51.100.53";
const GOOD = "203.0.113.10";
const WILD = "203.0.113.11";
const IN_BLOCK = "198.51.100.40";
const EVIL = "198.51.100.66";
const EXCEPTION = "198.51.100.67";
const PRIVATE = "10.99.0.1";
const METADATA = "169.254.169.254";
/** Where the snapshot's program sends to: nobody has the address, so that no connection comes about. */
const CHATTER = "198.51.100.77";
const GUEST_DNS = "169.254.0.22";
const ALL = "0.0.0.0/0";

const root = mkdtempSync(join(tmpdir(), "netmatrix-"));
let internet = "";
let servers: Program;
let hostServer: Program;
let dns: Program;
let wire: Capture;
let node: RealNode;
let image: RootFs;

// ---- probes -----------------------------------------------------------------------------------------

interface Probe {
  readonly what: string;
  /** See tests/rig/guest-probe.c. */
  readonly argument: string;
  /** The answer, as {@link told} puts it. */
  readonly expected: string;
  readonly allowed: boolean;
}

const hex = (text: string | Uint8Array) => Buffer.from(text as string).toString("hex");

const open = (address: string, port: number) => `open hello ${address}:${port}`;
const tcp = (allowed: boolean, address: string, port: number, what = `tcp ${address}:${port}`): Probe => ({
  what,
  argument: `tcp,${address},${port}`,
  expected: allowed ? open(address, port) : "refused",
  allowed,
});
const udp = (allowed: boolean, address: string, port: number, what = `udp ${address}:${port}`): Probe => ({
  what,
  argument: `udp,${address},${port},78`,
  expected: allowed ? "answer" : "refused",
  allowed,
});
const ping = (allowed: boolean, address: string): Probe => ({
  what: `ping ${address}`,
  argument: `icmp,${address}`,
  expected: allowed ? "answer" : "refused",
  allowed,
});
const web = (
  allowed: boolean,
  what: string,
  address: string,
  port: number,
  bytes: string | Uint8Array,
): Probe => ({
  what: `${what}, ${address}:${port}`,
  argument: `tcp,${address},${port},${hex(bytes)}`,
  expected: allowed ? open(address, port) : "refused",
  allowed,
});
const http = (allowed: boolean, host: string, address: string) =>
  web(allowed, `http ${host}`, address, 80, `GET / HTTP/1.1\r\nHost: ${host}\r\n\r\n`);
const tls = (allowed: boolean, name: string | undefined, address: string) =>
  web(allowed, `tls ${name ?? "without name"}`, address, 443, clientHello(name));
/** `expected`: response code and addresses. Allowed: the question may leave the host. */
const ask = (allowed: boolean, name: string, expected: string, type = 1, server = GUEST_DNS): Probe => ({
  what: `dns ${{ 1: "A", 16: "TXT", 28: "AAAA" }[type]} ${name}${server === GUEST_DNS ? "" : ` of ${server}`}`,
  argument: `udp,${server},53,${hex(dnsQuery(name, type))}`,
  expected: `dns ${expected}`,
  allowed,
});

interface Rule {
  readonly name: string;
  readonly input: NetworkUpdate;
  readonly probes: readonly Probe[];
  /** The snapshot's program may send. */
  readonly chatter?: boolean;
}

const NODE_DENIALS = [
  tcp(false, PRIVATE, 80, "tcp to a private address"),
  tcp(false, METADATA, 80, "tcp to the metadata address"),
  tcp(false, HOST_WAN, 80, "tcp to the host's own address"),
  tcp(false, "10.11.0.0", 15000, "tcp to the egress proxy itself"),
  tcp(false, GUEST_DNS, 80, "tcp to the gateway"),
  tcp(false, "10.11.0.1", 49983, "tcp to the first slot's agent"),
];

const RULES: readonly Rule[] = [
  {
    name: "node default",
    input: {},
    chatter: true,
    probes: [
      tcp(true, GOOD, 7000),
      udp(true, EVIL, 7000),
      ping(true, GOOD),
      udp(true, EVIL, 443, "quic"),
      ask(true, "evil.example", `0 ${EVIL}`),
      ...NODE_DENIALS,
    ],
  },
  {
    name: "CIDR and address allowed, all else denied",
    input: { allowOut: [GOOD, "198.51.100.32/28"], denyOut: [ALL] },
    probes: [
      tcp(true, GOOD, 7000, "allowed address, tcp"),
      udp(true, GOOD, 7000, "allowed address, udp"),
      tcp(true, IN_BLOCK, 7000, "allowed block, tcp"),
      tcp(false, WILD, 7000, "no rule, tcp"),
      udp(false, EVIL, 7000, "no rule, udp"),
      ping(false, EVIL),
      ask(false, "good.example", "5"),
      ask(false, "secret.evil.example", "5"),
      ask(false, "evil.example", "refused", 1, OTHER_DNS),
      tcp(false, OTHER_DNS, 53, "dns over tcp elsewhere"),
      tcp(false, OTHER_DNS, 853, "dns over tls"),
      udp(false, EVIL, 443, "quic"),
      ...NODE_DENIALS,
    ],
  },
  {
    name: "CIDR denied, address in it allowed",
    input: { allowOut: [EXCEPTION], denyOut: ["198.51.100.64/26"] },
    probes: [
      tcp(true, GOOD, 7000, "no rule, tcp"),
      tcp(true, EXCEPTION, 7000, "allowed in the denied block"),
      ask(true, "evil.example", `0 ${EVIL}`),
      tcp(false, EVIL, 7000, "denied block, tcp"),
      tcp(false, EVIL, 443, "denied block, tcp 443"),
      udp(false, EVIL, 7000, "denied block, udp"),
      ping(false, EVIL),
      ...NODE_DENIALS,
    ],
  },
  {
    name: "domain and wildcard",
    input: { allowOut: ["good.example", "*.wild.example"], denyOut: [ALL] },
    probes: [
      ask(true, "good.example", `0 ${GOOD}`),
      ask(true, "b.c.wild.example", `0 ${WILD}`),
      http(true, "good.example", GOOD),
      tls(true, "good.example", GOOD),
      http(true, "a.wild.example", WILD),
      tls(true, "b.c.wild.example", WILD),
      tls(false, "evil.example", EVIL),
      http(false, "evil.example", EVIL),
      web(false, "false SNI (good.example)", EVIL, 443, clientHello("good.example")),
      web(false, "false Host (good.example)", EVIL, 80, "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"),
      tls(false, "wild.example", WILD),
      tls(false, undefined, GOOD),
      http(false, GOOD, GOOD),
      web(false, "two Hosts", GOOD, 80, "GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n"),
      web(false, "no HTTP, no TLS", GOOD, 80, Buffer.of(0, 1, 2, 3)),
      http(false, "inside.wild.example", PRIVATE),
      tcp(false, GOOD, 7000, "allowed name's address, other port"),
      udp(false, GOOD, 443, "quic to an allowed name's address"),
      ask(false, "data-as-a-name.evil.example", "5"),
      ask(false, "data-as-a-name.good.example", "5"),
      ask(false, "good.example", "0", 16),
      ask(false, "good.example", "0", 28),
      ask(false, "good.example", "refused", 1, OTHER_DNS),
      tcp(false, OTHER_DNS, 53, "dns over tcp elsewhere"),
      tcp(false, OTHER_DNS, 853, "dns over tls"),
      ...NODE_DENIALS,
    ],
  },
  {
    name: "internet access false",
    input: { allowInternetAccess: false },
    probes: [
      tcp(false, GOOD, 7000),
      tcp(false, GOOD, 443),
      udp(false, GOOD, 7000),
      ping(false, GOOD),
      udp(false, EVIL, 443, "quic"),
      ask(false, "good.example", "5"),
      ask(false, "good.example", "refused", 1, OTHER_DNS),
      tcp(false, OTHER_DNS, 853, "dns over tls"),
      ...NODE_DENIALS,
    ],
  },
  {
    name: "internet access false, address allowed",
    input: { allowInternetAccess: false, allowOut: [GOOD] },
    probes: [
      tcp(true, GOOD, 7000),
      udp(true, GOOD, 443, "quic to the allowed address"),
      tcp(false, WILD, 7000),
      ...NODE_DENIALS,
    ],
  },
];

// ---- the table --------------------------------------------------------------------------------------

const WAYS = ["cold", "warm", "fork", "resume", "update"] as const;
type Way = (typeof WAYS)[number];
const table = new Map<string, Map<Way, string>>();
const rowKey = (rule: Rule, probe: Probe) =>
  `| ${rule.name} | ${probe.what} | ${probe.allowed ? "allowed" : "denied"} |`;

function printTable(): void {
  console.log(`| rule | probe | expected | ${WAYS.join(" | ")} |`);
  console.log(`| --- | --- | --- |${" --- |".repeat(WAYS.length)}`);
  for (const [key, cells] of table)
    console.log(`${key} ${WAYS.map((way) => cells.get(way) ?? "-").join(" | ")} |`);
  const count = [...table.values()].reduce((sum, cells) => sum + cells.size, 0);
  const good = [...table.values()].reduce(
    (sum, cells) => sum + [...cells.values()].filter((c) => c === "ok").length,
    0,
  );
  console.log(`measured: ${good} of ${count} combinations as expected`);
}

// ---- a guest under test -----------------------------------------------------------------------------

interface Target {
  readonly way: Way;
  readonly address: string;
  readonly token?: string;
}

/** `quietMs`: no answer for so long is no answer. */
async function probeFrom(target: Target, probes: readonly Probe[], quietMs?: number): Promise<string[]> {
  const agent = createAgentClient(target.address, target.token);
  const outcome = await agent.run({
    cmd: "/bin/guest-probe",
    args: [
      ...(quietMs === undefined ? [] : ["--quiet", String(quietMs)]),
      ...probes.map((probe) => probe.argument),
    ],
    user: "root",
    timeoutMs: 60_000,
  });
  if (outcome.exitCode !== 0) throw new Error(`guest-probe: ${outcome.exitCode} ${outcome.stderr}`);
  return outcome.stdout
    .trim()
    .split("\n")
    .map((line, i) => told(probes[i]!, line));
}

/** What the probe's program said, in the words of {@link Probe.expected}. */
function told(probe: Probe, line: string): string {
  if (probe.expected.startsWith("dns")) {
    if (!line.startsWith("answer ")) return `dns ${line}`;
    const { code, addresses } = readDnsAnswer(Buffer.from(line.slice(7), "hex"));
    return `dns ${code} ${addresses.join(" ")}`.trim();
  }
  if (line.startsWith("answer ")) return "answer";
  // A reset before or after the handshake, an ICMP refusal: none has let anything through.
  return ["cut", "refused", "unreachable"].includes(line) ? "refused" : line;
}

/**
 * The kernel answers a guest with one ICMP refusal a second: with the snapshot's program talking, refused
 * datagrams may go without. That they went nowhere is what the wire says.
 */
function accepted({ argument, expected }: Probe): string[] {
  if (expected === "dns refused") return ["dns refused", "dns unreachable", "dns timeout"];
  return expected === "refused" && !argument.startsWith("tcp") ? ["refused", "timeout"] : [expected];
}

interface Packet {
  readonly to: string;
  readonly port: string;
  readonly line: string;
}

let marks = 0;

/** The number of packets on the wire when all that was sent before this call is in. */
async function mark(): Promise<number> {
  const port = 20_000 + marks++;
  const socket = await Bun.udpSocket({ socket: { error: () => undefined } });
  socket.send("mark", port, GATEWAY);
  try {
    for (;;) {
      const at = wire.seen.findLastIndex((line) => line.includes(` > ${GATEWAY}.${port}:`));
      if (at >= 0) return at + 1;
      await Bun.sleep(5);
    }
  } finally {
    socket.close();
  }
}

/** Packets `IP A.port > B.port: …` that the wire has carried to the internet since line `from`. */
async function sent(from: number): Promise<Packet[]> {
  const end = await mark();
  return wire.seen.slice(from, end - 1).flatMap((line) => {
    const [, to = "", port = ""] = / > (\d+\.\d+\.\d+\.\d+)(?:\.(\d+))?:/.exec(line) ?? [];
    // Answers come in, questions go out.
    return to === HOST_WAN || to === GATEWAY ? [] : [{ to, port, line }];
  });
}

async function check(target: Target, rule: Rule): Promise<void> {
  const denied = rule.probes.filter((probe) => !probe.allowed);
  const allowed = rule.probes.filter((probe) => probe.allowed);
  const cells = (probe: Probe) => {
    const key = rowKey(rule, probe);
    if (!table.has(key)) table.set(key, new Map());
    return table.get(key)!;
  };
  const failures: unknown[] = [];
  const record = (probe: Probe, answer: string) => {
    const fits = accepted(probe).includes(answer);
    cells(probe).set(target.way, fits ? "ok" : answer);
    if (!fits)
      failures.push({
        way: target.way,
        rule: rule.name,
        probe: probe.what,
        expected: probe.expected,
        answer,
      });
  };

  // Denied first: meanwhile nothing at all may leave but questions for allowed names.
  const [fromPacket, fromQuestion] = [await mark(), dns.lines.length];
  const refusals = await probeFrom(target, denied, 700);
  for (const [i, probe] of denied.entries()) record(probe, refusals[i]!);
  const restricted = rule.input.allowInternetAccess === false || rule.input.denyOut?.includes(ALL) === true;
  const mayLeave = ({ to, port, line }: Packet) =>
    (to === DNS_SERVER && port === "53") ||
    // The snapshot's program does not wait for the answers to its questions.
    (to === DNS_SERVER && !restricted && line.includes("unreachable")) ||
    (to === CHATTER && rule.chatter === true);
  const leaked = (await sent(fromPacket)).filter((packet) => !mayLeave(packet));
  if (leaked.length > 0) failures.push({ way: target.way, rule: rule.name, leaked });
  const asked = dns.lines.slice(fromQuestion);
  if (restricted) {
    const foreign = asked.filter((line) => !/^dns 1 (good|[a-z.]+\.wild)\.example$/.test(line));
    if (foreign.length > 0) failures.push({ way: target.way, rule: rule.name, foreign });
  }

  if (allowed.length > 0) {
    const before = await mark();
    const answers = await probeFrom(target, allowed);
    for (const [i, probe] of allowed.entries()) record(probe, answers[i]!);
    // Allowed is not answered by somebody on the way: each was on the wire.
    const went = new Set((await sent(before)).map(({ to, port }) => `${to}:${port}`));
    for (const probe of allowed) {
      const [kind, address, port] = probe.argument.split(",");
      if (address !== GUEST_DNS && !went.has(`${address}:${kind === "icmp" ? "" : port}`))
        failures.push({ way: target.way, rule: rule.name, notOnTheWire: probe.what });
    }
  }
  expect(failures).toEqual([]);
}

function targetOf(way: Way, id: string): Target {
  const route = node.orchestrator.route(id);
  if (route.kind !== "ready") throw new Error(`sandbox is ${route.kind}`);
  return { way, address: route.hostAddress, token: node.orchestrator.accessToken(id) };
}

/** No packet of the snapshot's program has left since the line. */
async function expectNoChatter(rule: Rule, from: number): Promise<void> {
  if (rule.chatter === true) return;
  const packets = (await sent(from)).filter(({ to }) => to === CHATTER || to === PRIVATE);
  expect(packets).toEqual([]);
}

const created = async (template: string, rule: Rule) =>
  await node.orchestrator.create({
    template,
    timeoutSeconds: 900,
    onTimeout: "kill",
    autoResume: false,
    secure: true,
    metadata: {},
    envVars: {},
    network: { ...rule.input },
    ...(rule.input.allowInternetAccess === undefined
      ? {}
      : { allowInternetAccess: rule.input.allowInternetAccess }),
  });

beforeAll(async () => {
  const deps = testDeps();
  if (deps === undefined) throw new Error("needs kernel and QEMU");
  const program = join(root, "guest-probe");
  const source = join(import.meta.dir, "../rig/guest-probe.c");
  const flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s"];
  await runCommand(["musl-gcc", ...flags, "-o", program, source]);
  const addresses = [DNS_SERVER, OTHER_DNS, GOOD, WILD, IN_BLOCK, EVIL, EXCEPTION, PRIVATE, METADATA];
  internet = makeInternet(root, HOST_WAN, GATEWAY, addresses);
  inside(internet, "ip", "route", "add", "blackhole", CHATTER);
  [servers, hostServer, dns, wire] = await Promise.all([
    startProgram(
      internet,
      "echo-server.ts",
      ...["tcp:80", "tcp:443", "tcp:853", "tcp:53", "tcp:7000"],
      ...[GOOD, EVIL, PRIVATE].map((address) => `udp:${address}:7000`),
      ...[GOOD, EVIL].map((address) => `udp:${address}:443`),
      `udp:${OTHER_DNS}:53`,
    ),
    startProgram(undefined, "echo-server.ts", "tcp:80", "tcp:443"),
    startProgram(
      internet,
      "dns-server.ts",
      DNS_SERVER,
      ...[`good.example=${GOOD}`, `a.wild.example=${WILD}`, `b.c.wild.example=${WILD}`],
      ...[`wild.example=${WILD}`, `evil.example=${EVIL}`, `leak.evil.example=${EVIL}`],
      `inside.wild.example=${PRIVATE}`,
    ),
    capture("wan0"),
  ]);
  node = await startRealNode({
    deps,
    pool: 11,
    programs: { "guest-probe": program },
    network: {
      alwaysDeniedCidrs: ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
      dnsServer: DNS_SERVER,
      pool: { lowWatermark: 2, highWatermark: 8 },
    },
  });
  await busyboxTemplate(node);
  image = await rootFsOf(join(node.home, "image/root"), root, 64);
  const first = await created("busybox", RULES[0]!);
  const agent = createAgentClient(
    targetOf("warm", first.id).address,
    node.orchestrator.accessToken(first.id),
  );
  await agent.startDetached({ cmd: "/bin/guest-probe", args: ["--chatter", CHATTER, PRIVATE], user: "root" });
  // The program works: what the policy allows it is on the wire.
  while ((await sent(0)).filter(({ to }) => to === CHATTER).length < 4) await Bun.sleep(50);
  await node.orchestrator.snapshot(first.id, { name: "talking" });
  await node.orchestrator.kill(first.id);
}, 300_000);

afterAll(async () => {
  printTable();
  await using stack = new AsyncDisposableStack();
  stack.defer(() => {
    run("umount", internet);
    rmSync(root, { recursive: true, force: true });
  });
  for (const program of [wire, servers, hostServer, dns]) if (program !== undefined) stack.use(program);
  if (node === undefined) return;
  stack.defer(() => {
    for (const dir of [node.home, node.runtimeDir]) rmSync(dir, { recursive: true, force: true });
  });
  stack.defer(async () => expect(await leftovers(node)).toEqual([]));
  stack.use(node);
}, 180_000);

describe.each(RULES.map((rule) => [rule.name, rule] as const))("%s", (_name, rule) => {
  let id: string;

  // Whatever failed: its program must not talk into the next rule's tests.
  afterAll(async () => {
    await Promise.all(node.orchestrator.list().map((record) => node.orchestrator.kill(record.id)));
  });

  test("warm: a sandbox of the snapshot whose program talks at once", async () => {
    const from = await mark();
    id = (await created("talking", rule)).id;
    await check(targetOf("warm", id), rule);
    await expectNoChatter(rule, from);
    const { refused, byName, filtered } = await node.orchestrator.networkReport(id);
    expect(refused.packets).toBeGreaterThan(0);
    expect(byName.connections.relayed).toBe(filtered ? 4 : 0);
  }, 180_000);

  test("fork", async () => {
    const from = await mark();
    const [child] = await node.orchestrator.fork(id, { count: 1 });
    if (child === undefined || "error" in child) throw child?.error ?? new Error("no child");
    await check(targetOf("fork", child.record.id), rule);
    await node.orchestrator.kill(child.record.id);
    await expectNoChatter(rule, from);
  }, 180_000);

  test("pause and resume", async () => {
    const from = await mark();
    await node.orchestrator.pause(id);
    await node.orchestrator.resume(id, 900);
    await check(targetOf("resume", id), rule);
    await node.orchestrator.kill(id);
    await expectNoChatter(rule, from);
  }, 180_000);

  test("cold boot", async () => {
    await using vm: RunningSandbox = await bootGuest(node, `cold-${RULES.indexOf(rule)}`, image, {
      egress: parseEgressPolicy(rule.input),
    });
    await check({ way: "cold", address: vm.hostAddress }, rule);
  }, 180_000);
});

test("update: one running sandbox under all of them, one after the other", async () => {
  const { id } = await created("talking", RULES[0]!);
  for (const rule of [...RULES.slice(1), RULES[0]!]) {
    await node.orchestrator.updateNetwork(id, rule.input);
    const from = await mark();
    await check(targetOf("update", id), rule);
    await expectNoChatter(rule, from);
  }
  // And the snapshot's program is heard again under the last of them.
  const from = await mark();
  while (!(await sent(from)).some(({ to }) => to === CHATTER)) await Bun.sleep(50);
  await node.orchestrator.kill(id);
}, 180_000);

test("nobody heard what was denied to everybody", () => {
  expect(hostServer.lines).toEqual([]);
  expect(
    servers.lines.filter((line) => line.includes(` ${PRIVATE}:`) || line.includes(` ${METADATA}:`)),
  ).toEqual([]);
});
