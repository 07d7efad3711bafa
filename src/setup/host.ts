import {
  chmodSync,
  chownSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { dirname, join } from "node:path";
import { tryCommand } from "../lib/command.ts";
import { errorCode, writeDurable } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";

/** Who the server will run as. */
export interface Account {
  readonly user: string;
  readonly group: string;
  readonly uid: number;
  readonly gid: number;
}

/** How a host is looked at and changed. Tests give one with a root of its own and commands that only get noted. */
export interface HostAccess {
  /** Prefix of all paths; "" is the host itself. */
  readonly root: string;
  run(
    argv: readonly string[],
  ): Promise<{ readonly exitCode: number; readonly stdout: string; readonly stderr: string }>;
}

export const THIS_HOST: HostAccess = { root: "", run: (argv) => tryCommand(argv) };

/** One thing that has to be so, and how it becomes so. */
interface Step {
  /** What it is for, as told to the administrator, e.g. `write /etc/sysctl.d/99-aenv.conf`. */
  readonly title: string;
  /** Undefined: it is so already. Otherwise what is different now. */
  readonly difference: () => string | undefined | Promise<string | undefined>;
  /** Resolves with a remark when the host works without it, though less well. */
  readonly apply: () => Promise<string | undefined>;
}

export interface StepReport {
  readonly title: string;
  readonly state: "present" | "done" | "would be done" | "skipped";
  readonly remark?: string;
}

export interface HostSetupOptions {
  readonly user: string;
  readonly group: string;
  /** State and runtime directories, absolute. */
  readonly homePath: string;
  readonly runtimePath: string;
  readonly dryRun: boolean;
  /** Kernel settings also in a container, which shares them with its host. */
  readonly forceSysctl: boolean;
  readonly host: HostAccess;
  readonly report: (step: StepReport) => void;
}

const NAME = /^[a-z_][a-z0-9_-]*$/;

/**
 * What sandboxes in number need of the kernel; a host that has more keeps it. Neighbour tables hold an entry
 * per slot, every guest connection is tracked, and each VM has a handful of threads.
 */
export const KERNEL_SETTINGS: readonly {
  readonly key: string;
  readonly minimum: number;
  readonly optional?: true;
}[] = [
  { key: "net.ipv4.ip_forward", minimum: 1 },
  { key: "net.ipv4.neigh.default.gc_thresh1", minimum: 4096 },
  { key: "net.ipv4.neigh.default.gc_thresh2", minimum: 8192 },
  { key: "net.ipv4.neigh.default.gc_thresh3", minimum: 16384 },
  { key: "net.netfilter.nf_conntrack_max", minimum: 1048576, optional: true },
  { key: "kernel.pid_max", minimum: 4194304 },
  { key: "fs.inotify.max_user_instances", minimum: 8192 },
];

export function sysctlPath(key: string): string {
  return `/proc/sys/${key.replaceAll(".", "/")}`;
}

/** Undefined when there is no such setting here, or this user may not see it. */
export function readSysctl(root: string, key: string): number | undefined {
  const text = readIfThere(`${root}${sysctlPath(key)}`)?.trim();
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : undefined;
}

function readIfThere(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch (error) {
    if (["ENOENT", "EACCES", "EPERM"].includes(errorCode(error) ?? "")) return undefined;
    throw error;
  }
}

/** Kernel settings inside a container belong to its host. */
export function isContainer(root = ""): boolean {
  if (existsSync(`${root}/.dockerenv`) || existsSync(`${root}/run/.containerenv`)) return true;
  return /docker|kubepods|containerd|libpod|podman/.test(readIfThere(`${root}/proc/1/cgroup`) ?? "");
}

/** The account as the host's name service has it. Errors: `runtime_account_invalid` with what to do. */
export async function findAccount(user: string, group: string, host: HostAccess): Promise<Account> {
  const refuse = (message: string, remediation: string): AenvError =>
    new AenvError({ code: "runtime_account_invalid", status: 400, message, remediation });
  for (const [flag, name] of [
    ["--runtime-user", user],
    ["--runtime-group", group],
  ] as const) {
    if (!NAME.test(name)) {
      throw refuse(
        `${flag} "${name}" is not an account name`,
        "names start with a small letter or _, then small letters, digits, _ and -",
      );
    }
  }
  const passwd = (await host.run(["getent", "passwd", user])).stdout.trim().split(":");
  if (passwd.length < 4) {
    throw refuse(
      `there is no user ${user}`,
      `useradd --system --user-group --no-create-home --home-dir /var/lib/aenv --shell /usr/sbin/nologin ${user}`,
    );
  }
  const groupEntry = (await host.run(["getent", "group", group])).stdout.trim().split(":");
  if (groupEntry.length < 3) throw refuse(`there is no group ${group}`, `groupadd --system ${group}`);
  const uid = Number(passwd[2]);
  const gid = Number(groupEntry[2]);
  if (uid === 0 || gid === 0) {
    throw refuse(
      `${uid === 0 ? `user ${user}` : `group ${group}`} is root's`,
      "name an account of its own: the server needs two capabilities, not root",
    );
  }
  return { user, group, uid, gid };
}

/** Devices the server opens: who gets them, and where the rule for the next boot is. */
function udevRules(group: string): string {
  return [
    "# Written by agentenv setup --host: devices of the sandbox server.",
    `KERNEL=="ublk-control", GROUP="${group}", MODE="0660"`,
    `KERNEL=="ublkc[0-9]*", GROUP="${group}", MODE="0660"`,
    `KERNEL=="ublkb[0-9]*", GROUP="${group}", MODE="0660"`,
    'KERNEL=="kvm", GROUP="kvm", MODE="0660", OPTIONS+="static_node=kvm"',
    "",
  ].join("\n");
}

const MODULES = [
  "# Written by agentenv setup --host: modules of the sandbox server. One the kernel does not have is skipped.",
  "tun",
  "nf_tables",
  "ublk_drv",
  "",
].join("\n");

function sysctlText(root: string): string {
  const lines = KERNEL_SETTINGS.map(({ key, minimum, optional }) => {
    // A leading "-": no error where the module that has the setting is not loaded yet.
    return `${optional === true ? "-" : ""}${key} = ${Math.max(minimum, readSysctl(root, key) ?? 0)}`;
  });
  return ["# Written by agentenv setup --host.", ...lines, ""].join("\n");
}

function fileStep(
  host: HostAccess,
  path: string,
  text: string,
  after?: () => Promise<string | undefined>,
): Step {
  const full = `${host.root}${path}`;
  return {
    title: `write ${path}`,
    difference: () => {
      const now = readIfThere(full);
      return now === text ? undefined : now === undefined ? "not there" : "has other content";
    },
    apply: async () => {
      mkdirSync(dirname(full), { recursive: true });
      await writeDurable(full, new TextEncoder().encode(text), 0o644);
      return after?.();
    },
  };
}

function directoryStep(host: HostAccess, path: string, account: Account): Step {
  const full = `${host.root}${path}`;
  const mode = 0o750;
  return {
    title: `make ${path} for ${account.user}:${account.group}`,
    difference: () => {
      const stat = statSync(full, { throwIfNoEntry: false });
      if (stat === undefined) return "not there";
      if (!stat.isDirectory()) {
        throw new AenvError({
          code: "host_setup_failed",
          message: `${path} exists and is not a directory`,
          remediation: "move it away, or choose another place with home_path or runtime_path",
        });
      }
      if (stat.uid !== account.uid || stat.gid !== account.gid) return `belongs to ${stat.uid}:${stat.gid}`;
      if ((stat.mode & 0o777) !== mode) return `has mode ${(stat.mode & 0o777).toString(8)}`;
      return foreignEntry(full, account.uid);
    },
    apply: async () => {
      mkdirSync(full, { recursive: true });
      // What a server that ran as root left must be the new user's, or it cannot read its own secrets.
      if (foreignEntry(full, account.uid) !== undefined) {
        await must(host, ["chown", "-R", "--no-dereference", `${account.uid}:${account.gid}`, full]);
      }
      chownSync(full, account.uid, account.gid);
      chmodSync(full, mode);
      return undefined;
    },
  };
}

/** An entry right under `dir` that is somebody else's. */
function foreignEntry(dir: string, uid: number): string | undefined {
  const found = readdirSync(dir).find((name) => lstatSync(join(dir, name)).uid !== uid);
  return found === undefined ? undefined : `${found} in it belongs to somebody else`;
}

/** A device node that exists now; the udev rule is for those to come. */
function deviceStep(
  host: HostAccess,
  path: string,
  group: { readonly name: string; readonly gid: number },
): Step {
  const full = `${host.root}${path}`;
  return {
    title: `let the group ${group.name} use ${path}`,
    difference: () => {
      const stat = statSync(full, { throwIfNoEntry: false });
      if (stat === undefined || (stat.mode & 0o006) === 0o006) return undefined;
      return stat.gid === group.gid && (stat.mode & 0o060) === 0o060
        ? undefined
        : `mode ${(stat.mode & 0o777).toString(8)}, group ${stat.gid}`;
    },
    apply: async () => {
      chownSync(full, statSync(full).uid, group.gid);
      chmodSync(full, 0o660);
      return undefined;
    },
  };
}

function memberStep(host: HostAccess, user: string, group: string): Step {
  return {
    title: `put ${user} into the group ${group}`,
    difference: async () => {
      const { stdout } = await host.run(["id", "-nG", user]);
      return stdout.trim().split(/\s+/).includes(group) ? undefined : "not a member";
    },
    apply: async () => {
      await must(host, ["usermod", "-aG", group, user]);
      return undefined;
    },
  };
}

function groupStep(host: HostAccess, group: string): Step {
  return {
    title: `make the group ${group}`,
    difference: async () =>
      (await host.run(["getent", "group", group])).exitCode === 0 ? undefined : "not there",
    apply: async () => {
      await must(host, ["groupadd", "--system", group]);
      return undefined;
    },
  };
}

function moduleStep(host: HostAccess, name: string, present: string, without: string): Step {
  return {
    title: `load the module ${name}`,
    difference: () => (existsSync(`${host.root}${present}`) ? undefined : `no ${present}`),
    apply: async () => {
      const { exitCode, stderr } = await runIfThere(host, ["modprobe", name]);
      return exitCode === 0 ? undefined : `not available (${stderr.trim().split("\n").at(-1)}): ${without}`;
    },
  };
}

function sysctlStep(host: HostAccess, key: string, minimum: number): Step {
  return {
    title: `set ${key} to ${minimum}`,
    difference: () => {
      const now = readSysctl(host.root, key);
      return now === undefined || now >= minimum ? undefined : `is ${now}`;
    },
    apply: async () => {
      let said: string;
      try {
        writeFileSync(`${host.root}${sysctlPath(key)}`, `${minimum}\n`);
        return undefined;
      } catch (error) {
        if (errorCode(error) === undefined) throw error;
        said = `${errorCode(error)}`;
      }
      if (key !== "net.ipv4.ip_forward") return `the kernel refuses it (${said})`;
      throw new AenvError({
        code: "host_setup_failed",
        message: `IPv4 forwarding cannot be turned on: ${said}`,
        remediation: "turn it on for the machine or container this runs in",
      });
    },
  };
}

/** Status 127 and the reason where there is no such command, as a shell has it. */
async function runIfThere(host: HostAccess, argv: readonly string[]): ReturnType<HostAccess["run"]> {
  try {
    return await host.run(argv);
  } catch (error) {
    if (!(error instanceof AenvError && error.code === "command_not_found")) throw error;
    return { exitCode: 127, stdout: "", stderr: `there is no ${argv[0]}` };
  }
}

async function must(host: HostAccess, argv: readonly string[]): Promise<void> {
  const { exitCode, stdout, stderr } = await host.run(argv);
  if (exitCode === 0) return;
  throw new AenvError({
    code: "host_setup_failed",
    message: `${argv.join(" ")} failed with status ${exitCode}: ${(stderr.trim() || stdout.trim()).slice(-500)}`,
  });
}

async function reloadUdev(host: HostAccess): Promise<string | undefined> {
  for (const argv of [
    ["udevadm", "control", "--reload"],
    ["udevadm", "trigger", "--subsystem-match=misc"],
  ]) {
    const { exitCode } = await runIfThere(host, argv);
    if (exitCode === 127) return "there is no udev here: device nodes are set now, and again by running this";
    if (exitCode !== 0) return "udev does not run here: the rules count from the next boot";
  }
  return undefined;
}

async function plan(options: HostSetupOptions, account: Account): Promise<Step[]> {
  const { host } = options;
  const settings = isContainer(host.root) && !options.forceSysctl ? [] : KERNEL_SETTINGS;
  const gidOf = async (group: string): Promise<number> =>
    Number((await host.run(["getent", "group", group])).stdout.split(":")[2] ?? Number.NaN);
  const runtimeGroup = { name: account.group, gid: account.gid };
  // Only known once its own step is done: looked up when it is needed.
  const kvmDevice: Step = {
    title: "let the group kvm use /dev/kvm",
    difference: async () =>
      deviceStep(host, "/dev/kvm", { name: "kvm", gid: await gidOf("kvm") }).difference(),
    apply: async () => deviceStep(host, "/dev/kvm", { name: "kvm", gid: await gidOf("kvm") }).apply(),
  };
  return [
    groupStep(host, "kvm"),
    memberStep(host, account.user, account.group),
    memberStep(host, account.user, "kvm"),
    fileStep(host, "/etc/modules-load.d/aenv.conf", MODULES),
    moduleStep(host, "tun", "/dev/net/tun", "guests cannot have a network"),
    moduleStep(host, "ublk_drv", "/dev/ublk-control", "disks are served over NBD instead"),
    fileStep(host, "/etc/udev/rules.d/99-agentenv-ublk.rules", udevRules(account.group), () =>
      reloadUdev(host),
    ),
    kvmDevice,
    deviceStep(host, "/dev/ublk-control", runtimeGroup),
    deviceStep(host, "/dev/net/tun", runtimeGroup),
    ...(settings.length === 0
      ? []
      : [
          fileStep(host, "/etc/sysctl.d/99-aenv.conf", sysctlText(host.root)),
          ...settings.map(({ key, minimum }) => sysctlStep(host, key, minimum)),
        ]),
    directoryStep(host, options.homePath, account),
    directoryStep(host, options.runtimePath, account),
  ];
}

/**
 * The one-time work that needs root, so that the server does not: groups, devices, modules, kernel settings,
 * directories. What is as it should be is left alone; a dry run changes nothing. Returns how many steps were
 * (or would be) done. Errors: `runtime_account_invalid`, `host_setup_failed`, `root_needed`.
 */
export async function setupHost(options: HostSetupOptions): Promise<number> {
  const account = await findAccount(options.user, options.group, options.host);
  if (!options.dryRun && options.host.root === "" && process.geteuid?.() !== 0) {
    throw new AenvError({
      code: "root_needed",
      status: 403,
      message: "setup --host changes the machine and needs root",
      remediation: "run it with sudo; --dry-run shows without root what it would do",
    });
  }
  let changes = 0;
  if (isContainer(options.host.root) && !options.forceSysctl) {
    options.report({
      title: "kernel settings",
      state: "skipped",
      remark: "a container shares them with its host; AENV_FORCE_SYSCTL_TUNING=1 sets them from here",
    });
  }
  for (const step of await plan(options, account)) {
    const difference = await step.difference();
    if (difference === undefined) {
      options.report({ title: step.title, state: "present" });
      continue;
    }
    changes++;
    if (options.dryRun) options.report({ title: step.title, state: "would be done", remark: difference });
    else {
      const remark = await step.apply();
      options.report({ title: step.title, state: "done", ...(remark === undefined ? {} : { remark }) });
    }
  }
  return changes;
}

/** Where the runtime directory of this path would be made: the nearest directory that exists. */
export function nearestExisting(path: string): string {
  let dir = path;
  while (!existsSync(dir) && dir !== dirname(dir)) dir = dirname(dir);
  return dir;
}
