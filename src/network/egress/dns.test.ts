import { describe, expect, test } from "bun:test";
import { dnsQuery, readDnsAnswer } from "../../../tests/support/dns-query.ts";
import { formatIpv4, parseIpv4 } from "../../lib/ipv4.ts";
import { DnsCode, MAX_UDP_ANSWERS, readQuery, writeAnswer } from "./dns-message.ts";
import { Names } from "./names.ts";

const ip = (text: string) => parseIpv4(text)!;

describe("messages", () => {
  test("a query is read, its answer repeats id and question", () => {
    const query = readQuery(dnsQuery("A.Example", 1, 0xbeef))!;
    expect(query).toMatchObject({ id: 0xbeef, name: "a.example", type: 1, class: 1, recursionDesired: true });
    const answer = writeAnswer(query, DnsCode.ok, [ip("192.0.2.1"), ip("203.0.113.9")], 7);
    expect(readDnsAnswer(answer)).toEqual({ code: 0, addresses: ["192.0.2.1", "203.0.113.9"] });
    expect(answer.subarray(0, 2).toString("hex")).toBe("beef");
    expect(answer.includes(Buffer.from("\x01A\x07Example"))).toBe(true);
    expect(readDnsAnswer(writeAnswer(query, DnsCode.refused))).toEqual({ code: 5, addresses: [] });
  });

  test("the longest answer by UDP fits 512 bytes", () => {
    const label = "a".repeat(63);
    const query = readQuery(dnsQuery([label, label, label, "a".repeat(61)].join(".")))!;
    expect(writeAnswer(query, DnsCode.ok, Array(MAX_UDP_ANSWERS).fill(1)).length).toBeLessThanOrEqual(512);
  });

  test("anything else is no query: cut, compressed, several questions, answers", () => {
    const good = dnsQuery("a.example");
    for (let length = 0; length < good.length; length++)
      expect(readQuery(good.subarray(0, length))).toBeUndefined();
    const changed = (at: number, value: number) => {
      const bytes = Buffer.from(good);
      bytes[at] = value;
      return readQuery(bytes);
    };
    expect(changed(12, 0xc0)).toBeUndefined();
    expect(changed(5, 2)).toBeUndefined();
    expect(changed(5, 0)).toBeUndefined();
    expect(changed(2, 0x81)).toBeUndefined();
    expect(changed(2, 0x28)).toBeUndefined();
    expect(readQuery(dnsQuery(Array(130).fill("aa").join(".")))).toBeUndefined();
  });
});

/** A name server on the loopback that answers what `zone` says: addresses, or a response code. */
async function startServer(zone: Record<string, string[] | number>, ttl = 60) {
  const asked: string[] = [];
  const socket = await Bun.udpSocket({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      data(self, bytes, port, address) {
        const query = readQuery(bytes)!;
        asked.push(query.name);
        const found = zone[query.name] ?? 3;
        if (found === -1) return;
        const reply =
          typeof found === "number"
            ? writeAnswer(query, found as DnsCode)
            : writeAnswer(query, DnsCode.ok, found.map(ip), ttl);
        self.send(reply, port, address);
      },
    },
  });
  return { server: `127.0.0.1:${socket.port}`, asked, zone, [Symbol.dispose]: () => socket.close() };
}

describe("names", () => {
  const isDenied = (address: number) => formatIpv4(address).startsWith("10.");

  test("answers are kept while they last; many questions at once are one", async () => {
    using dns = await startServer({ "a.example": ["192.0.2.1", "10.0.0.1", "192.0.2.2", "192.0.2.1"] });
    const names = new Names({ server: dns.server, isDenied });
    const all = await Promise.all(Array.from({ length: 20 }, () => names.resolve("a.example", 1)));
    for (const { addresses, ttlSeconds } of all) {
      expect([...addresses].sort()).toEqual([ip("192.0.2.1"), ip("192.0.2.2")]);
      expect(ttlSeconds).toBeLessThanOrEqual(60);
    }
    await names.resolve("a.example", 1);
    expect(dns.asked).toEqual(["a.example"]);
  });

  test("no such name and no address are answers; a failure is not", async () => {
    using dns = await startServer({ "empty.example": [], "fail.example": 2 });
    const names = new Names({ server: dns.server, isDenied });
    expect((await names.resolve("none.example", 1)).addresses).toEqual([]);
    expect((await names.resolve("empty.example", 1)).addresses).toEqual([]);
    await expect(names.resolve("fail.example", 1)).rejects.toThrow();
    expect(await names.owns("none.example", ip("192.0.2.1"), 1)).toBe(false);
  });

  test("an address is the name's own after the name has moved on, and others' are not", async () => {
    using dns = await startServer({ "a.example": ["192.0.2.1"] }, 1);
    const names = new Names({ server: dns.server, isDenied });
    await names.resolve("a.example", 1);
    dns.zone["a.example"] = ["192.0.2.2"];
    await Bun.sleep(1050);
    expect((await names.resolve("a.example", 1)).addresses).toEqual([ip("192.0.2.2")]);
    expect(await names.owns("a.example", ip("192.0.2.1"), 1)).toBe(true);
    expect(await names.owns("a.example", ip("192.0.2.2"), 1)).toBe(true);
    expect(await names.owns("a.example", ip("192.0.2.3"), 1)).toBe(false);
    expect(await names.owns("b.example", ip("192.0.2.1"), 1)).toBe(false);
  });

  test("a guest whose questions are not answered keeps nobody else from asking", async () => {
    const zone: Record<string, string[] | number> = { "a.example": ["192.0.2.1"] };
    for (let i = 0; i < 65; i++) zone[`silent${i}.example`] = -1;
    using dns = await startServer(zone);
    const names = new Names({ server: dns.server, isDenied });
    const stuck = Array.from({ length: 65 }, (_, i) => names.resolve(`silent${i}.example`, 1));
    await expect(stuck[64]).rejects.toThrow("64 names are being looked up already");
    expect((await names.resolve("a.example", 2)).addresses).toEqual([ip("192.0.2.1")]);
    // They are asked again after two seconds, and have their place back then.
    for (let i = 0; i < 65; i++) zone[`silent${i}.example`] = ["192.0.2.2"];
    await Promise.all(stuck.slice(0, 64));
    expect((await names.resolve("silent64.example", 1)).addresses).toEqual([ip("192.0.2.2")]);
  }, 120_000);

  test("the table is bounded", async () => {
    const zone: Record<string, string[]> = {};
    for (let i = 0; i < 10_050; i++) zone[`n${i}.example`] = ["192.0.2.1"];
    using dns = await startServer(zone);
    const names = new Names({ server: dns.server, isDenied });
    for (let i = 0; i < 10_050; i += 50) {
      await Promise.all(Array.from({ length: 50 }, (_, k) => names.resolve(`n${i + k}.example`, k % 2)));
    }
    expect(names.size).toBe(10_000);
  }, 120_000);
});
