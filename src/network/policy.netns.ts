/**
 * Egress policies with real packets. Started by service.test.ts in a network and mount namespace of its own,
 * which plays the host (see tests/support/network-rig.ts). A packet capture on the way to the internet tells
 * what left.
 */
import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { clientHello } from "../../tests/support/client-hello.ts";
import { dnsQuery, readDnsAnswer } from "../../tests/support/dns-query.ts";
import { eventually } from "../../tests/support/eventually.ts";
import {
  attachGuest,
  buildTapCable,
  type Capture,
  capture,
  type Guest,
  type GuestAgent,
  type GuestOrder,
  inside,
  makeInternet,
  type Program,
  run,
  startAgent,
  startProgram,
} from "../../tests/support/network-rig.ts";
import { createLogger } from "../lib/log.ts";
import {
  createNetworkService,
  DEFAULT_POLICY,
  type EgressInput,
  type KeptSlot,
  type NetworkService,
  type NetworkServiceOptions,
  type NetworkSlot,
  parseEgressPolicy,
} from "./index.ts";

if (process.env.AENV_NETNS_SUITE !== "1")
  throw new Error("run service.test.ts: this suite changes the host's network");

const root = mkdtempSync(join(tmpdir(), "netpol-netns-"));
const log = createLogger("policy-test");
log.level = process.env.AENV_TEST_LOG ?? "error";

const GATEWAY = "203.0.113.2";
const HOST_WAN = "203.0.113.1";
const DNS_SERVER = "10.53.0.53";
const OTHER_DNS = "198.51.100.53";
const GOOD = "203.0.113.10";
const WILD = "203.0.113.11";
const EVIL = "198.51.100.66";
const PRIVATE = "10.99.0.1";
const HIGH = "240.0.0.1";
const LAST = "255.255.255.254";
const OPTIONS: NetworkServiceOptions = {
  runtimeDir: join(root, "run"),
  hostInteractionCidr: "10.11.0.0/16",
  vethCidr: "10.12.0.0/16",
  alwaysDeniedCidrs: ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
  dnsServer: DNS_SERVER,
};
const ALL = "0.0.0.0/0";
const WEB: EgressInput = { allowOut: ["good.example", "*.wild.example"], denyOut: [ALL] };

let internet = "";
let servers: Program;
let hostServer: Program;
let dns: Program;
let wan: Capture;

beforeAll(async () => {
  buildTapCable(root);
  const addresses = [DNS_SERVER, OTHER_DNS, GOOD, WILD, EVIL, PRIVATE, HIGH, LAST];
  internet = makeInternet(root, HOST_WAN, GATEWAY, addresses);
  inside(internet, "ip", "route", "add", "unreachable", "198.51.100.99");
  [servers, hostServer, dns, wan] = await Promise.all([
    startProgram(
      internet,
      "echo-server.ts",
      ...["tcp:80", "tcp:443", "tcp:853", "tcp:53", "tcp:7000", "silent:7001"],
      ...[GOOD, EVIL, OTHER_DNS, HIGH, PRIVATE].map((address) => `udp:${address}:53`),
      ...[GOOD, EVIL, HIGH].map((address) => `udp:${address}:443`),
      ...[GOOD, EVIL].map((address) => `udp:${address}:7000`),
    ),
    startProgram(undefined, "echo-server.ts", "tcp:80", "tcp:443"),
    startProgram(
      internet,
      "dns-server.ts",
      DNS_SERVER,
      `good.example=${GOOD}`,
      `a.wild.example=${WILD}`,
      `b.c.wild.example=${WILD}`,
      `wild.example=${WILD}`,
      `evil.example=${EVIL}`,
      `inside.wild.example=${PRIVATE}`,
      `host.wild.example=${HOST_WAN}`,
      `mixed.wild.example=${PRIVATE},${WILD}`,
      "dead.wild.example=198.51.100.99",
      "empty.wild.example=-",
      "broken.wild.example=fail",
    ),
    capture("wan0"),
  ]);
}, 120_000);

afterAll(async () => {
  await wan[Symbol.asyncDispose]();
  for (const program of [servers, hostServer, dns]) await program[Symbol.asyncDispose]();
  rmSync(join(root, "run"), { recursive: true, force: true });
  run("umount", internet);
  rmSync(root, { recursive: true, force: true });
});

afterEach(() => {
  expect(run("nft", "list", "tables").includes("agentenv")).toBe(false);
  expect(run("ip", "-br", "link").includes("veth-")).toBe(false);
  expect(run("ip", "route", "show", "table", "local").includes("10.11.0.0")).toBe(false);
});

async function startService(
  options: Partial<NetworkServiceOptions> = {},
  keep: readonly KeptSlot[] = [],
): Promise<NetworkService> {
  const service = createNetworkService({ ...OPTIONS, ...options }, log);
  await service.start(keep);
  return service;
}

/** A slot with a guest in it whose programs can be ordered about. */
async function startGuest(slot: NetworkSlot): Promise<Guest & GuestAgent> {
  await using stack = new AsyncDisposableStack();
  const guest = stack.use(await attachGuest(root, slot));
  const agent = stack.use(await startAgent(guest.netns));
  const owned = stack.move();
  return {
    netns: guest.netns,
    do: (order) => agent.do(order),
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

const hex = (text: string | Uint8Array) => Buffer.from(text as string).toString("hex");
const request = (host: string, path = "/") => hex(`GET ${path} HTTP/1.1\r\nHost: ${host}\r\n\r\n`);

/** For what must come to an answer of some kind, however busy the machine is. */
const PATIENCE_MS = 10_000;

type Try = readonly [what: string, order: GuestOrder, expected: string];

/** Raw TCP to any server of ours: it greets. */
function tcp(address: string, port: number, expected: "open" | "refused"): Try {
  return [
    `tcp ${address}:${port}`,
    { op: "tcp", address, port, until: "hello", timeoutMs: PATIENCE_MS },
    expected === "open" ? `open hello ${address}:${port}` : "refused",
  ];
}

function udp(address: string, port: number, expected: "open" | "refused"): Try {
  return [
    `udp ${address}:${port}`,
    { op: "udp", address, port, sendHex: hex("x"), timeoutMs: expected === "open" ? PATIENCE_MS : 500 },
    expected === "open" ? "open" : "no answer",
  ];
}

/** The first bytes of an HTTP or TLS client; `lost`: the connection is cut without an answer. */
function web(address: string, port: number, what: string, sendHex: string, expected: "open" | "lost"): Try {
  return [
    `${what} to ${address}:${port}`,
    { op: "tcp", address, port, sendHex, until: "hello", timeoutMs: PATIENCE_MS },
    expected === "open" ? `open hello ${address}:${port}` : "lost",
  ];
}

const http = (host: string, address: string, expected: "open" | "lost", port = 80) =>
  web(address, port, `http ${host}`, request(host), expected);
const tls = (name: string | undefined, address: string, expected: "open" | "lost", port = 443) =>
  web(address, port, `tls ${name}`, hex(clientHello(name)), expected);

function ask(name: string, expected: string, type = 1, server = "169.254.0.22"): Try {
  return [
    `dns ${type} ${name} of ${server}`,
    {
      op: "udp",
      address: server,
      port: 53,
      sendHex: hex(dnsQuery(name, type)),
      timeoutMs: expected === "no answer" ? 500 : PATIENCE_MS,
    },
    expected,
  ];
}

async function attempt(guest: GuestAgent, [what, order, expected]: Try): Promise<[string, string]> {
  const { outcome, received } = await guest.do(order);
  if (what.startsWith("dns")) {
    if (outcome !== "open") return [what, "no answer"];
    const { code, addresses } = readDnsAnswer(Buffer.from(received, "hex"));
    return [what, `${code} ${addresses.join(" ")}`.trim()];
  }
  if (order.op === "udp") return [what, outcome === "open" ? "open" : "no answer"];
  if (received === "" && expected === "lost") {
    return [what, ["ended", "reset", "refused"].includes(outcome) ? "lost" : outcome];
  }
  return [what, `${outcome} ${received.split("\n")[0]}`.trim()];
}

async function expectAll(guest: GuestAgent, tries: readonly Try[]): Promise<void> {
  const results = await Promise.all(tries.map((one) => attempt(guest, one)));
  expect(results).toEqual(tries.map(([what, , expected]) => [what, expected]));
}

/** Packets since `from` that the host sent to one of the addresses (with a port when given). */
async function packetsTo(from: number, ...targets: string[]): Promise<string[]> {
  const lines = (await wan.lines()).slice(from);
  return lines.filter((line) =>
    targets.some((target) => new RegExp(` > ${target.replaceAll(".", "\\.")}(\\.|:|$)`).test(line)),
  );
}

const captured = async () => (await wan.lines()).length;

// ---- the matrix -------------------------------------------------------------------------------------

interface Kind {
  readonly input: EgressInput;
  readonly tries: readonly Try[];
  /** `address` or `address.port`: no packet to it may leave. */
  readonly silent: readonly string[];
}

const ALWAYS: readonly Try[] = [
  tcp(PRIVATE, 80, "refused"),
  tcp(HOST_WAN, 80, "refused"),
  udp(PRIVATE, 53, "refused"),
];

const KINDS: Record<string, Kind> = {
  "the node's default": {
    input: {},
    tries: [
      tcp(GOOD, 80, "open"),
      tcp(EVIL, 7000, "open"),
      udp(EVIL, 443, "open"),
      udp(OTHER_DNS, 53, "open"),
      ask("evil.example", `0 ${EVIL}`),
    ],
    silent: [],
  },
  "internet access allowed by name": {
    input: { allowInternetAccess: true },
    tries: [tcp(EVIL, 80, "open")],
    silent: [],
  },
  "internet access denied": {
    input: { allowInternetAccess: false },
    tries: [
      tcp(GOOD, 80, "refused"),
      tcp(EVIL, 7000, "refused"),
      udp(EVIL, 443, "refused"),
      udp(OTHER_DNS, 53, "refused"),
      ask("good.example", "5"),
    ],
    silent: [GOOD, EVIL, OTHER_DNS, DNS_SERVER],
  },
  "internet access denied but for an address": {
    input: { allowInternetAccess: false, allowOut: [GOOD] },
    tries: [
      tcp(GOOD, 7000, "open"),
      udp(GOOD, 443, "open"),
      tcp(WILD, 7000, "refused"),
      tcp(EVIL, 80, "refused"),
    ],
    silent: [WILD, EVIL],
  },
  "one address denied": {
    input: { denyOut: [EVIL] },
    tries: [
      tcp(EVIL, 80, "refused"),
      udp(EVIL, 7000, "refused"),
      tcp(GOOD, 80, "open"),
      ask("evil.example", `0 ${EVIL}`),
    ],
    silent: [EVIL],
  },
  "a block denied, an address in it allowed": {
    input: { denyOut: ["203.0.113.0/24"], allowOut: [`${GOOD}/32`] },
    tries: [tcp(GOOD, 80, "open"), tcp(WILD, 80, "refused"), tcp(EVIL, 80, "open")],
    silent: [WILD],
  },
  "everything denied, a block allowed": {
    input: { denyOut: [ALL, "::/0"], allowOut: ["203.0.113.8/29", "2001:db8::1"] },
    tries: [
      tcp(GOOD, 7000, "open"),
      tcp(WILD, 443, "open"),
      tcp(EVIL, 443, "refused"),
      udp(EVIL, 443, "refused"),
    ],
    silent: [EVIL],
  },
  "blocks that end with the address space": {
    input: { denyOut: ["240.0.0.0/4", "255.255.255.255/32", "::/0"], allowOut: [HIGH] },
    tries: [
      tcp(HIGH, 7000, "open"),
      tcp(LAST, 7000, "refused"),
      tcp(LAST, 80, "refused"),
      tcp(GOOD, 80, "open"),
    ],
    silent: [LAST],
  },
  "many blocks, the last of which ends with the address space": {
    input: {
      denyOut: [
        "1.0.0.0/8",
        "3.0.0.0/8",
        "5.0.0.0/8",
        "7.0.0.0/8",
        "9.0.0.0/8",
        "198.51.100.64/26",
        "254.0.0.0/7",
      ],
      allowOut: ["1.1.1.1", "3.1.1.1", "5.1.1.1", "7.1.1.1", "9.1.1.1", "203.0.113.10/31", "250.0.0.1"],
    },
    tries: [
      tcp(GOOD, 80, "open"),
      tcp(WILD, 80, "open"),
      tcp(EVIL, 80, "refused"),
      tcp(LAST, 7000, "refused"),
      tcp(HIGH, 7000, "open"),
      udp(OTHER_DNS, 53, "open"),
    ],
    silent: [EVIL, LAST],
  },
  "FR-83: everything, also by overlapping blocks up to the last address; one address allowed": {
    input: { denyOut: [ALL, "240.0.0.0/4", "255.255.255.255/32", "::/0"], allowOut: [`${HIGH}/32`] },
    tries: [
      tcp(HIGH, 7000, "open"),
      udp(HIGH, 443, "open"),
      tcp(LAST, 7000, "refused"),
      tcp(GOOD, 80, "refused"),
      udp(EVIL, 443, "refused"),
    ],
    silent: [LAST, GOOD, EVIL],
  },
  "domains only": {
    input: WEB,
    tries: [
      ask("good.example", `0 ${GOOD}`),
      ask("GOOD.example", `0 ${GOOD}`),
      ask("a.wild.example", `0 ${WILD}`),
      ask("b.c.wild.example", `0 ${WILD}`),
      ask("mixed.wild.example", `0 ${WILD}`),
      ask("empty.wild.example", "0"),
      ask("none.wild.example", "0"),
      ask("broken.wild.example", "2"),
      ask("inside.wild.example", "0"),
      ask("good.example", "0", 28),
      ask("secret.good.example", "5", 16),
      ask("wild.example", "5"),
      ask("evil.example", "5"),
      ask("good.example", "no answer", 1, OTHER_DNS),
      ask("good.example", `0 ${GOOD}`, 1, DNS_SERVER),
      http("good.example", GOOD, "open"),
      http("Good.Example:80", GOOD, "open"),
      http("a.wild.example", WILD, "open"),
      tls("good.example", GOOD, "open"),
      tls("b.c.wild.example", WILD, "open"),
      tls("good.example", GOOD, "open", 80),
      http("good.example", GOOD, "open", 443),
      http("evil.example", EVIL, "lost"),
      http("good.example", EVIL, "lost"),
      http("a.wild.example", GOOD, "lost"),
      http(EVIL, EVIL, "lost"),
      tls("evil.example", EVIL, "lost"),
      tls("good.example", EVIL, "lost"),
      tls(undefined, EVIL, "lost"),
      http("inside.wild.example", PRIVATE, "lost"),
      http("host.wild.example", HOST_WAN, "lost"),
      web(
        EVIL,
        80,
        "two hosts",
        hex("GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n"),
        "lost",
      ),
      web(EVIL, 80, "noise", hex("\x00\x01\x02\x03"), "lost"),
      tcp(EVIL, 7000, "refused"),
      tcp(GOOD, 7000, "refused"),
      udp(GOOD, 443, "refused"),
      udp(EVIL, 443, "refused"),
      tcp(GOOD, 853, "refused"),
      tcp(OTHER_DNS, 53, "refused"),
      udp(OTHER_DNS, 53, "refused"),
    ],
    silent: [EVIL, OTHER_DNS, PRIVATE, `${GOOD}.853`, `${GOOD}.7000`, `${DNS_SERVER}.80`],
  },
  "domains and addresses": {
    input: { allowOut: ["good.example", EVIL], denyOut: [ALL] },
    tries: [
      tcp(EVIL, 80, "open"),
      tcp(EVIL, 7000, "open"),
      http("good.example", GOOD, "open"),
      http("a.wild.example", WILD, "lost"),
      tls("evil.example", WILD, "lost"),
      ask("evil.example", "5"),
    ],
    silent: [WILD],
  },
};

describe.each(Object.entries(KINDS))("%s", (_name, { input, tries, silent }) => {
  const byName = input.allowOut?.some((entry) => /[a-z]/.test(entry)) ?? false;
  const all = byName ? tries : [...tries, ...ALWAYS];

  test("from the first packet, by update, and gone after release", async () => {
    await using service = await startService();
    const policy = parseEgressPolicy(input);
    const before = await captured();
    {
      await using slot = await service.acquire(policy);
      await using guest = await startGuest(slot);
      await expectAll(guest, all);
      expect(slot.policy).toEqual(policy);
    }
    expect(await packetsTo(before, ...silent, PRIVATE)).toEqual([]);
    {
      await using slot = await service.acquire();
      await using guest = await startGuest(slot);
      await expectAll(guest, [tcp(GOOD, 7000, "open"), tcp(EVIL, 80, "open")]);
      const updated = await captured();
      await slot.applyPolicy(policy);
      await expectAll(guest, all);
      expect(await packetsTo(updated, ...silent, PRIVATE)).toEqual([]);
      await slot.applyPolicy(DEFAULT_POLICY);
      await expectAll(guest, KINDS["the node's default"]!.tries);
    }
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    await expectAll(guest, KINDS["the node's default"]!.tries);
    expect(servers.lines.filter((line) => line.includes(` ${PRIVATE}:`))).toEqual([]);
    expect(hostServer.lines).toEqual([]);
  }, 120_000);
});

// ---- updates ----------------------------------------------------------------------------------------

const flow = (name: string, address: string, port: number, text: string): GuestOrder => ({
  op: "flow",
  name,
  address,
  port,
  sendHex: hex(text),
  until: text,
});

describe("changes of a running guest's policy", () => {
  test("established connections go on, new ones are judged anew; straight and through the proxy", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    expect(await guest.do(flow("straight", EVIL, 7000, "one"))).toMatchObject({ outcome: "open" });
    await slot.applyPolicy(parseEgressPolicy(WEB));
    expect(await guest.do(flow("straight", EVIL, 7000, "two"))).toMatchObject({ outcome: "open" });
    await expectAll(guest, [tcp(EVIL, 7000, "refused"), ask("good.example", `0 ${GOOD}`)]);
    const get = "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n";
    expect(await guest.do(flow("proxied", GOOD, 80, get))).toMatchObject({ outcome: "open" });
    await slot.applyPolicy(parseEgressPolicy({ allowInternetAccess: false }));
    expect((await slot.policyReport()).proxiedConnections).toBe(1);
    expect(await guest.do(flow("proxied", GOOD, 80, "more"))).toMatchObject({ outcome: "open" });
    expect(await guest.do(flow("straight", EVIL, 7000, "three"))).toMatchObject({ outcome: "open" });
    await expectAll(guest, [tcp(GOOD, 80, "refused"), ask("good.example", "5")]);
    await slot.applyPolicy(DEFAULT_POLICY);
    await expectAll(guest, [tcp(GOOD, 80, "open"), ask("evil.example", `0 ${EVIL}`)]);
    expect(await guest.do(flow("proxied", GOOD, 80, "last"))).toMatchObject({ outcome: "open" });
  });

  test("isolated: what was established is cut, too", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    expect(await guest.do(flow("old", EVIL, 7000, "one"))).toMatchObject({ outcome: "open" });
    await slot.isolate();
    expect((await guest.do(flow("old", EVIL, 7000, "two"))).outcome).not.toBe("open");
    await expectAll(guest, [tcp(EVIL, 7000, "refused"), tcp(GOOD, 80, "refused"), ask("good.example", "5")]);
  });

  test("a DNS connection from before does not go around the restriction", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    expect(await guest.do(flow("dns", OTHER_DNS, 53, "one"))).toMatchObject({ outcome: "open" });
    await slot.applyPolicy(parseEgressPolicy(WEB));
    const before = await captured();
    expect((await guest.do(flow("dns", OTHER_DNS, 53, "tunnel"))).received).toBe("");
    expect(await packetsTo(before, OTHER_DNS)).toEqual([]);
  });

  test("many changes at once: the last one counts, and none leaves anything behind", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    const inputs = Object.values(KINDS).map(({ input }) => parseEgressPolicy(input));
    await Promise.all([...inputs, ...inputs.toReversed()].map((policy) => slot.applyPolicy(policy)));
    await slot.applyPolicy(parseEgressPolicy({ denyOut: [EVIL] }));
    await expectAll(guest, [tcp(EVIL, 80, "refused"), tcp(GOOD, 80, "open")]);
    const elements = [
      ...run("nft", "list", "table", "inet", "agentenv-10.11.0.0").matchAll(/set (\S+) \{[^}]*elements/g),
    ];
    const counted = ["connections", "names", "webs"];
    expect(elements.map(([, set]) => set!).filter((set) => !counted.includes(set))).toEqual([
      ...["denied", "denying", "open", "refused", "deny-32"],
    ]);
    // One is read after the other: a guest that waits long for its refusal asks again in between.
    await eventually("a refused packet counts as one of the rule and as one refused", async () => {
      const report = await slot.policyReport();
      expect(report.rules.map(({ rule }) => rule)).toEqual([`deny ${EVIL}/32`]);
      return report.refused.packets > 0 && report.refused.packets === report.rules[0]!.packets;
    });
  });

  test("the report tells slot, policy, counters and the last refusals by name; the next holder starts anew", async () => {
    await using service = await startService({
      pool: { lowWatermark: 0, highWatermark: 1, maintenance: false },
    });
    {
      await using slot = await service.acquire(parseEgressPolicy(WEB));
      await using guest = await startGuest(slot);
      await expectAll(guest, [
        http("good.example", GOOD, "open"),
        tls("evil.example", EVIL, "lost"),
        http("good.example", EVIL, "lost"),
        ask("evil.example", "5"),
        ask("good.example", `0 ${GOOD}`),
        ask("broken.wild.example", "2"),
        tcp(EVIL, 7000, "refused"),
      ]);
      const report = await slot.policyReport();
      expect(report.slot).toEqual({
        index: slot.index,
        hostAddress: slot.hostAddress,
        hostDevice: `veth-${slot.index}`,
        netnsPath: slot.netnsPath,
      });
      expect(report.node.dnsServer).toBe(DNS_SERVER);
      expect(report.node.deniedCidrs).toContain("10.0.0.0/8");
      expect(report).toMatchObject({ policy: slot.policy, restricted: true, filtered: true });
      expect(report.refused.packets).toBeGreaterThan(0);
      expect(report.byName.connections).toEqual({ relayed: 1, refused: 2 });
      expect(report.byName.names).toEqual({ answered: 1, refused: 1, failed: 1 });
      expect(report.byName.recent.map(({ what }) => what).toSorted()).toEqual([
        `${EVIL}:443: evil.example is not allowed`,
        `${EVIL}:80: good.example does not have the address ${EVIL}`,
        "the name evil.example is not allowed",
      ]);
    }
    await using next = await service.acquire();
    expect((await next.policyReport()).byName).toEqual({
      connections: { relayed: 0, refused: 0 },
      names: { answered: 0, refused: 0, failed: 0 },
      recent: [],
    });
  });

  test("a change that the kernel refuses leaves the old policy in force; the slot goes on", async () => {
    await using service = await startService();
    await using slot = await service.acquire(parseEgressPolicy({ denyOut: [EVIL] }));
    await using guest = await startGuest(slot);
    // Somebody's hand in our table: a part of what the change wants to delete is gone.
    const element = ["inet", "agentenv-10.11.0.0", "refused", "{", slot.hostAddress, "}"];
    run("nft", "delete", "element", ...element);
    await expect(slot.applyPolicy(DEFAULT_POLICY)).rejects.toThrow("install firewall rules");
    expect(slot.policy.denyOut).toEqual([`${EVIL}/32`]);
    await expectAll(guest, [tcp(EVIL, 80, "refused"), tcp(GOOD, 80, "open")]);
    run("nft", "add", "element", ...element);
    await slot.applyPolicy(DEFAULT_POLICY);
    await expectAll(guest, [tcp(EVIL, 80, "open")]);
  });

  test("a policy that is not understood is refused as a whole; a released slot takes none", async () => {
    await using service = await startService();
    const slot = await service.acquire();
    const odd = { base: "default", allowOut: [], denyOut: ["evil.example"] } as const;
    await expect(slot.applyPolicy(odd)).rejects.toMatchObject({ status: 400 });
    await expect(service.acquire(odd)).rejects.toMatchObject({ status: 400 });
    await slot[Symbol.asyncDispose]();
    await expect(slot.applyPolicy(DEFAULT_POLICY)).rejects.toMatchObject({ code: "network_slot_released" });
  });
});

// ---- the proxy --------------------------------------------------------------------------------------

describe("the egress proxy", () => {
  test("host names in pieces, over many records, and too long", async () => {
    await using service = await startService();
    await using slot = await service.acquire(parseEgressPolicy(WEB));
    await using guest = await startGuest(slot);
    const pieces = (bytes: Uint8Array, count: number): GuestOrder => ({
      op: "tcp",
      address: GOOD,
      port: 443,
      sendHex: hex(bytes),
      pieces: count,
      until: "hello",
      timeoutMs: PATIENCE_MS,
    });
    const endless = Buffer.concat([Buffer.from("GET / HTTP/1.1\r\nX: "), Buffer.alloc(70_000, "x")]);
    const answers = await Promise.all(
      [
        pieces(clientHello("good.example", { recordBytes: 20 }), 1),
        pieces(clientHello("good.example", { padding: 40_000, recordBytes: 3000 }), 1),
        pieces(clientHello("good.example", { padding: 300, recordBytes: 7 }), 40),
        pieces(Buffer.from("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"), 20),
        pieces(clientHello("good.example", { padding: 65_400 }), 1),
        pieces(endless, 1),
        pieces(clientHello("evil.example", { recordBytes: 20 }), 5),
      ].map((order) => guest.do(order)),
    );
    expect(answers.map(({ received }) => received.startsWith("hello"))).toEqual([
      ...[true, true, true, true],
      ...[false, false, false],
    ]);
  });

  test("all bytes arrive both ways, and an end in one direction is only that", async () => {
    await using service = await startService();
    await using slot = await service.acquire(parseEgressPolicy(WEB));
    await using guest = await startGuest(slot);
    const body = `GET / HTTP/1.1\r\nHost: good.example\r\n\r\n${"0123456789".repeat(30_000)}`;
    const answer = await guest.do({
      op: "tcp",
      address: GOOD,
      port: 80,
      sendHex: hex(body),
      end: true,
      timeoutMs: PATIENCE_MS,
    });
    expect(answer.outcome).toBe("ended");
    expect(answer.received.length).toBe(`hello ${GOOD}:80\n`.length + body.length + "bye\n".length);
    expect(answer.received).toEndWith("9bye\n");
    await eventually("none is left", async () => (await slot.policyReport()).proxiedConnections === 0);
  });

  test("two thousand connections at once; nothing is left of them", async () => {
    await using service = await startService();
    await using slot = await service.acquire(parseEgressPolicy(WEB));
    await using guest = await startGuest(slot);
    const descriptors = () => Number(run("sh", "-c", `ls /proc/${process.pid}/fd | wc -l`));
    const order = {
      op: "many",
      address: GOOD,
      port: 80,
      sendHex: request("good.example"),
      until: "hello",
    } as const;
    await guest.do({ ...order, count: 10, timeoutMs: PATIENCE_MS });
    await Bun.sleep(100);
    const [before, memory] = [descriptors(), process.memoryUsage().rss];
    for (let round = 0; round < 2; round++) {
      expect((await guest.do({ ...order, count: 2000, timeoutMs: 20_000 })).received).toBe("2000");
    }
    await eventually("none is left", async () => (await slot.policyReport()).proxiedConnections === 0);
    await eventually("nor a descriptor", () => descriptors() <= before + 4);
    const grownMiB = (process.memoryUsage().rss - memory) / 1024 ** 2;
    console.log(`measured: ${grownMiB.toFixed(0)} MiB more after 2 x 2,000 proxied connections`);
    expect(grownMiB).toBeLessThan(150);
  }, 120_000);

  test("guests that do not read cost a bounded amount of memory; a destination that is not there is no hang", async () => {
    await using service = await startService();
    await using slot = await service.acquire(parseEgressPolicy(WEB));
    await using guest = await startGuest(slot);
    await expectAll(guest, [http("dead.wild.example", "198.51.100.99", "lost")]);
    const memory = process.memoryUsage().rss;
    const stalled = await guest.do({
      op: "many",
      count: 40,
      address: GOOD,
      port: 80,
      sendHex: hex("GET / HTTP/1.1\r\nHost: good.example\r\nX-Pump: 1\r\n\r\n"),
      stall: true,
      until: "never",
      timeoutMs: 4000,
    });
    expect(stalled.received).toBe("0");
    expect((await slot.policyReport()).proxiedConnections).toBe(40);
    const grownMiB = (process.memoryUsage().rss - memory) / 1024 ** 2;
    console.log(`measured: ${grownMiB.toFixed(0)} MiB more for 40 proxied connections that nobody reads`);
    expect(grownMiB).toBeLessThan(60);
    await expectAll(guest, [http("good.example", GOOD, "open")]);
  });

  test("a slot's connections end with it; its next holder has nothing of them", async () => {
    await using service = await startService({
      pool: { lowWatermark: 0, highWatermark: 1, maintenance: false },
    });
    const first = await service.acquire(parseEgressPolicy(WEB));
    {
      await using guest = await startGuest(first);
      const get = "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n";
      expect(await guest.do(flow("proxied", GOOD, 80, get))).toMatchObject({ outcome: "open" });
      expect((await first.policyReport()).proxiedConnections).toBe(1);
    }
    await first[Symbol.asyncDispose]();
    await using next = await service.acquire();
    expect(next.index).toBe(first.index);
    expect(next.policy).toEqual(DEFAULT_POLICY);
    expect((await next.policyReport()).proxiedConnections).toBe(0);
    expect(run("nft", "list", "set", "inet", "agentenv-10.11.0.0", "filtered")).not.toContain("elements");
  });

  describe("a used address's old connections do not open a way around the next policy", () => {
    /** One source port only, so that all guests' packets look alike. */
    const startAlike = async (slot: NetworkSlot) => {
      const guest = await startGuest(slot);
      inside(guest.netns, "sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=40000 40001");
      return guest;
    };
    const from = (netns: string) => {
      const script = `exec 3<>/dev/udp/${EVIL}/7000; echo x >&3; timeout 0.5 head -c 3 <&3`;
      return Bun.spawnSync(["nsenter", `--net=${netns}`, "bash", "-c", script]).stdout.toString();
    };
    const open = async (slot: NetworkSlot) => {
      await using guest = await startAlike(slot);
      for (let tries = 0; from(guest.netns) === ""; tries++) expect(tries).toBeLessThan(10);
      return slot.index;
    };
    const expectNothing = async (slot: NetworkSlot) => {
      await using guest = await startAlike(slot);
      const before = await captured();
      expect(from(guest.netns)).toBe("");
      expect(from(guest.netns)).toBe("");
      expect(await packetsTo(before, EVIL)).toEqual([]);
    };
    const closed = parseEgressPolicy({ allowInternetAccess: false });

    test("a slot from the pool", async () => {
      await using service = await startService({
        pool: { lowWatermark: 0, highWatermark: 1, maintenance: false },
      });
      const first = await service.acquire();
      await open(first);
      await first[Symbol.asyncDispose]();
      await using next = await service.acquire(closed);
      expect(next.index).toBe(first.index);
      await expectNothing(next);
    });

    test("a slot made anew: by the next server, and by one with a kept slot", async () => {
      let index: number;
      {
        await using service = await startService();
        await using slot = await service.acquire();
        index = await open(slot);
      }
      {
        await using service = await startService();
        await using slot = await service.acquire(closed);
        expect(slot.index).toBe(index);
        await expectNothing(slot);
        await slot.applyPolicy(DEFAULT_POLICY);
        await open(slot);
      }
      // Kept slots' connections stay, so the rest is looked after one by one.
      await using service = await startService({}, [{ index: 30_000 }]);
      await using slot = await service.acquire(closed);
      expect(slot.index).toBe(index);
      await expectNothing(slot);
    });
  });
});

// ---- processes --------------------------------------------------------------------------------------

describe("a server that ends", () => {
  /** A server in a process of its own with one slot; killed when the test says. */
  async function otherServer(input: EgressInput) {
    const program = `
      import { createNetworkService, parseEgressPolicy } from ${JSON.stringify(join(import.meta.dir, "index.ts"))};
      import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../lib/log.ts"))};
      const service = createNetworkService(${JSON.stringify(OPTIONS)}, createLogger("other"));
      await service.start([]);
      const slot = await service.acquire(parseEgressPolicy(${JSON.stringify(input)}));
      const { netnsPath, tapName, macAddress, guestAddress, gatewayAddress, prefixLength, hostAddress, index } = slot;
      console.log(JSON.stringify({ netnsPath, tapName, macAddress, guestAddress, gatewayAddress, prefixLength, hostAddress, index }));
      setInterval(() => slot.index, 1000);
    `;
    const script = join(root, "other.ts");
    writeFileSync(script, program);
    const child = Bun.spawn([process.execPath, script], { stdout: "pipe", stderr: "inherit" });
    const reader = child.stdout.getReader();
    const line = Buffer.from((await reader.read()).value ?? []).toString();
    return { child, slot: JSON.parse(line) as NetworkSlot };
  }

  test("killed: guests with domain rules reach nothing by name until it is back, then as before", async () => {
    const { child, slot } = await otherServer(WEB);
    await using guest = await startGuest(slot);
    await expectAll(guest, [ask("good.example", `0 ${GOOD}`), http("good.example", GOOD, "open")]);
    const get = "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n";
    expect(await guest.do(flow("proxied", GOOD, 80, get))).toMatchObject({ outcome: "open" });
    // A guest that does not want to hear of the proxy's end, and sends on.
    run(
      "nsenter",
      `--net=${guest.netns}`,
      "nft",
      "add table ip deaf; add chain ip deaf in { type filter hook input priority 0; }; add rule ip deaf in tcp flags & (fin | rst) != 0 drop",
    );
    child.kill("SIGKILL");
    await child.exited;
    const before = await captured();
    expect((await guest.do(flow("proxied", GOOD, 80, "secret"))).outcome).toBe("timeout");
    run("nsenter", `--net=${guest.netns}`, "nft", "delete table ip deaf");
    await Promise.all([
      expectAll(guest, [
        ask("good.example", "no answer"),
        tcp(EVIL, 7000, "refused"),
        udp(EVIL, 443, "refused"),
      ]),
      attempt(guest, http("good.example", GOOD, "lost")),
      attempt(guest, tls("evil.example", EVIL, "lost")),
    ]);
    expect(await packetsTo(before, GOOD, EVIL, DNS_SERVER)).toEqual([]);

    await using service = await startService({}, [{ index: slot.index, policy: parseEgressPolicy(WEB) }]);
    await expectAll(guest, [
      ask("good.example", `0 ${GOOD}`),
      http("good.example", GOOD, "open"),
      http("good.example", EVIL, "lost"),
      tcp(EVIL, 7000, "refused"),
    ]);
    await using adopted = await service.adopt(slot.index);
    expect(adopted.policy.allowOut).toEqual(["good.example", "*.wild.example"]);
    await adopted.applyPolicy(DEFAULT_POLICY);
    await expectAll(guest, [tcp(EVIL, 7000, "open")]);
  }, 120_000);

  test("replaced: straight connections of a kept guest go on", async () => {
    const { child, slot } = await otherServer({ denyOut: [EVIL] });
    await using guest = await startGuest(slot);
    expect(await guest.do(flow("straight", GOOD, 7000, "one"))).toMatchObject({ outcome: "open" });
    child.kill("SIGKILL");
    await child.exited;
    await expectAll(guest, [tcp(EVIL, 80, "refused"), tcp(WILD, 80, "open")]);
    await using service = await startService({}, [
      { index: slot.index, policy: parseEgressPolicy({ denyOut: [WILD] }) },
    ]);
    await using _adopted = await service.adopt(slot.index);
    expect(await guest.do(flow("straight", GOOD, 7000, "two"))).toMatchObject({ outcome: "open" });
    await expectAll(guest, [tcp(WILD, 80, "refused"), tcp(EVIL, 80, "open")]);
  });

  test("a host whose FORWARD chain drops, as docker makes it: guests get through, and nothing stays", async () => {
    if (Bun.which("iptables") === null) {
      console.warn("skipped: docker's forward chain: needs iptables");
      return;
    }
    run("iptables", "-N", "DOCKER-USER");
    run("iptables", "-A", "DOCKER-USER", "-j", "RETURN");
    run("iptables", "-A", "FORWARD", "-j", "DOCKER-USER");
    run("iptables", "-P", "FORWARD", "DROP");
    const before = run("iptables", "-S");
    try {
      for (let round = 0; round < 2; round++) {
        await using service = await startService();
        await using slot = await service.acquire(parseEgressPolicy({ denyOut: [EVIL] }));
        await using guest = await startGuest(slot);
        await expectAll(guest, [
          tcp(GOOD, 80, "open"),
          tcp(EVIL, 80, "refused"),
          tcp(PRIVATE, 80, "refused"),
        ]);
        expect(run("iptables", "-S", "DOCKER-USER").match(/agentenv-10\.11\.0\.0/g)).toHaveLength(2);
      }
      // What a killed server left is not left twice.
      const { child, slot } = await otherServer({});
      child.kill("SIGKILL");
      await child.exited;
      await using service = await startService({}, [{ index: slot.index }]);
      expect(run("iptables", "-S", "DOCKER-USER").match(/agentenv-10\.11\.0\.0/g)).toHaveLength(2);
      await (await service.adopt(slot.index))[Symbol.asyncDispose]();
    } finally {
      expect(run("iptables", "-S")).toBe(before);
      run("nft", "delete", "table", "ip", "filter");
    }
  });

  test("a kept slot whose stored policy is damaged is denied everything until it gets another", async () => {
    const { child, slot } = await otherServer({});
    await using guest = await startGuest(slot);
    child.kill("SIGKILL");
    await child.exited;
    log.level = "silent";
    const damaged = { base: "default", allowOut: [], denyOut: ["1.2.3.4/99"] } as const;
    await using service = await startService({}, [{ index: slot.index, policy: damaged }]);
    log.level = "error";
    await using adopted = await service.adopt(slot.index);
    await expectAll(guest, [tcp(GOOD, 80, "refused"), ask("good.example", "5")]);
    await adopted.applyPolicy(DEFAULT_POLICY);
    await expectAll(guest, [tcp(GOOD, 80, "open")]);
  });

  test("other people's rules are as they were", async () => {
    const foreign = `table inet theirs {
  chain forward {
    type filter hook forward priority filter + 10; policy accept;
    counter
  }
}
table ip filter {
  chain FORWARD {
    type filter hook forward priority filter; policy accept;
  }
}
`;
    const file = join(root, "foreign.nft");
    writeFileSync(file, foreign);
    run("nft", "-f", file);
    const listed = () => run("nft", "-s", "list", "ruleset");
    const before = listed();
    try {
      await using service = await startService();
      await using slot = await service.acquire(parseEgressPolicy(WEB));
      await slot.applyPolicy(DEFAULT_POLICY);
      expect(run("nft", "-s", "list", "table", "inet", "theirs")).toBe(
        before.slice(before.indexOf("table inet theirs"), before.indexOf("table ip filter")),
      );
    } finally {
      expect(listed()).toBe(before);
      run("nft", "delete", "table", "inet", "theirs");
      run("nft", "delete", "table", "ip", "filter");
    }
  });
});
