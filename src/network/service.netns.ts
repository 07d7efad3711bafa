/**
 * Tests of network slots with real devices, rules and packets. Started by service.test.ts in a network and
 * mount namespace of its own, which plays the host:
 *
 *   guest namespace --tap-cable-- tap0 [slot] vpeer -- veth-i [host] wan0 -- inet0 [internet]
 */
import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import pino from "pino";
import { netTapOwner } from "../../ffi/netns.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { attachGuest, buildTapCable, inside, makeInternet, run } from "../../tests/support/network-rig.ts";
import { runCommand } from "../lib/command.ts";
import { AenvError } from "../lib/errors.ts";
import { createLogger } from "../lib/log.ts";
import { requireRateLimits } from "./host.ts";
import {
  createNetworkService,
  type KeptSlot,
  type NetworkService,
  type NetworkServiceOptions,
  type NetworkSlot,
} from "./index.ts";

if (process.env.AENV_NETNS_SUITE !== "1")
  throw new Error("run service.test.ts: this suite changes the host's network");

const root = mkdtempSync(join(tmpdir(), "network-netns-"));
const rig = join(import.meta.dir, "../../tests/rig");
const log = createLogger("network-test");
log.level = "error";

const INTERNET = "203.0.113.2";
const HOST_WAN = "203.0.113.1";
const DNS_SERVER = "10.53.0.53";
const PRIVATE_SERVERS = ["10.99.0.1", "192.168.7.1", "100.64.1.1", "172.16.5.5"];
const OPTIONS: NetworkServiceOptions = {
  runtimeDir: join(root, "run"),
  hostInteractionCidr: "10.11.0.0/16",
  vethCidr: "10.12.0.0/16",
  alwaysDeniedCidrs: [
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
  ],
  dnsServer: DNS_SERVER,
};
const netnsDir = join(OPTIONS.runtimeDir, "netns");

/** What a TCP client in `netns` (undefined: the host) is answered, or why it got no answer. */
/** `patience`: seconds without an answer that are none. */
function connect(netns: string | undefined, address: string, port: number, patience = 15): string {
  const script = 'exec 3<>"/dev/tcp/$0/$1" && cat <&3';
  const client = ["timeout", String(patience), "bash", "-c", script, address, String(port)];
  const result = Bun.spawnSync(netns === undefined ? client : ["nsenter", `--net=${netns}`, ...client]);
  if (result.exitCode === 0) return result.stdout.toString();
  const said = result.stderr.toString();
  return /refused/.test(said) ? "refused" : /unreachable/i.test(said) ? "unreachable" : "no answer";
}

/** `patience`: seconds without an answer that are none. */
function askUdp(netns: string, address: string, port: number, patience = 15): string {
  const script = 'exec 3<>"/dev/udp/$0/$1" && echo x >&3 && timeout "$2" head -c 7 <&3';
  const words = [address, port, patience].map(String);
  const result = Bun.spawnSync(["nsenter", `--net=${netns}`, "bash", "-c", script, ...words]);
  return result.stdout.toString() || "no answer";
}

/** What a server printed reaches us a moment after its answer reached the client. */
async function waitSeen(server: Server, count: number): Promise<readonly string[]> {
  await eventually(`${count} are seen`, () => server.seen.length >= count);
  expect(server.seen).toHaveLength(count);
  return server.seen;
}

async function countSeen(server: Server): Promise<number> {
  for (let count = -1; count !== server.seen.length; await Bun.sleep(200)) count = server.seen.length;
  return server.seen.length;
}

interface Server extends AsyncDisposable {
  readonly seen: readonly string[];
}

async function startServer(netns: string | undefined, ...ports: string[]): Promise<Server> {
  const argv = [process.execPath, join(rig, "tcp-server.ts"), ...ports];
  const child = Bun.spawn(netns === undefined ? argv : ["nsenter", `--net=${netns}`, ...argv], {
    stdout: "pipe",
  });
  const seen: string[] = [];
  const { promise: ready, resolve, reject } = Promise.withResolvers<void>();
  const reading = (async () => {
    let rest = "";
    for await (const chunk of child.stdout) {
      const lines = (rest + Buffer.from(chunk).toString()).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines)
        if (line === "ready") resolve();
        else seen.push(line);
    }
    reject(new Error("the server ended"));
  })();
  await ready;
  return {
    seen,
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await child.exited;
      await reading;
    },
  };
}

function ourDevices(): string[] {
  return run("ip", "-br", "link")
    .split("\n")
    .map((line) => line.split(/[@ ]/)[0] ?? "")
    .filter((name) => name.startsWith("veth-"));
}

function ourTables(): string[] {
  return run("nft", "list", "tables")
    .split("\n")
    .filter((line) => line.includes("agentenv"));
}

async function startService(keep: readonly KeptSlot[] = [], options = OPTIONS): Promise<NetworkService> {
  const service = createNetworkService(options, log);
  await service.start(keep);
  return service;
}

async function failure(work: Promise<unknown>): Promise<AenvError> {
  try {
    await work;
  } catch (error) {
    if (error instanceof AenvError) return error;
    throw error;
  }
  throw new Error("it succeeded");
}

let internet = "";
let internetServer: Server;
let hostServer: Server;

beforeAll(async () => {
  buildTapCable(root);
  internet = makeInternet(root, HOST_WAN, INTERNET, [DNS_SERVER, ...PRIVATE_SERVERS]);
  [internetServer, hostServer] = await Promise.all([
    startServer(internet, "80", "53", `udp:${INTERNET}:53`, `udp:${DNS_SERVER}:53`),
    startServer(undefined, "9000"),
  ]);
}, 120_000);

afterAll(async () => {
  await internetServer[Symbol.asyncDispose]();
  await hostServer[Symbol.asyncDispose]();
  rmSync(join(root, "run"), { recursive: true, force: true });
  run("umount", internet);
  rmSync(root, { recursive: true, force: true });
});

afterEach(() => {
  expect(ourDevices()).toEqual([]);
  expect(ourTables()).toEqual([]);
  expect(existsSync(netnsDir) ? readdirSync(netnsDir) : []).toEqual([]);
});

/** A process that makes slots and waits; resolves with their indices. */
async function otherProcess(options: NetworkServiceOptions, slots: number) {
  const program = `
    import { createNetworkService } from ${JSON.stringify(join(import.meta.dir, "index.ts"))};
    import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../lib/log.ts"))};
    const service = createNetworkService(${JSON.stringify(options)}, createLogger("other"));
    await service.start([]);
    const slots = await Promise.all(Array.from({ length: ${slots} }, () => service.acquire()));
    console.log(JSON.stringify(slots.map((slot) => slot.index).sort()));
    setInterval(() => slots.length, 1000);
  `;
  const script = join(root, "other.ts");
  writeFileSync(script, program);
  const child = Bun.spawn([process.execPath, script], { stdout: "pipe", stderr: "inherit" });
  const reader = child.stdout.getReader();
  const line = Buffer.from((await reader.read()).value ?? []).toString();
  return { child, indices: JSON.parse(line) as number[] };
}

async function killed(options: NetworkServiceOptions, slots: number): Promise<number[]> {
  const { child, indices } = await otherProcess(options, slots);
  child.kill("SIGKILL");
  await child.exited;
  return indices;
}

describe("slots", () => {
  test("20 at once: own indices, addresses and namespaces; nothing is left of them", async () => {
    await using service = await startService();
    const started = performance.now();
    const slots = await Promise.all(Array.from({ length: 20 }, () => service.acquire()));
    const each = (performance.now() - started) / slots.length;
    console.log(`measured: ${each.toFixed(1)} ms per network slot, 20 at once`);
    expect(slots.map((slot) => slot.index).sort((a, b) => a - b)).toEqual(
      Array.from({ length: 20 }, (_, i) => i + 1),
    );
    for (const slot of slots) {
      expect(slot.hostAddress).toBe(`10.11.0.${slot.index}`);
      expect(slot).toMatchObject({
        guestAddress: "169.254.0.21",
        gatewayAddress: "169.254.0.22",
        prefixLength: 30,
      });
      expect(readlinkSync(join(netnsDir, `slot-10.11.0.0-${slot.index}`))).toBe(
        slot.netnsPath.slice(netnsDir.length + 1),
      );
      const addresses = inside(slot.netnsPath, "ip", "-br", "addr");
      expect(addresses).toMatch(new RegExp(`vpeer@\\S+\\s+UP\\s+10\\.12\\.0\\.${2 * slot.index + 1}/31`));
      expect(addresses).toMatch(/tap0\s+\S+\s+169\.254\.0\.22\/30/);
      expect(inside(slot.netnsPath, "ip", "-6", "addr")).toBe("");
      expect(inside(slot.netnsPath, "ip", "route")).toContain(
        `default via 10.12.0.${2 * slot.index} dev vpeer`,
      );
    }
    expect(run("ip", "-6", "addr", "show", "dev", `veth-${slots[0]?.index}`)).toBe("");
    expect(ourDevices()).toHaveLength(20);
    await Promise.all(slots.map((slot) => slot[Symbol.asyncDispose]()));
    await slots[0]?.[Symbol.asyncDispose]();
    expect(ourDevices()).toEqual([]);
  });

  test("150 device names that another server has are passed over", async () => {
    const links = Array.from({ length: 75 }, (_, i) => `veth-${2 * i + 1},veth-${2 * i + 2}`);
    const commands = links.map((pair) => {
      const [first, second] = pair.split(",");
      return `link add ${first} group 77 type veth peer name ${second}`;
    });
    await runCommand(["ip", "-batch", "-"], { stdin: commands.join("\n") });
    try {
      await using service = await startService();
      const slots = await Promise.all(Array.from({ length: 5 }, () => service.acquire()));
      expect(slots.map((slot) => slot.index).sort()).toEqual([151, 152, 153, 154, 155]);
      await Promise.all(slots.map((slot) => slot[Symbol.asyncDispose]()));
    } finally {
      run("ip", "link", "delete", "group", "77");
    }
  });

  test("one after the other", async () => {
    await using service = await startService();
    const times: number[] = [];
    for (let i = 0; i < 5; i++) {
      const started = performance.now();
      await using slot = await service.acquire();
      times.push(performance.now() - started);
      expect(ourDevices()).toEqual([`veth-${slot.index}`]);
    }
    expect(ourDevices()).toEqual([]);
    const median = times.sort((a, b) => a - b)[2]!;
    console.log(`measured: ${median.toFixed(1)} ms for one network slot (median of 5)`);
  });

  test("warm pool: taken from, filled up, given back to; a killed server's idle slots are removed", async () => {
    const pool = { lowWatermark: 2, highWatermark: 4 };
    const idle = async (count: number) => {
      await eventually(`${count} devices`, () => ourDevices().length === count);
    };
    expect(await killed({ ...OPTIONS, pool }, 1)).toHaveLength(1);
    expect(ourDevices().length).toBeGreaterThanOrEqual(1);
    await using service = await startService([], { ...OPTIONS, pool });
    await idle(2);
    const slots = [await service.acquire(), await service.acquire(), await service.acquire()];
    await idle(3 + 4);
    const names = slots.map((slot) => slot.netnsPath);
    await Promise.all(slots.map((slot) => slot[Symbol.asyncDispose]()));
    await idle(4);
    await using again = await service.acquire();
    expect(names).not.toContain(again.netnsPath);
    await using guest = await attachGuest(root, again);
    expect(connect(guest.netns, INTERNET, 80)).toBe(HOST_WAN);
  });

  test("a slot given back has its tap under the server's account again, whatever VMM had it", async () => {
    await using service = await startService([], {
      ...OPTIONS,
      pool: { lowWatermark: 0, highWatermark: 1, maintenance: false },
    });
    const owner = (slot: NetworkSlot) =>
      /\buser (\d+|root)\b/.exec(inside(slot.netnsPath, "ip", "-d", "-N", "link", "show", slot.tapName))?.[1];
    const first = await service.acquire();
    const own = owner(first);
    await netTapOwner(first.netnsPath, 1_879_048_192);
    expect(owner(first)).toBe("1879048192");
    await first[Symbol.asyncDispose]();
    {
      await using second = await service.acquire();
      expect(second.netnsPath).toBe(first.netnsPath);
      expect(owner(second)).toBe(own!);
      // Whoever still is at the tap sees what the next guest sends.
      await using _guest = await attachGuest(root, second);
      expect((await failure(netTapOwner(second.netnsPath, 0))).code).toBe("os_ebusy");
      await second[Symbol.asyncDispose]();
    }
    await using third = await service.acquire();
    expect(third.netnsPath).not.toBe(first.netnsPath);
  });

  test("an index whose device name somebody else has is passed over and left alone", async () => {
    run("ip", "link", "add", "veth-1", "type", "bridge");
    try {
      await using service = await startService();
      await using slot = await service.acquire();
      expect(slot.index).toBe(2);
      expect(ourDevices().sort()).toEqual(["veth-1", "veth-2"]);
    } finally {
      run("ip", "link", "del", "veth-1");
    }
  });

  test("a step that fails undoes those before it", async () => {
    await using service = await startService();
    // The host's table is away: the slot's last step, its entry there, is refused.
    const table = run("nft", "list", "table", "inet", "agentenv-10.11.0.0");
    run("nft", "delete", "table", "inet", "agentenv-10.11.0.0");
    try {
      expect((await failure(service.acquire())).message).toContain("install firewall rules");
    } finally {
      const file = join(root, "table.nft");
      writeFileSync(file, table);
      run("nft", "-f", file);
    }
    expect(ourDevices()).toEqual([]);
    expect(readdirSync(netnsDir)).toEqual([]);
    await using slot = await service.acquire();
    expect(slot.index).toBe(2);
  });
});

describe("packets", () => {
  test("host to guest at every port, guest to the internet behind the host's address", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    await using server = await startServer(guest.netns, "80", "8080", "49983");
    for (const port of [80, 8080, 49983])
      expect(connect(undefined, slot.hostAddress, port)).toBe("10.12.0.2");
    expect(connect(undefined, slot.hostAddress, 81)).toBe("refused");
    await waitSeen(server, 3);
    expect(connect(guest.netns, INTERNET, 80)).toBe(HOST_WAN);
    expect(connect(guest.netns, INTERNET, 53)).toBe(HOST_WAN);
  });

  test("nobody but the host reaches a guest", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    await using server = await startServer(guest.netns, "80");
    inside(internet, "ip", "route", "add", "10.11.0.0/16", "via", HOST_WAN);
    expect(connect(internet, slot.hostAddress, 80, 1)).toBe("no answer");
    inside(internet, "ip", "route", "del", "10.11.0.0/16");
    expect(server.seen).toEqual([]);
  });

  test("denied: private ranges, the host, other guests, the namespace itself; refused, not left waiting", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using other = await service.acquire();
    await using guest = await attachGuest(root, slot);
    await using otherGuest = await attachGuest(root, other);
    await using otherServer = await startServer(otherGuest.netns, "80");
    expect(connect(undefined, other.hostAddress, 80)).toBe("10.12.0.4");
    await waitSeen(otherServer, 1);
    const seenBefore = [
      await countSeen(internetServer),
      await countSeen(hostServer),
      otherServer.seen.length,
    ];
    const targets: [address: string, port: number][] = [
      ...PRIVATE_SERVERS.map((address): [string, number] => [address, 80]),
      [DNS_SERVER, 80],
      [HOST_WAN, 9000],
      ["10.12.0.2", 9000],
      ["10.12.0.3", 9000],
      [slot.gatewayAddress, 9000],
      [slot.hostAddress, 80],
      [other.hostAddress, 80],
      ["10.12.0.5", 80],
    ];
    const answers = targets.map(([address, port]) => [address, connect(guest.netns, address, port)]);
    expect(answers).toEqual(targets.map(([address]) => [address, "refused"]));
    expect(connect(undefined, "127.0.0.1", 9000)).toBe("127.0.0.1");
    expect(connect(undefined, INTERNET, 80)).toBe(HOST_WAN);
    await waitSeen(hostServer, seenBefore[1]! + 1);
    await waitSeen(internetServer, seenBefore[0]! + 1);
    await waitSeen(otherServer, seenBefore[2]!);
  });

  test("DNS: the gateway leads to the node's server, by UDP and TCP", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    expect(slot.dnsServer).toBe(slot.gatewayAddress);
    const before = await countSeen(internetServer);
    expect(askUdp(guest.netns, slot.dnsServer, 53)).toBe(HOST_WAN.slice(0, 7));
    expect(connect(guest.netns, slot.dnsServer, 53)).toBe(HOST_WAN);
    expect(askUdp(guest.netns, DNS_SERVER, 53)).toBe(HOST_WAN.slice(0, 7));
    expect(askUdp(guest.netns, PRIVATE_SERVERS[0]!, 53, 1)).toBe("no answer");
    const asked = (await waitSeen(internetServer, before + 3)).slice(before);
    expect(asked).toEqual(Array(3).fill(`${DNS_SERVER}:53 ${HOST_WAN}`));
  });

  test("a name server on the host itself is reachable, at port 53 only", async () => {
    await using server = await startServer(undefined, "53", `udp:${HOST_WAN}:53`);
    await using service = await startService([], { ...OPTIONS, dnsServer: HOST_WAN });
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    expect(askUdp(guest.netns, slot.dnsServer, 53)).toBe("10.11.0");
    expect(connect(guest.netns, slot.dnsServer, 53)).toBe(slot.hostAddress);
    expect(connect(guest.netns, HOST_WAN, 9000)).toBe("refused");
    await waitSeen(server, 2);
  });

  test("a guest cannot send from another address", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    const before = await countSeen(internetServer);
    for (const address of ["10.11.0.77", "10.12.0.3", "8.8.4.4"]) {
      inside(guest.netns, "ip", "addr", "add", `${address}/32`, "dev", "eth0");
      inside(guest.netns, "ip", "route", "replace", "default", "via", slot.gatewayAddress, "src", address);
      expect(askUdp(guest.netns, INTERNET, 53, 1)).toBe("no answer");
    }
    inside(guest.netns, "ip", "route", "replace", "default", "via", slot.gatewayAddress);
    // Its questions for the gateway bore the same addresses and were not answered.
    inside(guest.netns, "ip", "neigh", "flush", "dev", "eth0");
    expect(connect(guest.netns, INTERNET, 80)).toBe(HOST_WAN);
    await waitSeen(internetServer, before + 1);
  });

  test("the host drops what comes from a slot under another slot's address", async () => {
    await using service = await startService();
    await using slot = await service.acquire();
    await using other = await service.acquire();
    // A namespace taken over by a broken VMM: its own rules are gone.
    inside(slot.netnsPath, "nft", "delete", "table", "inet", "agentenv");
    inside(slot.netnsPath, "ip", "addr", "add", `${other.hostAddress}/32`, "dev", "vpeer");
    inside(slot.netnsPath, "ip", "route", "replace", "default", "via", "10.12.0.2", "src", other.hostAddress);
    const before = await countSeen(internetServer);
    expect(askUdp(slot.netnsPath, INTERNET, 53, 1)).toBe("no answer");
    expect(internetServer.seen).toHaveLength(before);
  });
});

const rated = await requireRateLimits().then(
  () => true,
  (error: unknown) => {
    console.log(`measured: no rates, the tests of them are skipped: ${error}`);
    return false;
  },
);

describe.skipIf(!rated)("rates", () => {
  interface Bucket {
    readonly kind: string;
    readonly bytes: number;
    readonly drops: number;
    readonly options: { readonly rate?: number; readonly burst?: number };
  }
  const bucketOf = (netns: string | undefined, device: string): Bucket | undefined => {
    const show = ["tc", "-s", "-j", "qdisc", "show", "dev", device];
    const found: Bucket[] = JSON.parse(netns === undefined ? run(...show) : inside(netns, ...show));
    return found.find(({ kind }) => kind === "tbf");
  };
  /** 400 datagrams of 1000 bytes from the host; one socket alone would wait for the queue. */
  const sendFromHost = async (address: string) => {
    for (let i = 0; i < 8; i++) {
      const socket = await Bun.udpSocket({ socket: { error: () => undefined } });
      for (let n = 0; n < 50; n++) {
        try {
          socket.send(new Uint8Array(1000), 9, address);
        } catch (error) {
          // Nobody is at the port, says one that got through; one that was dropped says so.
          if (!/ECONNREFUSED|ENOBUFS/.test(String(error))) throw error;
        }
      }
      socket.close();
    }
  };
  const sendFromGuest = (netns: string, address: string) => {
    const script =
      'exec 3<>"/dev/udp/$0/9"; for ((i = 0; i < 400; i++)); do printf %01000d 0 >&3; done 2>/dev/null; true';
    inside(netns, "bash", "-c", script, address);
  };

  test("what is received and sent is held to them, and what is over is dropped", async () => {
    const rates = {
      receiveBytesPerSec: 500,
      receiveBurstBytes: 0,
      sendBytesPerSec: 1000,
      sendBurstBytes: 1e5,
    };
    await using service = await startService([], { ...OPTIONS, rates });
    await using slot = await service.acquire();
    await using guest = await attachGuest(root, slot);
    const received = () => bucketOf(undefined, `veth-${slot.index}`)!;
    const sent = () => bucketOf(slot.netnsPath, "vpeer")!;
    expect([received().options.rate, sent().options.rate]).toEqual([500, 1000]);
    const buckets = [
      { read: received, bytes: 64 << 10 },
      { read: sent, bytes: 101_000 },
    ];
    // The guest's cable takes its time, and what waits for the first answer of a neighbour may be lost.
    await eventually("both are used up, and more was sent", async () => {
      await sendFromHost(slot.hostAddress);
      sendFromGuest(guest.netns, INTERNET);
      return buckets.every(({ read, bytes }) => read().bytes > bytes - 2000 && read().drops > 50);
    });
    // A bucket at once, and what these rates let through while this ran; a queue waits.
    for (const { read, bytes } of buckets) expect(read().bytes).toBeLessThan(bytes + 40_000);
  });

  test("of a slot that is taken over are the new server's", async () => {
    const rates = {
      receiveBytesPerSec: 1e6,
      receiveBurstBytes: 0,
      sendBytesPerSec: 2 ** 33,
      sendBurstBytes: 0,
    };
    await killed({ ...OPTIONS, rates }, 1);
    expect(bucketOf(undefined, "veth-1")?.options.rate).toBe(1e6);
    {
      await using service = await startService([{ index: 1 }], {
        ...OPTIONS,
        rates: { ...rates, sendBytesPerSec: 0 },
      });
      const slot = await service.adopt(1);
      expect(bucketOf(undefined, "veth-1")?.options.rate).toBe(1e6);
      expect(bucketOf(slot.netnsPath, "vpeer")).toBeUndefined();
    }
    await using service = await startService([{ index: 1 }]);
    await using _slot = await service.adopt(1);
    expect(bucketOf(undefined, "veth-1")).toBeUndefined();
  });
});

describe("earlier and other processes", () => {
  test("what a killed process left is removed, but for the slots to keep, which work on", async () => {
    expect(await killed(OPTIONS, 3)).toEqual([1, 2, 3]);
    expect(ourDevices()).toHaveLength(3);
    writeFileSync(join(netnsDir, "agentenv-ns-01936f8e-72f5-7000-8000-000000000001"), "");
    await using service = await startService([{ index: 2 }]);
    expect(ourDevices()).toEqual(["veth-2"]);
    expect(readdirSync(netnsDir)).toHaveLength(2);
    expect((await failure(service.adopt(1))).code).toBe("network_slot_gone");
    await using slot = await service.adopt(2);
    expect((await failure(service.adopt(2))).message).toContain("in use");
    await using fresh = await service.acquire();
    expect(fresh.index).toBe(1);
    await using guest = await attachGuest(root, slot);
    await using _server = await startServer(guest.netns, "80");
    expect(connect(undefined, slot.hostAddress, 80)).toBe("10.12.0.4");
    expect(connect(guest.netns, INTERNET, 80)).toBe(HOST_WAN);
  });

  test("a kept slot whose device is gone cannot be adopted, and says so", async () => {
    await killed(OPTIONS, 1);
    run("ip", "link", "del", "veth-1");
    {
      await using service = await startService([{ index: 1 }]);
      expect((await failure(service.adopt(1))).message).toContain("device");
      expect((await failure(service.adopt(7))).message).toContain("not there");
    }
    await using _service = await startService([]);
    expect(readdirSync(netnsDir)).toEqual([]);
  });

  test("pools of a living server are refused, its pid told; other pools work beside it", async () => {
    const { child } = await otherProcess(OPTIONS, 1);
    try {
      const error = await failure(startService());
      expect(error.code).toBe("network_pool_in_use");
      expect(error.message).toContain(`pid ${child.pid}`);
      await using beside = await startService([], {
        ...OPTIONS,
        hostInteractionCidr: "10.21.0.0/16",
        vethCidr: "10.22.0.0/16",
      });
      await using slot = await beside.acquire();
      expect(slot.index).toBe(2);
      expect(ourTables()).toHaveLength(2);
      expect(ourDevices().sort()).toEqual(["veth-1", "veth-2"]);
    } finally {
      child.kill("SIGKILL");
      await child.exited;
    }
    // Slots of pools that are configured no more go, too, with their table.
    await using _changed = await startService([], {
      ...OPTIONS,
      hostInteractionCidr: "10.31.0.0/16",
      vethCidr: "10.32.0.0/16",
    });
    expect(ourDevices()).toEqual([]);
    expect(ourTables()).toEqual(["table inet agentenv-10.31.0.0"]);
  });

  test("rules stay while a slot is in use", async () => {
    const service = await startService();
    const slot = await service.acquire();
    await service[Symbol.asyncDispose]();
    expect(ourTables()).toHaveLength(1);
    expect((await failure(service.acquire())).code).toBe("network_not_running");
    await slot[Symbol.asyncDispose]();
    await using _next = await startService();
  });
});

test("a slot whose rates cannot be set is taken over nevertheless, and that is told with the cause", async () => {
  await killed(OPTIONS, 1);
  const netns = join(netnsDir, readlinkSync(join(netnsDir, "slot-10.11.0.0-1")));
  inside(netns, "ip", "link", "set", "vpeer", "down");
  inside(netns, "ip", "link", "set", "vpeer", "name", "other");
  const lines: string[] = [];
  await using service = createNetworkService(
    OPTIONS,
    pino({ level: "error" }, { write: (line) => void lines.push(line) }),
  );
  await service.start([{ index: 1 }]);
  await using slot = await service.adopt(1);
  expect(slot.index).toBe(1);
  expect(lines).toHaveLength(1);
  expect(lines[0]).toContain("the rates of a network slot that was taken over could not be set");
  expect(lines[0]).toContain("find the device to limit: ENODEV");
});

test("a tap that is gone is not made by giving it an owner", async () => {
  await using service = await startService();
  await using slot = await service.acquire();
  inside(slot.netnsPath, "ip", "link", "delete", "tap0");
  expect((await failure(netTapOwner(slot.netnsPath, 0))).code).toBe("os_enodev");
  expect(inside(slot.netnsPath, "ip", "-brief", "link")).not.toContain("tap0");
});

/** A library whose answers to requests for queueing disciplines are those of a kernel without (CONFIG_NET_SCHED). */
function kernelWithoutQueues(): string {
  const library = join(root, "no-queues.so");
  const source = `
    #define _GNU_SOURCE
    #include <errno.h>
    #include <linux/rtnetlink.h>
    #include <stddef.h>
    #include <sys/socket.h>
    ssize_t recv(int fd, void *buffer, size_t bytes, int flags) {
      ssize_t got = recvfrom(fd, buffer, bytes, flags, NULL, NULL);
      int family = 0;
      socklen_t size = sizeof family;
      if (got < (ssize_t)NLMSG_LENGTH(sizeof(struct nlmsgerr)) ||
          getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) < 0 || family != AF_NETLINK) return got;
      struct nlmsghdr *header = buffer;
      struct nlmsgerr *answer = NLMSG_DATA(header);
      if (header->nlmsg_type == NLMSG_ERROR &&
          (answer->msg.nlmsg_type == RTM_NEWQDISC || answer->msg.nlmsg_type == RTM_DELQDISC))
        answer->error = -EOPNOTSUPP;
      return got;
    }`;
  const made = Bun.spawnSync(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library], {
    stdin: Buffer.from(source),
  });
  if (made.exitCode !== 0) throw new Error(made.stderr.toString());
  return library;
}

describe("a host that lacks something", () => {
  function startUnder(argv: string[], env: Record<string, string> = {}): string {
    const program = `
      import { createNetworkService } from ${JSON.stringify(join(import.meta.dir, "index.ts"))};
      import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../lib/log.ts"))};
      const options = { ...${JSON.stringify(OPTIONS)}, rates: JSON.parse(process.env.RATES ?? "null") ?? undefined };
      const service = createNetworkService(options, createLogger("x"));
      try {
        await service.start([]);
        await (await service.acquire())[Symbol.asyncDispose]();
        await service[Symbol.asyncDispose]();
        console.log("started");
      }
      catch (error) { console.log(error.code, error.message, "CURE", error.remediation); }
      process.exit(0);
    `;
    const script = join(root, "lacking.ts");
    writeFileSync(script, program);
    return Bun.spawnSync([...argv, process.execPath, script], {
      env: { ...process.env, ...env },
    }).stdout.toString();
  }

  test("no capability, no tool, no tun device, no token buckets: the error has the cure", () => {
    expect(startUnder(["setpriv", "--bounding-set=-net_admin"])).toMatch(
      /^network_not_permitted .*CAP_NET_ADMIN.* CURE .*root/,
    );
    expect(startUnder([], { PATH: "/nonexistent" })).toMatch(/^network_tool_missing nft.* CURE .*nftables/);
    const crashing = join(root, "crashing");
    mkdirSync(crashing);
    writeFileSync(join(crashing, "nft"), "#!/bin/sh\nkill -SEGV $$\n", { mode: 0o755 });
    expect(startUnder([], { PATH: `${crashing}:${process.env.PATH}` })).toMatch(
      /^network_tool_crashed .* CURE tables that a newer nft made/,
    );
    const hideTun = ["sh", "-c", 'mount -t tmpfs none /dev/net && exec "$@"', "sh"];
    expect(startUnder(["unshare", "--mount", ...hideTun])).toMatch(
      /^network_tun_missing .* CURE .*modprobe tun/,
    );
    const env = (rate: number) => {
      const rates = { receiveBytesPerSec: rate, receiveBurstBytes: 0, sendBytesPerSec: 0, sendBurstBytes: 0 };
      return { RATES: JSON.stringify(rates) };
    };
    const LD_PRELOAD = kernelWithoutQueues();
    expect(startUnder([], { ...env(1e6), LD_PRELOAD })).toMatch(
      /^network_rates_unsupported .*EOPNOTSUPP.* CURE .*sch_tbf/,
    );
    // Without a rate nothing of it is needed, ...
    expect(startUnder([], { ...env(0), LD_PRELOAD })).toEndWith("started\n");
    // ... and the program tc never.
    const hideTc = ["sh", "-c", 'mount --bind /bin/false "$(command -v tc)" && exec "$@"', "sh"];
    if (rated) expect(startUnder(["unshare", "--mount", ...hideTc], env(1e6))).toEndWith("started\n");
  });
});
