import { expect, test } from "bun:test";
import { parseCidr } from "../lib/ipv4.ts";
import { foreignRoutes, foreignRules } from "./host-check.ts";

const pools = [parseCidr("10.11.0.0/16")!, parseCidr("10.12.0.0/16")!];

test("routes into the pools, but for our own", () => {
  const listing = `default via 203.0.113.2 dev wan0
10.11.0.7 via 10.12.0.15 dev veth-7
10.12.0.14/31 dev veth-7 proto kernel scope link src 10.12.0.14
local 10.12.0.14 dev veth-7 table local proto kernel scope host src 10.12.0.14
local 10.11.0.0 dev lo table local scope host
10.11.0.0/24 dev eth1 proto kernel scope link src 10.11.0.9
local 10.11.0.9 dev eth1 table local proto kernel scope host
10.0.0.0/8 via 192.0.2.1 dev eth2
192.168.1.0/24 dev wan0 proto kernel scope link src 192.168.1.5
10.99.0.0/16 via 10.11.0.1 dev eth3
unreachable 10.12.128.0/17`;
  expect(foreignRoutes(listing, pools, "10.11.0.0").map((line) => line.split(" dev")[0])).toEqual([
    "10.11.0.0/24",
    "local 10.11.0.9",
    "10.0.0.0/8 via 192.0.2.1",
    "unreachable 10.12.128.0/17",
  ]);
});

test("rules that name the pools, but for our own tables and rules for our devices", () => {
  const listing = `table inet agentenv-10.11.0.0 {
	chain a {
		ip saddr 10.11.0.7 drop
	}
}
table ip filter {
	chain FORWARD {
		type filter hook forward priority filter; policy drop;
		iifname "veth-*" ip saddr 10.11.0.0/16  counter packets 0 bytes 0 accept
		ip saddr 10.0.0.0/8 drop
		ip saddr 0.0.0.0/0 accept
		ip daddr 172.17.0.2 accept
	}
}`;
  expect(foreignRules(listing, pools)).toEqual(["table ip filter: ip saddr 10.0.0.0/8 drop"]);
});
