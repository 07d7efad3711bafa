import { afterEach, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { chmodSync, existsSync, mkdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { tryCommand } from "../lib/command.ts";
import { AenvError } from "../lib/errors.ts";
import { requireHost } from "./doctor.ts";
import {
  type HostAccess,
  type HostSetupOptions,
  KERNEL_SETTINGS,
  type StepReport,
  setupHost,
  sysctlPath,
} from "./host.ts";

setDefaultTimeout(30_000);

const UID = 4242;
const GID = 4343;
let root = "";
let groups: Record<string, number> = {};
let memberships: string[] = [];
let commands: string[] = [];

beforeEach(async () => {
  root = await mkdtemp(join(tmpdir(), "setup-host-"));
  groups = { aenv: GID };
  memberships = ["aenv"];
  commands = [];
});
afterEach(() => rm(root, { recursive: true, force: true }));

function put(path: string, text = ""): void {
  mkdirSync(dirname(join(root, path)), { recursive: true });
  writeFileSync(join(root, path), text);
}

/** A host of files under `root` whose commands do to those files what the real ones do to a machine. */
const host = (): HostAccess => ({
  root,
  run: async (argv) => {
    const [name, ...args] = argv;
    if (name !== "getent" && name !== "id") commands.push(argv.join(" "));
    const answer = (stdout: string, exitCode = 0, stderr = "") => ({ exitCode, stdout, stderr });
    switch (name) {
      case "getent": {
        if (args[0] === "passwd") {
          return args[1] === "aenv" ? answer(`aenv:x:${UID}:${GID}::/:/bin/false`) : answer("", 2);
        }
        const gid = args[1] === "root" ? 0 : groups[args[1]!];
        return gid === undefined ? answer("", 2) : answer(`${args[1]}:x:${gid}:`);
      }
      case "id":
        return answer(memberships.join(" "));
      case "groupadd":
        groups[args[1]!] = 4444;
        return answer("");
      case "usermod":
        memberships.push(args[1]!);
        return answer("");
      case "modprobe":
        return args[0] === "ublk_drv"
          ? answer("", 1, "modprobe: FATAL: Module ublk_drv not found")
          : answer("");
      case "udevadm":
        return answer("");
      default:
        return tryCommand(argv);
    }
  },
});

async function run(more: Partial<HostSetupOptions> = {}): Promise<{ changes: number; steps: StepReport[] }> {
  const steps: StepReport[] = [];
  const changes = await setupHost({
    user: "aenv",
    group: "aenv",
    homePath: "/var/lib/aenv",
    runtimePath: "/run/aenv",
    dryRun: false,
    forceSysctl: false,
    host: host(),
    report: (step) => steps.push(step),
    ...more,
  });
  return { changes, steps };
}

function machine(): void {
  for (const { key } of KERNEL_SETTINGS) put(sysctlPath(key), "1\n");
  put(sysctlPath("kernel.pid_max"), "9999999\n");
  for (const device of ["/dev/kvm", "/dev/net/tun"]) {
    put(device);
    chmodSync(join(root, device), 0o600);
  }
}

const state = (steps: readonly StepReport[], title: string) =>
  steps.find((step) => step.title.includes(title))?.state;

test("a dry run tells all and changes nothing", async () => {
  machine();
  const { changes, steps } = await run({ dryRun: true });
  expect(changes).toBe(steps.filter((step) => step.state === "would be done").length);
  expect(changes).toBeGreaterThan(8);
  expect(commands).toEqual([]);
  expect(existsSync(join(root, "etc"))).toBe(false);
  expect(existsSync(join(root, "var"))).toBe(false);
});

test("everything a server's account needs; again, nothing is done", async () => {
  machine();
  const first = await run();
  expect(statSync(join(root, "var/lib/aenv"))).toMatchObject({ uid: UID, gid: GID });
  expect(statSync(join(root, "run/aenv")).mode & 0o777).toBe(0o750);
  expect(statSync(join(root, "dev/kvm"))).toMatchObject({ gid: 4444 });
  expect(statSync(join(root, "dev/net/tun"))).toMatchObject({ gid: GID });
  expect(statSync(join(root, "dev/net/tun")).mode & 0o777).toBe(0o660);
  expect(memberships).toEqual(["aenv", "kvm"]);
  const rules = readFileSync(join(root, "etc/udev/rules.d/99-agentenv-ublk.rules"), "utf8");
  expect(rules).toContain('KERNEL=="ublkc[0-9]*", GROUP="aenv", MODE="0660"');
  // A higher value of the host's own is neither lowered now nor at the next boot.
  expect(readFileSync(join(root, "etc/sysctl.d/99-aenv.conf"), "utf8")).toContain(
    "kernel.pid_max = 9999999\n",
  );
  expect(readFileSync(join(root, sysctlPath("kernel.pid_max")), "utf8")).toBe("9999999\n");
  expect(readFileSync(join(root, sysctlPath("net.ipv4.ip_forward")), "utf8")).toBe("1\n");
  expect(readFileSync(join(root, sysctlPath("fs.inotify.max_user_instances")), "utf8")).toBe("8192\n");
  expect(first.steps.find((step) => step.title.includes("ublk_drv"))?.remark).toContain("NBD");

  commands = [];
  const again = await run();
  // The module the kernel does not have is asked for again, and that is all.
  expect(again.steps.filter((step) => step.state === "done").map((step) => step.title)).toEqual([
    "load the module ublk_drv",
  ]);
  expect(commands).toEqual(["modprobe ublk_drv"]);
});

test("state of a server that ran as root becomes the account's", async () => {
  machine();
  await run();
  put("/var/lib/aenv/secrets/api-key", "k");
  expect(state((await run()).steps, "make /var/lib/aenv")).toBe("done");
  expect(statSync(join(root, "var/lib/aenv/secrets/api-key"))).toMatchObject({ uid: UID, gid: GID });
});

test("in a container the kernel's settings are its host's, unless forced", async () => {
  machine();
  put("/.dockerenv");
  const { steps } = await run({ dryRun: true });
  expect(state(steps, "kernel settings")).toBe("skipped");
  expect(steps.some((step) => step.title.includes("net.ipv4"))).toBe(false);
  expect(state((await run({ dryRun: true, forceSysctl: true })).steps, "sysctl.d")).toBe("would be done");
});

test("accounts that cannot be: by name, missing, root's", async () => {
  const code = (more: Partial<HostSetupOptions>) =>
    run(more).then(
      () => "accepted",
      (error: unknown) => (error instanceof AenvError ? error.message : String(error)),
    );
  expect(await code({ user: "../x" })).toContain("not an account name");
  expect(await code({ user: "nobody-here" })).toContain("there is no user");
  expect(await code({ group: "nogroup-here" })).toContain("there is no group");
  expect(await code({ group: "root" })).toContain("is root's");
  rmSync(join(root, "etc"), { recursive: true, force: true });
  put("/var/lib/aenv");
  expect(await code({})).toContain("is not a directory");
});

test("flags: usage errors, and --host with what belongs to the other half", async () => {
  const main = join(import.meta.dir, "../main.ts");
  for (const [args, said] of [
    [["--dry-run"], "--dry-run needs --host"],
    [["--host", "--force"], "--force does not go with --host"],
    [["--runtime-user", "x"], "--runtime-user needs --host or --print"],
    [["--print", "all"], "must be unit or environment"],
  ] as const) {
    const { exitCode, stderr } = await tryCommand([process.execPath, main, "setup", ...args]);
    expect(exitCode).toBe(2);
    expect(stderr).toContain(said);
  }
});

test("the printed unit is the packaged one with this executable and account; systemd takes it", async () => {
  const main = join(import.meta.dir, "../main.ts");
  const { stdout } = await tryCommand([
    ...[process.execPath, main, "setup", "--print", "unit"],
    ...["--runtime-user", "root", "--runtime-group", "root"],
  ]);
  expect(stdout).toContain("User=root\nGroup=root\n");
  expect(stdout).toContain(`ExecStart=${process.execPath} serve\n`);
  // A mount namespace of the service's own would hide the sandboxes' from the next server.
  const own =
    /^(ProtectSystem|ProtectHome|Private(Tmp|Devices|Mounts|Users|IPC)|ReadOnly\w+|ReadWrite\w+|Inaccessible\w+|ProtectKernel(Tunables|Modules|Logs)|ProtectControlGroups|ProtectProc|ProcSubset|TemporaryFileSystem|BindPaths|RootDirectory|MountFlags)=/m;
  expect(stdout).not.toMatch(own);
  if (Bun.which("systemd-analyze") === null)
    return console.log("no systemd-analyze here: the unit is not verified");
  const unit = join(root, "aenv.service");
  writeFileSync(unit, stdout.replace(/^SupplementaryGroups=.*$/m, ""));
  const verdict = await tryCommand(["systemd-analyze", "verify", "--man=no", unit]);
  expect(verdict.stderr).not.toContain("aenv.service:");
  expect(verdict.exitCode).toBe(0);
});

test("a host that is not ready is refused with every reason, before anything is made", async () => {
  const home = join(root, "locked/home");
  mkdirSync(dirname(home), { mode: 0o500 });
  const program = `
    import { requireHost } from ${JSON.stringify(join(import.meta.dir, "doctor.ts"))};
    try {
      requireHost({ home: ${JSON.stringify(home)}, runtimePath: "/proc/none" });
    } catch (error) {
      console.log(error.code + "\\n" + error.message);
    }`;
  const file = join(root, "look.ts");
  writeFileSync(file, program);
  const { stdout } = await tryCommand([
    ...["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
    ...["env", "PATH=/usr/bin:/usr/sbin", process.execPath, file],
  ]);
  expect(stdout).toStartWith("host_not_ready\n");
  expect(stdout).toContain("privileges: root without CAP_NET_ADMIN and CAP_SYS_ADMIN");
  expect(stdout).toContain(`${home}: cannot be made`);
  expect(existsSync(home)).toBe(false);
  expect(() => requireHost({ home: join(root, "h"), runtimePath: join(root, "r") })).not.toThrow();
});
