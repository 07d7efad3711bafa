/**
 * File systems that are frozen for real. Started by hold.test.ts in a network and mount namespace of its own; the
 * agent runs in a further one whose only disk is a loop device, so that it can freeze nothing of this host.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from "node:fs";
import { connect } from "node:net";
import { join, resolve } from "node:path";
import { eventually } from "../support/eventually.ts";

if (process.env.AENV_NETNS_SUITE !== "1")
  throw new Error("run hold.test.ts: this suite freezes file systems");

const BINARY = resolve(process.env.AENV_ENVD ?? join(import.meta.dir, "../../build/envd"));
const HOST = "10.9.9.2";
const URL_ = `http://${HOST}:49983`;
const dir = mkdtempSync("/tmp/guest-hold-");

/** In the agent's namespaces: a root of its own with one ext4 disk, as a guest has it. Arguments: directory, binary. */
const INSIDE = `
while ! ip link show v1 > /dev/null 2>&1; do sleep 0.02; done
ip link set lo up; ip addr add ${HOST}/24 dev v1; ip link set v1 up
mount --make-rprivate /
mkdir "$0/r"; mount -t tmpfs tmpfs "$0/r"; cd "$0/r"
mkdir proc dev mnt bin old etc tmp root run
cp "$(command -v busybox)" "$1" bin
for f in $(ldd "$1" "$(command -v busybox)" 2>/dev/null | grep -o '/[^ )]*' | grep -v ':$'); do
  mkdir -p ".$(dirname "$f")"; cp -L "$f" ".$f"
done
echo root:x:0:0::/root:/bin/sh > etc/passwd; echo root:x:0: > etc/group
mknod dev/vdy b $(stat -c '0x%t 0x%T' "$2"); mknod dev/null c 1 3
pivot_root . old
exec /bin/busybox chroot . /bin/busybox sh -ec '
  /bin/busybox mount -t proc proc /proc
  /bin/busybox umount -l /old
  /bin/busybox mount -t ext4 /dev/vdy /mnt
  [ "$(/bin/busybox grep -c " /dev/" /proc/self/mountinfo)" = 1 ]
  exec /bin/envd --guest --trust-if v1'
`;

let agent: Bun.Subprocess;
let loop = "";

beforeAll(async () => {
  await Bun.$`ip link set lo up && truncate -s 64M ${dir}/disk && mkfs.ext4 -q ${dir}/disk`.quiet();
  loop = (await Bun.$`losetup --find --show ${dir}/disk`.text()).trim();
  agent = Bun.spawn(["unshare", "--net", "--mount", "sh", "-ec", INSIDE, dir, BINARY, loop], {
    stdin: "ignore",
    stdout: "inherit",
    stderr: "inherit",
  });
  await eventually("a namespace of its own", () => netOf(agent.pid) !== netOf(process.pid));
  await Bun.$`ip link add v0 type veth peer name v1 netns ${agent.pid} && ip addr add 10.9.9.1/24 dev v0 && ip link set v0 up`;
  await eventually(
    "the agent",
    async () => (await fetch(`${URL_}/health`).catch(() => undefined))?.status === 204,
  );
});

afterAll(async () => {
  agent.kill("SIGTERM");
  expect(await agent.exited).toBe(0);
  await eventually(
    "the disk is free",
    async () => (await Bun.$`losetup -d ${loop}`.nothrow().quiet()).exitCode === 0,
  );
  rmSync(dir, { recursive: true, force: true });
});

function netOf(pid: number | string): string | undefined {
  try {
    return readlinkSync(`/proc/${pid}/ns/net`);
  } catch {
    return undefined; // it has ended
  }
}

/** Processes that hold file systems still, those of this agent alone. */
function holders(): number[] {
  return readdirSync("/proc")
    .filter((pid) => /^\d+$/.test(pid) && netOf(pid) === netOf(agent.pid))
    .filter((pid) => readFileSync(`/proc/${pid}/comm`, "utf8").trim() === "envd-hold")
    .map(Number);
}

async function post(path: string): Promise<string> {
  const reply = await fetch(`${URL_}${path}`, { method: "POST", signal: AbortSignal.timeout(10_000) });
  return `${reply.status} ${await reply.text()}`.trim();
}

const upload = async (name: string, content: string): Promise<number> =>
  (
    await fetch(`${URL_}/files?path=/mnt/${name}`, {
      method: "POST",
      headers: { "content-type": "application/octet-stream" },
      body: content,
      signal: AbortSignal.timeout(10_000),
    })
  ).status;

test("what would write waits until the disks are thawed, and the agent goes on meanwhile", async () => {
  const total = 4 << 20;
  const half = Buffer.alloc(total / 2, 7);
  const head = `POST /files?path=/mnt/big HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/octet-stream\r\nContent-Length: ${total}\r\n\r\n`;
  const open = (first: Buffer) => {
    const socket = connect({ host: HOST, port: 49983 });
    socket.on("error", () => undefined);
    socket.write(head.replace("big", `big-${first.length}`));
    socket.write(first);
    return socket;
  };
  const [begun, given] = [open(half), open(half.subarray(1))];
  const answer = new Promise<string>((done) => {
    let text = "";
    begun.on("data", (data) => (text += data));
    begun.on("close", () => done(text));
  });
  await post("/health");
  expect(await post("/fsfrozen")).toStartWith("409 ");
  expect(await post("/fsfreeze")).toBe("204");
  begun.write(half);
  given.resetAndDestroy(); // its unfinished file is to go
  const later = upload("later", "x");
  for (let i = 0; i < 20; i++) {
    expect(await post("/fsfrozen")).toBe("204");
    await Bun.sleep(10);
  }
  expect(await post("/fsthaw")).toBe("204");
  expect(await later).toBe(200);
  expect(await answer).toStartWith("HTTP/1.1 200 ");
  await eventually("the holder ends", () => holders().length === 0);
  expect(await post("/fsfrozen")).toStartWith("409 ");
}, 60_000);

test("signals do not end who holds them; where it is killed all the same, nothing stays frozen", async () => {
  expect(await post("/fsfreeze")).toBe("204");
  const [holder] = holders();
  for (const signal of ["SIGHUP", "SIGTERM", "SIGUSR1", "SIGALRM", "SIGQUIT", "SIGIO"] as const)
    process.kill(holder!, signal);
  expect(await post("/fsfrozen")).toBe("204");
  process.kill(holder!, "SIGKILL");
  await eventually("it is noticed", async () => (await post("/fsfrozen")).startsWith("409 "));
  expect(await upload("after", "x")).toBe(200);
  expect(await post("/fsfreeze")).toBe("204");
  expect(await post("/fsthaw")).toBe("204");
}, 60_000);

test("what is mounted over a disk is not frozen in its stead", async () => {
  const inside = ["nsenter", "-t", String(agent.pid), "-m", "-r", "-w", "/bin/busybox"];
  await Bun.$`${inside} mount -t tmpfs tmpfs /mnt`;
  expect(await post("/fsfreeze")).toContain("something else is mounted over one");
  await Bun.$`${inside} umount /mnt`;
  await eventually("as before", async () => (await post("/fsfreeze")) === "204");
  expect(await post("/fsthaw")).toBe("204");
}, 60_000);

test("a report that was read late is none, as the guest may have thawed them long since", async () => {
  let answer = "";
  do {
    if (answer !== "") expect([answer, await post("/fsthaw")]).toEqual(["204", "204"]); // it was faster
    await eventually("no holder", () => holders().length === 0);
    await upload("dirty", "x".repeat(8 << 20)); // takes a moment to be written out
    answer = "";
    const freezing = post("/fsfreeze").then((said) => {
      answer = said;
    });
    while (holders().length === 0) await Bun.sleep(1);
    process.kill(agent.pid, "SIGSTOP");
    await Bun.sleep(answer === "" ? 5200 : 0);
    process.kill(agent.pid, "SIGCONT");
    await freezing;
  } while (answer === "204");
  expect(answer).toStartWith("500 ");
  expect(answer).toContain("were not held still");
  expect(await upload("again", "x")).toBe(200);
}, 60_000);
