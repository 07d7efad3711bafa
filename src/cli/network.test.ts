import { afterAll, beforeAll, expect, test } from "bun:test";
import { CliRig } from "../../tests/support/cli-rig.ts";
import { fakeReport } from "../../tests/support/fake-network.ts";
import { parseEgressPolicy } from "../network/index.ts";

let rig: CliRig;
beforeAll(async () => {
  rig = await CliRig.start();
  rig.login();
});
afterAll(() => rig[Symbol.asyncDispose]());

test("aenv network show: rules in their order with counters, and why something was refused", async () => {
  const id = rig.sandbox();
  rig.networkReport = {
    ...fakeReport(
      parseEgressPolicy({ allowOut: ["192.0.2.0/24", "*.good.example"], denyOut: ["0.0.0.0/0"] }),
    ),
    restricted: true,
    filtered: true,
    rules: [{ rule: "allow 192.0.2.0/24", packets: 12, bytes: 720 }],
    refused: { packets: 3, bytes: 180 },
    byName: {
      connections: { relayed: 4, refused: 1 },
      names: { answered: 5, refused: 2, failed: 0 },
      recent: [
        { atMs: Date.parse("2026-01-02T03:04:05Z"), what: "198.51.100.66:443: evil\x1b[31m is not allowed" },
      ],
    },
  };
  const table = await rig.aenv(["network", "show", id, "--output", "table"]);
  expect(table.err).toBe("");
  expect(table.out).toBe(`SLOT             7 (10.11.0.7, veth-7)
NAMESPACE        /run/none
INTERNET ACCESS  node default (allowed)
DNS              by the node, allowed names only
HTTP AND TLS     by name, through the egress proxy
BY NAME          4 connections let through, 1 refused, 0 open
NAMES ASKED      5 answered, 2 refused, 0 without an answer

RULE                      PACKETS  BYTES
deny 10.11.0.0/16 (node)  -        -
allow 192.0.2.0/24        12       720
allow *.good.example      -        -
deny 0.0.0.0/0            -        -
deny everything else      -        -
refused in all            3        180

REFUSED AT            WHAT
2026-01-02 03:04:05Z  198.51.100.66:443: evil is not allowed
`);
  const json = await rig.aenv(["network", "show", id]);
  expect(JSON.parse(json.out)).toMatchObject({
    slot: { index: 7 },
    refused: { packets: 3 },
    names: { refused: 2 },
  });
}, 120_000);

test("a paused or unknown sandbox has no network to show", async () => {
  const paused = await rig.aenv(["network", "show", rig.sandbox({ state: "paused" })]);
  expect(paused.code).toBe(1);
  expect(paused.err).toContain("paused");
  expect((await rig.aenv(["network", "show", "nobody"])).code).toBe(1);
  expect((await rig.aenv(["network"])).code).toBe(2);
}, 120_000);
