import { expect, test } from "bun:test";
import { tryCommand } from "../lib/command.ts";
import { compareDebianVersions, upstreamVersion } from "./debian-version.ts";

const VERSIONS = [
  "1:10.0.2+ds-2+deb13u1~bpo12+1",
  "1:10.0.2+ds-2+deb13u1",
  "1:7.2+dfsg-7+deb12u18",
  "6.12.95-1~bpo12+1",
  "6.12.9-1",
  "6.12.95-1",
  "1.0~rc1-1",
  "1.0-1",
  "1.0",
  "1.0a-1",
  "1.0+b1-1",
  "001.0-1",
  "0:1.0-1",
];

test("versions are ordered as dpkg orders them", async () => {
  let compared = 0;
  for (const a of VERSIONS) {
    for (const b of VERSIONS) {
      const operator = ["lt", "eq", "gt"][Math.sign(compareDebianVersions(a, b)) + 1]!;
      const { exitCode } = await tryCommand(["dpkg", "--compare-versions", a, operator, b]);
      expect(`${a} ${operator} ${b}: ${exitCode}`).toBe(`${a} ${operator} ${b}: 0`);
      compared++;
    }
  }
  expect(compared).toBe(VERSIONS.length ** 2);
});

test("the upstream part has neither epoch nor revision", () => {
  expect(upstreamVersion("1:10.0.2+ds-2+deb13u1~bpo12+1")).toBe("10.0.2+ds");
  expect(upstreamVersion("10")).toBe("10");
  expect(compareDebianVersions(upstreamVersion("1:9.2.4+ds-1"), "10")).toBeLessThan(0);
});
