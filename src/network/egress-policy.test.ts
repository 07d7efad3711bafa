import { describe, expect, test } from "bun:test";
import { AenvError } from "../lib/errors.ts";
import { parseIpv4 } from "../lib/ipv4.ts";
import {
  compilePolicy,
  DEFAULT_POLICY,
  type EgressInput,
  inRanges,
  MAX_POLICY_ENTRIES,
  mergeRanges,
  parseEgressPolicy,
} from "./egress-policy.ts";

const ALL = "0.0.0.0/0";

function refusal(input: EgressInput): AenvError {
  try {
    parseEgressPolicy(input);
  } catch (error) {
    if (error instanceof AenvError) return error;
    throw error;
  }
  throw new Error("it was accepted");
}

describe("parsing", () => {
  test("nothing given is the node's default; internet access picks the base", () => {
    expect(parseEgressPolicy({})).toEqual(DEFAULT_POLICY);
    expect(parseEgressPolicy({ allowOut: null, denyOut: null, allowInternetAccess: null })).toEqual(
      DEFAULT_POLICY,
    );
    expect(parseEgressPolicy({ allowInternetAccess: true }).base).toBe("allow");
    expect(parseEgressPolicy({ allowInternetAccess: false }).base).toBe("deny");
  });

  test("normal form: prefix lengths, cleared bits, lower case, no duplicates", () => {
    const given = [
      "192.0.2.7",
      "192.0.2.7/32",
      "198.51.100.99/24",
      "Example.COM",
      "example.com.",
      "*.Example.com",
    ];
    expect(parseEgressPolicy({ allowOut: given, denyOut: ["1.2.3.4/0", ALL] })).toEqual({
      base: "default",
      allowOut: ["192.0.2.7/32", "198.51.100.0/24", "example.com", "*.example.com"],
      denyOut: [ALL],
    });
  });

  test("IPv6 is parsed; IPv4 inside it is IPv4", () => {
    const given = [
      "2001:DB8::1",
      "2001:db8:0:0:0:0:0:1/128",
      "2001:db8:ffff:ffff::/36",
      "::/0",
      "::ffff:192.0.2.7",
      "::ffff:c000:200/120",
      "1:0:0:2:0:0:0:3",
      "fe80::",
    ];
    expect(parseEgressPolicy({ denyOut: given }).denyOut).toEqual([
      "2001:db8::1/128",
      "2001:db8:f000::/36",
      "::/0",
      "192.0.2.7/32",
      "192.0.2.0/24",
      "1:0:0:2::3/128",
      "fe80::/128",
    ]);
  });

  test("parsing what parsing gave changes nothing", () => {
    const once = parseEgressPolicy({
      allowOut: ["a.example", "1.2.3.4", "2001:db8::/32"],
      denyOut: [ALL, "::/0"],
    });
    expect(parseEgressPolicy(once)).toEqual(once);
  });

  test.each([
    ...[
      "",
      " ",
      "*",
      "*.",
      "*.*.example.com",
      "a*.example.com",
      "foo.*",
      "ex ample.com",
      "-a.example",
      "a-.example",
    ],
    ...[
      "http://example.com",
      "example.com/path",
      "example.com:443",
      "example..com",
      ".example.com",
      "bücher.example",
    ],
    ...[
      "1.2.3",
      "1.2.3.4.5",
      "256.1.1.1",
      "01.2.3.4",
      "1.2.3.4/33",
      "1.2.3.4/",
      "1.2.3.4/08",
      "1.2.3.4/24/8",
    ],
    ...[
      "1.2.3.4-1.2.3.9",
      "1.2.3.4:80",
      ":",
      ":::",
      "2001:db8::/129",
      "2001:db8::1::2",
      "fe80::1%eth0",
      "a.123",
    ],
    ...[
      "tcp:443",
      "under_score.example",
      `${"a".repeat(64)}.example`,
      `${"a.".repeat(130)}example`,
      " 1.2.3.4",
      "1.2.3.4\n",
    ],
  ])("%p is refused in both lists, with field, value and cure", (entry) => {
    for (const field of ["allowOut", "denyOut"] as const) {
      const error = refusal({ denyOut: [ALL], [field]: ["192.0.2.1", entry] });
      expect([error.status, error.code]).toEqual([400, "invalid_egress_policy"]);
      expect(error.message).toContain(`network.${field}`);
      expect(error.message).toContain(`"${entry.slice(0, 300)}"`);
      expect(error.remediation).toContain("192.0.2");
    }
  });

  test("domains: not in denyOut, and in allowOut only with everything denied", () => {
    expect(refusal({ denyOut: ["example.com"] }).message).toContain("cannot be denied");
    for (const denyOut of [[], ["10.0.0.0/8"], ["::/0"], ["0.0.0.0/1", "128.0.0.0/1"]]) {
      const error = refusal({ allowOut: ["1.2.3.4", "example.com"], denyOut, allowInternetAccess: false });
      expect(error.message).toContain('"example.com"');
      expect(error.remediation).toContain(ALL);
    }
  });

  test("no more entries than the limit", () => {
    const many = Array.from({ length: MAX_POLICY_ENTRIES }, (_, i) => `10.${i >> 8}.${i & 255}.1`);
    expect(parseEgressPolicy({ denyOut: many }).denyOut).toHaveLength(MAX_POLICY_ENTRIES);
    expect(refusal({ denyOut: [...many, "1.1.1.1"] }).message).toContain("1001 entries");
  });
});

describe("the enforced form", () => {
  const address = (text: string) => parseIpv4(text)!;
  const shown = (cidrs: string[]) => mergeRanges(cidrs).map(({ first, last }) => [first, last]);

  test("blocks are joined and sorted, up to the last address", () => {
    expect(shown([])).toEqual([]);
    expect(shown(["10.0.1.0/24", "10.0.0.0/24", "10.0.0.128/25"])).toEqual([
      [address("10.0.0.0"), address("10.0.1.255")],
    ]);
    expect(shown(["255.255.255.255/32", "240.0.0.0/4", "1.0.0.0/8"])).toEqual([
      [address("1.0.0.0"), address("1.255.255.255")],
      [address("240.0.0.0"), 0xffffffff],
    ]);
    expect(shown(["0.0.0.0/1", "128.0.0.0/1"])).toEqual([[0, 0xffffffff]]);
    expect(inRanges(mergeRanges(["240.0.0.0/4"]), 0xffffffff)).toBe(true);
    expect(inRanges(mergeRanges(["10.0.0.0/8"]), address("11.0.0.0"))).toBe(false);
  });

  test("restricted when nothing is left that is not named", () => {
    const restricted = (input: EgressInput) => compilePolicy(parseEgressPolicy(input)).restricted;
    expect(restricted({})).toBe(false);
    expect(restricted({ denyOut: ["10.0.0.0/8", "::/0"] })).toBe(false);
    expect(restricted({ denyOut: ["0.0.0.0/1"] })).toBe(false);
    expect(restricted({ denyOut: ["0.0.0.0/1", "128.0.0.0/1"] })).toBe(true);
    expect(restricted({ denyOut: [ALL] })).toBe(true);
    expect(restricted({ allowInternetAccess: false })).toBe(true);
    expect(restricted({ allowInternetAccess: true, denyOut: [ALL] })).toBe(true);
    expect(restricted({ allowOut: [ALL], denyOut: [ALL] })).toBe(false);
    expect(restricted({ allowOut: [ALL], allowInternetAccess: false })).toBe(false);
  });

  test("names: exact, and below a wildcard at any depth but not itself", () => {
    const policy = compilePolicy(
      parseEgressPolicy({ allowOut: ["api.example.com", "*.wild.example", "1.2.3.4"], denyOut: [ALL] }),
    );
    expect(policy.filtered).toBe(true);
    for (const name of ["api.example.com", "a.wild.example", "a.b.wild.example"]) {
      expect([name, policy.allowsName(name)]).toEqual([name, true]);
    }
    for (const name of [
      "example.com",
      "b.api.example.com",
      "wild.example",
      "notwild.example",
      "wild.example.com",
      "",
      "1.2.3.4",
      "1.2.3.4/32",
    ]) {
      expect([name, policy.allowsName(name)]).toEqual([name, false]);
    }
  });

  test("a stored policy that is not in order is an error, not a rule less", () => {
    const stored = (denyOut: string[]) => () => compilePolicy({ base: "default", allowOut: [], denyOut });
    expect(stored(["evil.example"])).toThrow("evil.example");
    expect(stored(["1.2.3.4/40"])).toThrow("1.2.3.4/40");
    expect(stored(["1.2.3.4"])().deny).toMatchObject([{ base: address("1.2.3.4"), prefixLength: 32 }]);
  });
});
