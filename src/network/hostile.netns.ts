/**
 * Guests that attack what all share, and hosts with other firewalls. Started by service.test.ts in a network
 * and mount namespace of its own, which plays the host (see tests/support/network-rig.ts).
 */
import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { dnsQuery, readDnsAnswer } from "../../tests/support/dns-query.ts";
import {
  attachGuest,
  buildTapCable,
  type Capture,
  capture,
  type Guest,
  type GuestAgent,
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
  type NetworkService,
  type NetworkServiceOptions,
  type NetworkSlot,
  parseEgressPolicy,
} from "./index.ts";

if (process.env.AENV_NETNS_SUITE !== "1")
  throw new Error("run service.test.ts: this suite changes the host's network");

const root = mkdtempSync(join(tmpdir(), "nethostile-"));
const rig = join(import.meta.dir, "../../tests/rig");
const GATEWAY = "203.0.113.2";
const HOST_WAN = "203.0.113.1";
const DNS_SERVER = "10.53.0.53";
const GOOD = "203.0.113.10";
const OPTIONS: NetworkServiceOptions = {
  runtimeDir: join(root, "run"),
  hostInteractionCidr: "10.11.0.0/16",
  vethCidr: "10.12.0.0/16",
  alwaysDeniedCidrs: ["10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
  dnsServer: DNS_SERVER,
};
const WEB = parseEgressPolicy({ allowOut: ["good.example"], denyOut: ["0.0.0.0/0"] });
const hex = (text: string | Uint8Array) => Buffer.from(text as string).toString("hex");
const REQUEST = hex("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n");

let internet = "";
let servers: Program;
let dns: Program;
let wan: Capture;
const warnings: string[] = [];
const log = createLogger("hostile-test");
log.level = "error";

beforeAll(async () => {
  buildTapCable(root);
  const flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"];
  run("gcc", ...flags, "-o", join(root, "frames"), join(rig, "frames.c"));
  internet = makeInternet(root, HOST_WAN, GATEWAY, [GOOD, DNS_SERVER]);
  [servers, dns, wan] = await Promise.all([
    startProgram(internet, "echo-server.ts", "tcp:80", "tcp:7000", `udp:${GOOD}:7000`, "silent:7001"),
    startProgram(internet, "dns-server.ts", DNS_SERVER, `good.example=${GOOD}`),
    capture("wan0"),
  ]);
}, 120_000);

afterAll(async () => {
  for (const one of [wan, servers, dns]) await one[Symbol.asyncDispose]();
  rmSync(join(root, "run"), { recursive: true, force: true });
  run("umount", internet);
  rmSync(root, { recursive: true, force: true });
});

afterEach(() => {
  expect(run("nft", "list", "tables").includes("agentenv")).toBe(false);
  expect(run("ip", "-br", "link").includes("veth-")).toBe(false);
});

async function startService(options: Partial<NetworkServiceOptions> = {}): Promise<NetworkService> {
  warnings.length = 0;
  const told = Object.assign(Object.create(log) as typeof log, {
    warn: (...words: unknown[]) => warnings.push(words.map(String).join(" ")),
  });
  const service = createNetworkService({ ...OPTIONS, ...options }, told);
  await service.start([]);
  return service;
}

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

const reach = async (guest: GuestAgent, port = 7000, sendHex = "") =>
  (await guest.do({ op: "tcp", address: GOOD, port, sendHex, until: "hello", timeoutMs: 10_000 })).outcome;

/** ARP questions seen in a slot's namespace, on all its devices. */
async function captureArp(netns: string) {
  const child = Bun.spawn(
    ["nsenter", `--net=${netns}`, "tcpdump", "-i", "any", "--immediate-mode", "-nn", "-l", "-t", "arp"],
    { stdout: "pipe", stderr: "pipe" },
  );
  const errors = child.stderr.getReader();
  for (let said = ""; !said.includes("listening"); ) {
    const { value, done } = await errors.read();
    if (done) throw new Error(`tcpdump ended: ${said}`);
    said += Buffer.from(value).toString();
  }
  const reader = child.stdout.getReader();
  return {
    /** Questions before the first one for the address. */
    async untilAsked(address: string): Promise<string[]> {
      for (let said = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) throw new Error(`tcpdump ended: ${said}`);
        said += Buffer.from(value).toString();
        const questions = said.split("\n").filter((line) => line.includes("who-has"));
        const end = questions.findIndex((line) => line.includes(`who-has ${address} `));
        if (end >= 0) return questions.slice(0, end);
      }
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGTERM");
      await child.exited;
    },
  };
}

const neighbours = (netns: string) => inside(netns, "ip", "-4", "neigh").trim().split("\n").length;

describe("hostile guests", () => {
  test("made-up senders in ARP, IPv4 and IPv6: none of it is believed or leaves, and nobody else notices", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using other = await service.acquire();
    await using guest = await startGuest(slot);
    await using neighbour = await startGuest(other);
    const from = (await wan.lines()).length;
    const before = neighbours(slot.netnsPath);
    inside(guest.netns, join(root, "frames"), "eth0", "3000", GOOD);
    // All of it was seen before this connection, which works.
    expect(await reach(guest)).toBe("open");
    expect(await reach(neighbour)).toBe("open");
    const lies = (await wan.lines()).slice(from).filter((line) => line.includes(`> ${GOOD}.7000: UDP`));
    expect(lies).toEqual([]);
    // Permanent entries are as they were; made-up neighbours would fill a table that all namespaces share.
    expect(neighbours(slot.netnsPath)).toBeLessThanOrEqual(before + 4);
    expect(inside(slot.netnsPath, "ip", "neigh", "show", slot.guestAddress)).toContain(slot.macAddress);
    // The host still reaches the guest, at once.
    const hostToGuest = Bun.spawnSync(["bash", "-c", `exec 3<>/dev/tcp/${slot.hostAddress}/9`], {
      stderr: "pipe",
    });
    expect(hostToGuest.stderr.toString()).toContain("refused");
  });

  test("another MAC or IP address of its own gets a guest nothing but silence", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using other = await service.acquire();
    await using guest = await startGuest(slot);
    await using neighbour = await startGuest(other);
    inside(guest.netns, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:99");
    const silent = { op: "tcp", address: GOOD, port: 7000, until: "hello", timeoutMs: 700 } as const;
    expect((await guest.do(silent)).outcome).toBe("timeout");
    expect(await reach(neighbour)).toBe("open");
    inside(guest.netns, "ip", "link", "set", "eth0", "address", slot.macAddress);
    inside(guest.netns, "ip", "route", "replace", "default", "via", slot.gatewayAddress);
    expect(await reach(guest)).toBe("open");
  });

  test("open connections are bounded per guest; others go on, and the next holder of the slot starts anew", async () => {
    await using service = await startService({
      guestLimits: { connections: 100 },
      pool: { lowWatermark: 0, highWatermark: 1, maintenance: false },
    });
    await using other = await service.acquire();
    await using neighbour = await startGuest(other);
    const heard = () => servers.lines.filter((line) => line.startsWith(`tcp ${GOOD}:7000 `)).length;
    let index: number;
    {
      await using slot = await service.acquire();
      index = slot.index;
      await using guest = await startGuest(slot);
      const before = heard();
      const hold = guest.do({
        ...{ op: "many", address: GOOD, port: 7000, until: "never", timeoutMs: 9000, count: 300 },
      });
      while ((await slot.policyReport()).refused.packets < 200) await Bun.sleep(20);
      while (heard() < before + 100) await Bun.sleep(20);
      expect(await reach(guest)).toBe("refused");
      expect(heard()).toBe(before + 100);
      expect(await reach(neighbour)).toBe("open");
      await hold;
    }
    await using slot = await service.acquire();
    expect(slot.index).toBe(index);
    await using guest = await startGuest(slot);
    expect(await reach(guest)).toBe("open");
  }, 120_000);

  test("a flood of DNS questions does not reach the server's process beyond its share; others are answered", async () => {
    await using service = await startService({ guestLimits: { namePacketsPerSecond: 50 } });
    await using slot = await service.acquire(WEB);
    await using other = await service.acquire(WEB);
    await using guest = await startGuest(slot);
    await using neighbour = await startGuest(other);
    const flood = `
      const socket = await Bun.udpSocket({ socket: { error() {} } });
      const question = Buffer.from(${JSON.stringify(hex(dnsQuery("evil.example")))}, "hex");
      for (let i = 0; i < 5000; i++) while (!socket.send(question, 53, "169.254.0.22")) await Bun.sleep(1);
      socket.close();`;
    const started = performance.now();
    inside(guest.netns, process.execPath, "-e", flood);
    const answer = await neighbour.do({
      op: "udp",
      address: "169.254.0.22",
      port: 53,
      sendHex: hex(dnsQuery("good.example")),
      timeoutMs: 10_000,
    });
    expect(readDnsAnswer(Buffer.from(answer.received, "hex"))).toEqual({ code: 0, addresses: [GOOD] });
    const seconds = (performance.now() - started) / 1000;
    const { names } = (await slot.policyReport()).byName;
    expect(names.refused).toBeGreaterThan(0);
    // A burst of two seconds' worth, and the rate.
    expect(names.refused).toBeLessThanOrEqual(100 + 50 * Math.ceil(seconds));
  }, 120_000);

  test("connections that never name their host take no more than a share of the proxy", async () => {
    await using service = await startService({
      proxyLimits: {
        connections: 40,
        connectionsPerGuest: 30,
        reservedPerGuest: 5,
        waitingBytesPerGuest: 256 * 1024,
        prefaceTimeoutMs: 60_000,
      },
    });
    await using slot = await service.acquire(WEB);
    await using other = await service.acquire(WEB);
    await using guest = await startGuest(slot);
    await using neighbour = await startGuest(other);
    const slow = { op: "many", address: GOOD, port: 80, until: "hello", timeoutMs: 4000 } as const;
    expect((await guest.do({ ...slow, count: 200, sendHex: hex("GET /") })).received).toBe("0");
    // They are still there: nobody closed them. Up to half of all is anybody's, then each has its reserve.
    expect((await slot.policyReport()).proxiedConnections).toBe(20);
    const quick = {
      op: "many",
      address: GOOD,
      port: 80,
      until: "hello",
      timeoutMs: 10_000,
      sendHex: REQUEST,
    } as const;
    expect((await neighbour.do({ ...quick, count: 5 })).received).toBe("5");
    expect((await slot.policyReport()).proxiedConnections).toBe(20);
  }, 120_000);

  test("bytes that wait for a name are bounded per guest", async () => {
    await using service = await startService({
      proxyLimits: { waitingBytesPerGuest: 256 * 1024, prefaceTimeoutMs: 60_000 },
    });
    await using slot = await service.acquire(WEB);
    await using other = await service.acquire(WEB);
    await using guest = await startGuest(slot);
    await using neighbour = await startGuest(other);
    const endless = hex(`GET / HTTP/1.1\r\nX: ${"x".repeat(60_000)}`);
    await guest.do({
      op: "many",
      address: GOOD,
      port: 80,
      until: "hello",
      timeoutMs: 3000,
      count: 40,
      sendHex: endless,
    });
    const { proxiedConnections, byName } = await slot.policyReport();
    expect(proxiedConnections).toBeLessThanOrEqual(5);
    expect(byName.recent.at(-1)?.what).toContain("too many bytes wait");
    expect(await reach(neighbour, 80, REQUEST)).toBe("open");
  }, 120_000);
});

describe("the way to the internet", () => {
  test("first connections into a slot and out of it wait for no neighbour", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    const entries = (netns: string | undefined, device: string) => {
      const argv = ["ip", "neigh", "show", "dev", device];
      return netns === undefined ? run(...argv) : inside(netns, ...argv);
    };
    // As after a resume: the guest knows its gateway, whose address and MAC are the same in every slot.
    inside(
      guest.netns,
      "ip",
      "neigh",
      "replace",
      slot.gatewayAddress,
      "lladdr",
      "02:fc:a9:fe:00:16",
      "dev",
      "eth0",
    );
    await using arp = await captureArp(slot.netnsPath);
    const connect = `exec 3<>/dev/tcp/${slot.hostAddress}/9`;
    expect(Bun.spawnSync(["bash", "-c", connect], { stderr: "pipe" }).stderr.toString()).toContain("refused");
    expect(await reach(guest)).toBe("open");
    for (const listed of [entries(undefined, `veth-${slot.index}`), entries(slot.netnsPath, "tap0")]) {
      expect(listed).toContain("PERMANENT");
    }
    // A question that is asked on purpose, so that all before it is in the capture.
    inside(slot.netnsPath, "ip", "addr", "add", "192.0.2.1/24", "dev", "vpeer");
    Bun.spawnSync(["nsenter", `--net=${slot.netnsPath}`, "bash", "-c", "echo >/dev/udp/192.0.2.2/9"]);
    expect(await arp.untilAsked("192.0.2.2")).toEqual([]);
  });

  test("an uplink with a smaller MTU: no guest has to find out by itself, in either direction", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await startGuest(slot);
    run("ip", "link", "set", "wan0", "mtu", "1280");
    // Nobody tells anybody that a packet was too big.
    run(
      "nft",
      "add table inet blackhole { chain out { type filter hook output priority 0; icmp type destination-unreachable drop; }; }",
    );
    try {
      const sendHex = hex("0123456789".repeat(20_000));
      const answer = await guest.do({
        op: "tcp",
        address: GOOD,
        port: 7000,
        sendHex,
        end: true,
        timeoutMs: 10_000,
      });
      expect(answer.outcome).toBe("ended");
      expect(answer.received).toEndWith("9bye\n");
    } finally {
      run("nft", "delete", "table", "inet", "blackhole");
      run("ip", "link", "set", "wan0", "mtu", "1500");
    }
  });
});

describe("hosts with other firewalls", () => {
  const rules = (name: string) => join(rig, "firewalls", name);
  const load = (name: string) =>
    name.endsWith(".nft") ? run("nft", "-f", rules(name)) : run("iptables-restore", rules(name));
  const listed = () => run("nft", "-s", "list", "ruleset");

  afterEach(() => run("nft", "flush", "ruleset"));

  async function usable(): Promise<Record<string, string>> {
    await using service = await startService();
    await using slot = await service.acquire();
    await using byName = await service.acquire(WEB);
    await using guest = await startGuest(slot);
    await using restricted = await startGuest(byName);
    const said: Record<string, string> = {
      straight: await reach(guest),
      "by name": await reach(restricted, 80, REQUEST),
      denied: await reach(restricted),
    };
    const names = await restricted.do({
      op: "udp",
      address: "169.254.0.22",
      port: 53,
      sendHex: hex(dnsQuery("good.example")),
      timeoutMs: said.straight === "open" ? 10_000 : 1000,
    });
    said.names = names.outcome;
    return said;
  }
  const ALL_WELL = { straight: "open", "by name": "open", denied: "refused", names: "open" };

  test.each(["docker.rules", "ufw.rules"])(
    "%s: guests get through, and afterwards all is as before",
    async (name) => {
      load(name);
      const before = listed();
      expect(await usable()).toEqual(ALL_WELL);
      expect(warnings).toEqual([]);
      expect(listed()).toBe(before);
    },
    120_000,
  );

  test("ufw.rules and docker.rules together", async () => {
    load("ufw.rules");
    run("iptables-restore", "--noflush", rules("docker.rules"));
    const before = listed();
    expect(await usable()).toEqual(ALL_WELL);
    expect(listed()).toBe(before);
  }, 120_000);

  test("firewalld: says what to do; with that done guests get through", async () => {
    load("firewalld.nft");
    const before = listed();
    expect((await usable()).straight).not.toBe("open");
    expect(warnings.join()).toContain("firewall-cmd --permanent --zone=trusted --add-interface=veth-+");
    expect(listed()).toBe(before);
    run("nft", "flush", "ruleset");
    load("firewalld-trusted.nft");
    expect(await usable()).toEqual(ALL_WELL);
    expect(warnings).toEqual([]);
  }, 120_000);
});
