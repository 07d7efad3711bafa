import { describe, expect, test } from "bun:test";
import { cidrContains, cidrsOverlap, formatCidr, formatIpv4, parseCidr, parseIpv4 } from "../lib/ipv4.ts";
import { createAddressPlan, formatMac, GUEST_MAC_LOW } from "./address-plan.ts";
import { firstUsableNameServer, lacksCapabilities } from "./host.ts";
import { GUEST_LIMITS, hostRuleset } from "./ruleset.ts";

const plan = createAddressPlan("10.11.0.0/16", "10.12.0.0/16");

describe("address plan", () => {
  test("slot i has one address of the interaction pool and two neighbours of the veth pool", () => {
    const shown = (index: number) => {
      const slot = plan.slot(index);
      return [slot.hostDevice, ...[slot.hostAddress, slot.hostVeth, slot.peerVeth].map(formatIpv4)];
    };
    expect(shown(1)).toEqual(["veth-1", "10.11.0.1", "10.12.0.2", "10.12.0.3"]);
    expect(shown(300)).toEqual(["veth-300", "10.11.1.44", "10.12.2.88", "10.12.2.89"]);
    expect(shown(32767)).toEqual(["veth-32767", "10.11.127.255", "10.12.255.254", "10.12.255.255"]);
  });

  test("refuses indices and pools that do not fit", () => {
    for (const index of [0, 32768, -1, 1.5, Number.NaN]) expect(() => plan.slot(index)).toThrow(RangeError);
    expect(() => createAddressPlan("10.11.0.0/18", "10.12.0.0/16")).toThrow("32768");
    expect(() => createAddressPlan("10.11.0.0/16", "10.12.0.0/17")).toThrow("65536");
    expect(() => createAddressPlan("10.11.0.0/16", "10.11.0.0/16")).toThrow("overlap");
    expect(() => createAddressPlan("169.254.0.0/16", "10.12.0.0/16")).toThrow("overlap");
    expect(() => createAddressPlan("10.11.0.0", "10.12.0.0/16")).toThrow("10.11.0.0");
  });

  test("pools that start elsewhere have other groups and tables", () => {
    const other = createAddressPlan("10.13.0.0/16", "10.14.0.0/16");
    expect(other.deviceGroup).not.toBe(plan.deviceGroup);
    expect(other.tableName).toBe("agentenv-10.13.0.0");
  });

  test("the guest's MAC address is fixed", () => {
    expect(formatMac(GUEST_MAC_LOW)).toBe("02:fc:a9:fe:00:15");
  });
});

test("IPv4 text", () => {
  expect(formatIpv4(parseIpv4("255.0.128.1")!)).toBe("255.0.128.1");
  for (const bad of ["", "1.2.3", "1.2.3.4.5", "1.2.3.256", "01.2.3.4", "1.2.3.-4", "1.2.3.4 ", "a.b.c.d"]) {
    expect(parseIpv4(bad)).toBeUndefined();
  }
  expect(formatCidr(parseCidr("10.1.2.3/8")!)).toBe("10.0.0.0/8");
  expect(formatCidr(parseCidr("0.0.0.0/0")!)).toBe("0.0.0.0/0");
  for (const bad of ["10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/8/8", "::/0", "10.0.0.0/08"]) {
    expect(parseCidr(bad)).toBeUndefined();
  }
  const [wide, inner, next] = ["10.0.0.0/8", "10.255.255.255/32", "11.0.0.0/8"].map(
    (text) => parseCidr(text)!,
  );
  expect([cidrsOverlap(wide!, inner!), cidrsOverlap(wide!, next!)]).toEqual([true, false]);
  expect([cidrContains(next!, parseIpv4("11.1.1.1")!), cidrContains(next!, parseIpv4("12.0.0.0")!)]).toEqual([
    true,
    false,
  ]);
});

test("name server: the first IPv4 one that is reachable from outside the host", () => {
  expect(firstUsableNameServer("nameserver 127.0.0.53\nnameserver ::1\n  nameserver 10.0.0.2 # x\n")).toBe(
    "10.0.0.2",
  );
  expect(firstUsableNameServer("#nameserver 1.1.1.1\nsearch x\nnameserver 127.0.0.1\n")).toBeUndefined();
});

test("capabilities from /proc/self/status", () => {
  expect(lacksCapabilities("CapEff:\t000001ffffffffff\n")).toEqual([]);
  expect(lacksCapabilities("CapEff:\t0000000000001000\n")).toEqual(["CAP_SYS_ADMIN"]);
  expect(lacksCapabilities("")).toEqual(["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]);
});

test("the host's rules do not grow with the number of slots and touch only our device group", () => {
  const rules = hostRuleset({
    plan,
    alwaysDeniedCidrs: ["192.168.0.0/16"],
    dnsServer: "9.9.9.9",
    proxyPort: 1,
    namePort: 2,
    limits: GUEST_LIMITS,
  });
  expect(rules).toContain("192.168.0.0/16");
  expect(rules).toContain(`ct count over ${GUEST_LIMITS.connections} }`);
  for (const line of rules
    .split("\n")
    .filter((text) => /drop$|masquerade$|goto guest_(out|in|to_host)$|goto divert_restricted$/.test(text))) {
    // Limits are in chains that only what comes from our devices gets to.
    const inner = line.trim() === "drop" || /update @(names|webs) /.test(line);
    expect(inner || line.includes(String(plan.deviceGroup))).toBe(true);
  }
});
