import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Sandbox } from "e2b";
import { lockHolder } from "../../src/lib/file-lock.ts";
import { buildImage, writeLayout } from "../support/oci.ts";
import { hostObjects, TestServer } from "../support/server.ts";
import { complaints, kernelLog, ROOT, ublkNodes } from "./harness.ts";

/*
 * The main job over ublk with KVM, inside the rig and through the API: a template, a sandbox, pause, resume,
 * fork, a server that is killed, a block daemon that is killed. For each VMM there is.
 */

setDefaultTimeout(240_000);

const firecracker = process.env.AENV_TEST_FIRECRACKER ?? join(ROOT, ".tools/firecracker/firecracker");
const APPLETS = [
  "sh",
  "cat",
  "echo",
  "sleep",
  "mount",
  "id",
  "sync",
  "dd",
  "md5sum",
  "uname",
  "dmesg",
  "head",
];

async function busyboxLayout(directory: string): Promise<void> {
  const busybox = Bun.which("busybox");
  if (busybox === null) throw new Error("busybox is not installed");
  const directories = ["bin", "etc", "root", "dev", "proc", "sys", "tmp"];
  const image = buildImage({
    layers: [
      {
        entries: [
          ...directories.map((path) => ({ path: `${path}/`, type: "directory" as const })),
          { path: "bin/busybox", content: readFileSync(busybox), mode: 0o755 },
          ...APPLETS.map((name) => ({ path: `bin/${name}`, type: "symlink" as const, link: "busybox" })),
          { path: "bin/bash", content: '#!/bin/sh\nexec /bin/sh "$@"\n', mode: 0o755 },
          { path: "etc/passwd", content: "root:x:0:0:root:/root:/bin/sh\n" },
          { path: "etc/group", content: "root:x:0:\n" },
        ],
      },
    ],
    config: { Env: ["PATH=/bin"] },
  });
  await writeLayout(directory, { latest: image });
}

const vmms = [
  { vmm: "qemu", toml: "" },
  { vmm: "firecracker", toml: `[firecracker]\nbinary_path = "${firecracker}"` },
].filter(({ vmm }) => {
  const there = vmm === "qemu" || existsSync(firecracker);
  if (!there)
    console.log(
      `skipped: the lifecycle with Firecracker, there is no ${firecracker} (AENV_TEST_FIRECRACKER)`,
    );
  return there;
});

describe.each(vmms)("a sandbox on $vmm over ublk", ({ vmm, toml }) => {
  let server: TestServer;
  let connection: Awaited<ReturnType<TestServer["connection"]>>;
  let sandbox: Sandbox;
  let firstLine = 0;
  const took = (what: string, sinceMs: number) =>
    console.log(`figure: ${vmm}: ${what} ${(performance.now() - sinceMs).toFixed(0)} ms`);
  const shell = async (target: Sandbox, command: string) =>
    (await target.commands.run(command, { timeoutMs: 60_000, user: "root" })).stdout;
  const devices = async () => ublkNodes().filter((name) => name.startsWith("ublkb"));

  beforeAll(async () => {
    firstLine = (await kernelLog()).length;
    server = await TestServer.create({
      toml: `[image.resolver]\nallow_local_paths = true\n[image.cache]\nvirtual_size_gib = 1\n${toml}`,
      env: {
        AENV_DISK_EXPORT: "ublk",
        AENV_VIRTUALIZATION_MODE: "kvm",
        AENV_VMM: vmm,
        AENV_KVM_PROBE_PATIENCE: "6",
        AENV_ENVD_INIT_TIMEOUT_SECS: "120",
      },
    });
    await server.start().catch(async (error: unknown) => {
      console.log(await server.log());
      throw error;
    });
    connection = await server.connection();
    await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);
  });
  afterAll(async () => {
    await server?.[Symbol.asyncDispose]();
  });

  test("a template is made", async () => {
    const layout = join(server.home, "layout");
    await busyboxLayout(layout);
    const startedMs = performance.now();
    const pulled = await server.run([
      ...["pull", `oci-layout:${layout}:latest`, "--name", "rig", "--cpu", "1", "--memory", "192"],
    ]);
    if (pulled.exitCode !== 0) console.log((await server.log()).slice(-6000));
    expect(pulled.exitCode, pulled.stderr + pulled.stdout).toBe(0);
    took("template from an image, boot included", startedMs);
  });

  test("starts, on a kernel's block device and with KVM", async () => {
    const startedMs = performance.now();
    sandbox = await Sandbox.create("rig", { ...connection, timeoutMs: 600_000 });
    took("create", startedMs);
    expect(await shell(sandbox, "echo hello; id -u")).toBe("hello\n0\n");
    expect(await devices()).not.toEqual([]);
    expect(await server.log()).toContain("kind=ublk");
    await shell(sandbox, "head -c 4194304 /dev/urandom > /root/data; sync; md5sum /root/data > /root/sum");
  });

  test("pauses and resumes with memory and disk", async () => {
    await shell(sandbox, "mount -t tmpfs none /tmp; echo kept > /tmp/in-memory");
    let startedMs = performance.now();
    await sandbox.pause();
    took("pause", startedMs);
    expect(await devices()).toEqual([]);
    startedMs = performance.now();
    sandbox = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 600_000 });
    took("resume", startedMs);
    expect(await shell(sandbox, "cat /tmp/in-memory; md5sum -c /root/sum")).toBe("kept\n/root/data: OK\n");
  });

  test("forks into two that do not see each other", async () => {
    await shell(sandbox, "echo before > /root/fork; echo before > /tmp/fork");
    const startedMs = performance.now();
    const children = (await sandbox.fork({ count: 2 })).map((fork) => {
      if (!(fork instanceof Sandbox)) throw fork;
      return fork;
    });
    took("fork into two", startedMs);
    await Promise.all(
      children.map((child, i) =>
        shell(child, `echo child-${i} > /root/fork; echo child-${i} > /tmp/fork; sync`),
      ),
    );
    for (const [i, child] of children.entries()) {
      expect(await shell(child, "cat /root/fork /tmp/fork; md5sum -c /root/sum")).toBe(
        `child-${i}\nchild-${i}\n/root/data: OK\n`,
      );
    }
    expect(await shell(sandbox, "cat /root/fork /tmp/fork")).toBe("before\nbefore\n");
    await Promise.all(children.map((child) => child.kill()));
  });

  // With the first one alone: a cold boot takes long in here.
  const driven = vmm === vmms[0]?.vmm ? test : () => undefined;
  driven("has drives of its own, written and read-only, through a pause", async () => {
    const source = { image: `oci-layout:${join(server.home, "layout")}:latest` };
    const startedMs = performance.now();
    const created = await fetch(`${server.url}/sandboxes-cold`, {
      method: "POST",
      headers: { "x-api-key": connection.apiKey },
      body: JSON.stringify({
        ...source,
        ...{ cpuCount: 1, memoryMB: 192, secure: true, timeout: 600 },
        attachedDrives: [
          { driveID: "base", source },
          { driveID: "work", source, readOnly: false, mountPath: "/work", subPath: "etc" },
        ],
      }),
    });
    const { sandboxID, message } = (await created.json()) as { sandboxID: string; message?: string };
    expect(created.status, message).toBe(201);
    took("cold boot with two drives", startedMs);
    let box = await Sandbox.connect(sandboxID, { ...connection, timeoutMs: 600_000 });
    const three = (await devices()).length;
    await shell(box, "echo kept > /work/kept; sync");
    expect(await shell(box, "echo no > /mnt/base/no 2>&1 || echo refused")).toContain("refused");
    await box.pause();
    expect((await devices()).length).toBe(three - 3);
    box = await Sandbox.connect(sandboxID, { ...connection, timeoutMs: 600_000 });
    await shell(box, "echo 3 > /proc/sys/vm/drop_caches");
    expect(await shell(box, "cat /work/kept /mnt/base/etc/passwd")).toBe(
      "kept\nroot:x:0:0:root:/root:/bin/sh\n",
    );
    await box.kill();
  });

  test("lives on when the block daemon and the server are killed", async () => {
    const pid = lockHolder(join(server.runtime, "blockd/lock"));
    if (pid === undefined) throw new Error("the block daemon does not run");
    process.kill(pid, "SIGKILL");
    expect(await shell(sandbox, "md5sum -c /root/sum; echo again > /root/again; sync; cat /root/again")).toBe(
      "/root/data: OK\nagain\n",
    );
    await server.kill9();
    await server.start();
    sandbox = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 600_000 });
    expect(await shell(sandbox, "cat /root/again /tmp/in-memory; md5sum -c /root/sum")).toBe(
      "again\nkept\n/root/data: OK\n",
    );
  });

  test("leaves nothing in the host or its kernel", async () => {
    await sandbox.kill();
    expect(await server.stop()).toBe(0);
    expect(await devices()).toEqual([]);
    expect(await hostObjects(server)).toEqual([]);
    expect(await complaints(firstLine)).toEqual([]);
  });
});
