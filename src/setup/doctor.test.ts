import { afterEach, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tryCommand } from "../lib/command.ts";
import { createAddressPlan } from "../network/address-plan.ts";
import { lockPool } from "../network/pool-lock.ts";
import { type Check, cgroupCheck, chosenSettings, examine, formatChecks, portOwner } from "./doctor.ts";
import { makeVmlinux } from "./testing.ts";

setDefaultTimeout(60_000);

const MAIN = join(import.meta.dir, "..", "main.ts");
let dir = "";

beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), "setup-doctor-"));
});
afterEach(() => rm(dir, { recursive: true, force: true }));

function look(more: Partial<Parameters<typeof examine>[0]> = {}): Promise<Check[]> {
  return examine({
    home: join(dir, "home"),
    runtimePath: join(dir, "run"),
    depsDir: join(dir, "home", "deps"),
    kernelImagePath: undefined,
    qemuBinaryPath: join(dir, "no-qemu"),
    apiAddress: "127.0.0.1:1",
    vmm: "qemu",
    mode: "auto",
    diskExport: "auto",
    pools: ["10.11.0.0", "10.12.0.0"],
    networkRates: false,
    ...more,
  });
}

const hostHasUblk = existsSync("/dev/ublk-control");
if (hostHasUblk) console.log("skipped: a test of hosts without ublk, this one has it");
test.skipIf(hostHasUblk)("disks over ublk alone are refused with the cure, auto falls back", async () => {
  const [forced, auto] = await Promise.all([look({ diskExport: "ublk" }), look()]);
  expect(find(forced, "disk export")).toMatchObject({
    status: "missing",
    cure: expect.stringContaining("modprobe ublk_drv"),
  });
  expect(find(auto, "disk export")).toMatchObject({
    status: "ok",
    detail: expect.stringContaining(
      "NBD over unix sockets (ublk cannot be used: there is no /dev/ublk-control)",
    ),
  });
});

test("network rates are asked about where they are set", async () => {
  expect(find(await look(), "network rates")).toBeUndefined();
  const asked = find(await look({ networkRates: true }), "network rates");
  expect(`${asked?.status} ${asked?.detail} ${asked?.cure}`).toMatch(/^ok |^missing .*sch_tbf/);
});

const find = (checks: readonly Check[], name: string) => checks.find((check) => check.name === name);

async function doctor(args: string[], env: Record<string, string> = {}) {
  return tryCommand([process.execPath, MAIN, "doctor", "--home", join(dir, "home"), ...args], {
    env: { ...(process.env as Record<string, string>), API_ADDR: "127.0.0.1:1", ...env },
  });
}

test("nothing set up: says what is missing and the cure, exits 1, makes nothing", async () => {
  const { exitCode, stdout } = await doctor(["--qemu-binary", join(dir, "no-qemu")]);
  expect(exitCode).toBe(1);
  const deps = join(dir, "home", "deps");
  expect(stdout).toMatch(
    new RegExp(
      `^missing +guest kernel +there is no guest kernel under ${deps}  → run: agentenv setup --deps ${deps}`,
      "m",
    ),
  );
  expect(stdout).toMatch(/^missing +QEMU +.*no-qemu does not exist {2}→ set \[qemu\]\.binary_path/m);
  expect(stdout).toMatch(/^ok +system +\S/m);
  expect(existsSync(join(dir, "home"))).toBe(false);
});

test("--json gives the same as data", async () => {
  const { exitCode, stdout } = await doctor(["--json", "--qemu-binary", join(dir, "no-qemu")]);
  expect(exitCode).toBe(1);
  const { checks } = JSON.parse(stdout) as { checks: Check[] };
  expect(find(checks, "guest kernel")).toMatchObject({
    status: "missing",
    cure: expect.stringContaining("agentenv setup"),
  });
  for (const check of checks) expect(["ok", "warn", "missing"]).toContain(check.status);
});

test("wrong usage exits 2, an invalid configuration is told", async () => {
  expect((await doctor(["--bogus"])).exitCode).toBe(2);
  const { exitCode, stdout } = await doctor([], { API_ADDR: "nonsense" });
  expect(exitCode).toBe(1);
  expect(stdout).toStartWith("missing configuration");
});

test("a kernel image is looked at, not unpacked", async () => {
  const kernelImagePath = join(dir, "vmlinux");
  await writeFile(kernelImagePath, makeVmlinux("6.1.2-own"));
  const checks = await look({ kernelImagePath });
  expect(find(checks, "guest kernel")).toEqual({
    name: "guest kernel",
    status: "ok",
    detail: `6.1.2-own (${kernelImagePath})`,
  });
  expect(existsSync(join(dir, "home"))).toBe(false);
});

test("the port: free, ours, another home's, somebody else's", async () => {
  let status = 200;
  const server = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: () => new Response("", { status }) });
  const apiAddress = `127.0.0.1:${server.port}`;
  const name = `port ${server.port}`;
  try {
    expect(portOwner(server.port!)).toMatchObject({ listening: true, pid: process.pid });
    const stranger = await look({ apiAddress });
    expect(find(stranger, name)).toMatchObject({
      status: "warn",
      detail: expect.stringContaining("has not"),
      cure: expect.stringContaining("AENV_HOME_PATH"),
    });
    const home = join(dir, "served");
    await mkdir(home);
    await writeFile(join(home, "server.lock"), `${process.pid} agentenv serve\n`);
    const ours = await look({ apiAddress, home });
    expect(find(ours, name)).toMatchObject({
      status: "ok",
      detail: expect.stringContaining(`pid ${process.pid}`),
    });
    expect(find(ours, "server")).toMatchObject({
      status: "ok",
      detail: expect.stringContaining("answered 200"),
    });
    status = 404;
    const foreign = await look({ apiAddress });
    expect(find(foreign, name)).toMatchObject({
      status: "missing",
      cure: expect.stringContaining("API_ADDR"),
    });
  } finally {
    await server.stop(true);
  }
  const free = await look({ apiAddress });
  expect(find(free, name)).toEqual({ name, status: "ok", detail: "free" });
  expect(find(free, "server")).toMatchObject({ detail: "not running" });
});

test("address pools: free, our server's, another's with the lines that give others", async () => {
  const name = "network pools";
  // Nobody's but this test's: documentation addresses, one per process.
  const pools = [`192.0.2.${process.pid % 256}`, `198.51.100.${process.pid % 256}`];
  expect((await look({ pools })).find((check) => check.name === name)).toBeUndefined();
  using _lock = await lockPool(pools[1]!);
  const checks = await look({ pools });
  expect(find(checks, name)).toMatchObject({
    status: "warn",
    detail: expect.stringContaining(`${pools[1]} in use by another server (pid ${process.pid})`),
  });
  const lines = formatChecks(checks).split(/^warn +network pools /m)[1]!;
  const table = Bun.TOML.parse(lines.slice(lines.indexOf("[network.internal]"))) as {
    network: { internal: { host_interaction_cidr: string; veth_cidr: string } };
  };
  const { host_interaction_cidr: hostInteraction, veth_cidr: veth } = table.network.internal;
  expect(createAddressPlan(hostInteraction, veth).slot(1).index).toBe(1);
  const home = join(dir, "served");
  await mkdir(home);
  await writeFile(join(home, "server.lock"), `${process.pid} agentenv serve\n`);
  expect((await look({ pools, home })).find((check) => check.name === name)).toBeUndefined();
});

test("control groups of either version will do, and QEMU needs none", async () => {
  const at = (name: string) => join(dir, name);
  await mkdir(at("two"), { recursive: true });
  await writeFile(join(at("two"), "cgroup.controllers"), "cpu memory pids\n");
  for (const controller of ["one/cpu", "one/memory", "one/pids", "partly/cpu", "partly/pids"]) {
    await mkdir(at(controller), { recursive: true });
    await writeFile(join(at(controller), "cgroup.procs"), "");
  }
  for (const vmm of ["qemu", "firecracker"] as const) {
    expect(cgroupCheck(vmm, at("two"))).toEqual({ name: "cgroups", status: "ok", detail: "version 2" });
    expect(cgroupCheck(vmm, at("one"))).toEqual({ name: "cgroups", status: "ok", detail: "version 1" });
    for (const mount of [at("partly"), at("none")])
      expect(cgroupCheck(vmm, mount).status).toBe(vmm === "qemu" ? "ok" : "warn");
  }
  expect(cgroupCheck("firecracker", at("partly")).detail).toContain("version 1 without memory:");
});

/** A host that lacks about everything, made of this one in a mount namespace. */
const BARE_HOST = `
  set -e
  mount --make-rprivate /
  mkdir -p "$dir/dev" "$dir/home" "$dir/run"
  echo 2 > "$dir/two"; echo 128 > "$dir/few"
  mount --bind "$dir/two" /proc/sys/kernel/io_uring_disabled
  mount --bind "$dir/few" /proc/sys/fs/inotify/max_user_instances
  : > "$dir/dev/null"; mount --bind /dev/null "$dir/dev/null"
  : > "$dir/dev/urandom"; mount --bind /dev/urandom "$dir/dev/urandom"
  mount --bind "$dir/dev" /dev
  mount -t tmpfs -o size=1m tmpfs "$dir/home"
  mount -t tmpfs tmpfs /sys/fs/cgroup
  mkdir -p "$dir/bin"
  printf '#!/bin/sh\\necho "netlink: Error: cache initialization failed: Protocol not supported" >&2; exit 1\\n' > "$dir/bin/nft"
  chmod 755 "$dir/bin/nft"; PATH="$dir/bin:$PATH"
  ulimit -n 1024
  exec "$@"`;

function onBareHost(argv: readonly string[], env: Record<string, string> = {}) {
  return tryCommand(["unshare", "--mount", "/bin/sh", "-c", BARE_HOST, "sh", ...argv], {
    env: {
      ...(process.env as Record<string, string>),
      dir,
      API_ADDR: "127.0.0.1:1",
      AENV_HOME_PATH: join(dir, "home"),
      AENV_RUNTIME_PATH: join(dir, "run"),
      ...env,
    },
  });
}

test("FR-98: a host that lacks much: each thing is named with what to do", async () => {
  const { exitCode, stdout } = await onBareHost([process.execPath, MAIN, "doctor"], {
    AENV_VMM: "firecracker",
  });
  expect(exitCode).toBe(1);
  for (const line of [
    /^warn +\/dev\/kvm +not there: guests are emulated.* → /m,
    /^missing +\/dev\/net\/tun +.* → modprobe tun/m,
    /^warn +io_uring +turned off \(kernel\.io_uring_disabled = 2\).* → sysctl -w kernel\.io_uring_disabled=0/m,
    /^missing +disk space +.* → free space/m,
    /^ok +disk export +NBD .*there is no \/dev\/ublk-control.* → modprobe ublk_drv/m,
    /^missing +nf_tables +the kernel takes no rules: .*Protocol not supported.* → modprobe nf_tables/m,
    /^warn +cgroups +none: Firecracker's processes run without limits.* → mount -t cgroup2 .*unified_cgroup_hierarchy=1/m,
    /^warn +open files +limit 1024 +→ LimitNOFILE/m,
    /^missing +guest kernel +.* → run: agentenv setup/m,
  ]) {
    expect(stdout).toMatch(line);
  }
});

test("FR-98: a server refuses that host with every reason, and makes nothing", async () => {
  const { exitCode, stderr } = await onBareHost([process.execPath, MAIN, "serve"], {
    AENV_HOME_PATH: join(dir, "new"),
  });
  expect(exitCode).toBe(1);
  expect(stderr).toContain("this host is not ready for sandboxes");
  expect(stderr).toMatch(/\/dev\/net\/tun: .* → modprobe tun/);
  expect(existsSync(join(dir, "new"))).toBe(false);
  const badKey = await onBareHost([process.execPath, MAIN, "serve"], {
    API_ADDR: "nonsense",
    AENV_HOME_PATH: join(dir, "new"),
  });
  expect(badKey.exitCode).toBe(1);
  expect(badKey.stderr).toContain("server.listen");
  expect(existsSync(join(dir, "new"))).toBe(false);
});

test("one line per check, aligned, the cure behind an arrow", () => {
  const text = formatChecks([
    { name: "a", status: "ok", detail: "fine" },
    { name: "longer", status: "missing", detail: "gone", cure: "bring it" },
  ]);
  expect(text).toBe("ok      a       fine\nmissing longer  gone  → bring it\n");
});

test("without a word about a home, the one of the executable's own checkout is looked at", async () => {
  const executable = join(dir, "dist/agentenv");
  const none = { AENV_HOME_PATH: join(dir, "named") };
  expect(chosenSettings({}, none, executable).home).toBe(join(dir, "named"));
  await writeFile(join(dir, "config.toml"), `home_path = "${join(dir, "configured")}"\n`);
  const flags = { config: join(dir, "config.toml") };
  expect(chosenSettings(flags, {}, executable).home).toBe(join(dir, "configured"));
  await mkdir(join(dir, ".aenv/home"), { recursive: true });
  const found = chosenSettings(flags, {}, executable);
  expect([found.home, found.depsDir]).toEqual([join(dir, ".aenv/home"), join(dir, ".aenv/home/deps")]);
  expect(chosenSettings(flags, none, executable).home).toBe(join(dir, "named"));
  // What is configured and there comes first.
  await mkdir(join(dir, "configured"));
  expect(chosenSettings(flags, {}, executable).home).toBe(join(dir, "configured"));
});
