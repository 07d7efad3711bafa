/**
 * Conversion of an image of about 1 GiB with many small files (this machine's own /usr, or AENV_BENCH_TREES)
 * beside what the usual tools take for the same layer on the same disk, peak memory, and pulls that find
 * something in the cache.
 */
import { createWriteStream, existsSync } from "node:fs";
import { mkdir, mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pipeline } from "node:stream/promises";
import { runCommand } from "../../src/lib/command.ts";
import { startImageRig } from "../support/image-rig.ts";
import { buildImage, writeLayout } from "../support/oci.ts";
import { findOverlaybdTools, planOverlaybdApply } from "../support/overlaybd-tools.ts";

const LIMIT_BYTES = Number(process.env.AENV_BENCH_IMAGE_MIB ?? 1024) * 2 ** 20;
const TREES = (
  process.env.AENV_BENCH_TREES ??
  "/usr/lib/python3 /usr/lib/python3.11 /usr/share /usr/include /usr/lib /usr/bin"
).split(" ");
const COMMAND_MS = 600_000;

const row = (name: string, value: string, note = ""): void =>
  console.log(`| ${name.padEnd(46)} | ${value.padStart(16)} | ${note}`);
const MIB = 2 ** 20;

/** Files of the trees in their order until the size is reached. */
async function chooseFiles(): Promise<{ list: string; files: number; bytes: number }> {
  const trees = TREES.filter((tree) => existsSync(tree));
  const found = await runCommand(["find", ...trees, "-xdev", "-printf", "%s %y %p\\n"], {
    timeoutMs: 60_000,
  });
  const list = new Set<string>();
  let bytes = 0;
  for (const line of found.split("\n")) {
    const match = /^(\d+) (\w) (.+)$/.exec(line);
    if (match === null || bytes >= LIMIT_BYTES) continue;
    const size = match[2] === "f" ? Number(match[1]) : 0;
    if (size > LIMIT_BYTES / 10 || list.has(match[3]!)) continue;
    bytes += size;
    list.add(match[3]!.slice(1));
  }
  return { list: `${[...list].join("\n")}\n`, files: list.size, bytes };
}

async function timed(work: () => Promise<unknown>): Promise<number> {
  const began = performance.now();
  await work();
  return (performance.now() - began) / 1000;
}

async function peakMiB(pid: number | "self"): Promise<number> {
  const status = await readFile(`/proc/${pid}/status`, "utf8").catch(() => "");
  return Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024;
}

/** Highest memory of the helper processes below this one, looked at now and then. */
function watchHelper(): { stop(): number } {
  let peak = 0;
  const look = async (): Promise<void> => {
    for (const pid of await readdir("/proc")) {
      if (!/^\d+$/.test(pid)) continue;
      const name = await readFile(`/proc/${pid}/comm`, "utf8").catch(() => "");
      if (name.trim() === "aenv-ext4") peak = Math.max(peak, await peakMiB(Number(pid)));
    }
  };
  const timer = setInterval(() => void look(), 250);
  return {
    stop() {
      clearInterval(timer);
      return peak;
    },
  };
}

const work = await mkdtemp(join(process.env.AENV_BENCH_DIR ?? tmpdir(), "image6-bench-"));
const rig = await startImageRig();
try {
  const chosen = await chooseFiles();
  const list = join(work, "list");
  await writeFile(list, chosen.list);
  const tar = join(work, "layer.tar");
  await runCommand(["tar", "--no-recursion", "-C", "/", "-cf", tar, "-T", list], { timeoutMs: COMMAND_MS });
  const tarBytes = (await stat(tar)).size;
  const sha256 = async (path: string) => {
    const hasher = new Bun.CryptoHasher("sha256");
    for await (const chunk of Bun.file(path).stream()) hasher.update(chunk);
    return `sha256:${hasher.digest("hex")}`;
  };
  const diffId = await sha256(tar);
  await runCommand(["gzip", "-1", "-k", tar], { timeoutMs: COMMAND_MS });
  const layerFile = `${tar}.gz`;
  const layer = { digest: await sha256(layerFile), size: (await stat(layerFile)).size };
  await rm(tar);

  // A layout with the big layer, and one that shares it and adds a little on top.
  const layout = join(work, "layout");
  const small = buildImage({ layers: [{ entries: [{ path: "added", content: "x" }] }] });
  const type = "application/vnd.oci.image.layer.v1.tar+gzip";
  const descriptor = { mediaType: type, ...layer };
  const rewrite = (
    layers: readonly { digest: string; size: number; mediaType: string }[],
    diffIds: string[],
  ) => {
    const json = (value: unknown, mediaType: string) => {
      const bytes = Buffer.from(JSON.stringify(value));
      const digest = `sha256:${new Bun.CryptoHasher("sha256").update(bytes).digest("hex")}`;
      return { bytes, descriptor: { mediaType, digest, size: bytes.length } };
    };
    const config = json(
      {
        architecture: process.arch === "x64" ? "amd64" : process.arch,
        os: "linux",
        config: {},
        rootfs: { type: "layers", diff_ids: diffIds },
      },
      "application/vnd.oci.image.config.v1+json",
    );
    const manifest = json(
      { schemaVersion: 2, config: config.descriptor, layers },
      "application/vnd.oci.image.manifest.v1+json",
    );
    return {
      descriptor: manifest.descriptor,
      layers,
      blobs: new Map([config, manifest].map(({ bytes, descriptor: { digest } }) => [digest, bytes])),
    };
  };
  const smallConfig = JSON.parse(
    Buffer.from(
      [...small.blobs.values()].find((bytes) => Buffer.from(bytes).includes("diff_ids"))!,
    ).toString(),
  ) as { rootfs: { diff_ids: string[] } };
  const one = rewrite([descriptor], [diffId]);
  const two = rewrite([descriptor, small.layers[0]!], [diffId, ...smallConfig.rootfs.diff_ids]);
  await writeLayout(layout, { one, two, small });
  await pipeline(
    Bun.file(layerFile).stream(),
    createWriteStream(join(layout, "blobs/sha256", layer.digest.slice("sha256:".length))),
  );

  console.log(
    `\nImage conversion: ${chosen.files} entries, ${(tarBytes / MIB).toFixed(0)} MiB of tar, ${(layer.size / MIB).toFixed(0)} MiB as gzip -1\n`,
  );
  console.log(`| ${"what".padEnd(46)} | ${"figure".padStart(16)} |`);
  console.log(`|${"-".repeat(48)}|${"-".repeat(18)}|`);
  const sh = (script: string) => runCommand(["bash", "-ec", script], { timeoutMs: COMMAND_MS });
  const speed = (seconds: number) => `${(tarBytes / MIB / seconds).toFixed(0)} MiB/s`;

  const plain = join(work, "plain");
  await mkdir(plain);
  const untar = await timed(() => sh(`gzip -dc ${layerFile} | tar -x -C ${plain}; sync -f ${plain}`));
  await rm(plain, { recursive: true });
  row("gzip -dc | tar x, synced", `${untar.toFixed(1)} s`, speed(untar));

  const image = join(work, "kernel.ext4");
  const kernel = await timed(() =>
    sh(`truncate -s 8G ${image}; mke2fs -q -t ext4 -O ^has_journal ${image}; mkdir ${image}.d; mount -o loop ${image} ${image}.d
trap 'umount ${image}.d' EXIT; gzip -dc ${layerFile} | tar -x -C ${image}.d`),
  ).catch((error: unknown) => {
    row("kernel ext4 mount", "not possible", String(error).slice(0, 80));
    return Number.NaN;
  });
  await rm(image, { force: true });
  if (!Number.isNaN(kernel))
    row("gzip -dc | tar x into a mounted ext4 image", `${kernel.toFixed(1)} s`, speed(kernel));

  // Where somebody has it: a new writable layer with a file system, the layer applied to it.
  const tools = findOverlaybdTools();
  let reference = Number.NaN;
  if (tools === undefined) row("overlaybd-apply", "-", "not installed (PATH, /opt/overlaybd/bin)");
  else {
    const plan = planOverlaybdApply(tools, { layerFile, workDir: work, virtualSizeGiB: 64 });
    for (const [path, content] of plan.files) await writeFile(path, content);
    reference = await timed(async () => {
      for (const command of plan.commands) await runCommand(command, { timeoutMs: COMMAND_MS });
    }).catch((error: unknown) => {
      row("overlaybd-apply", "failed", String(error).slice(0, 80));
      return Number.NaN;
    });
    if (!Number.isNaN(reference))
      row("overlaybd-create, overlaybd-apply, synced", `${reference.toFixed(1)} s`, speed(reference));
  }

  const service = rig.service({ virtualSizeBytes: 64 * 2 ** 30 });
  const resolve = (tag: string) => service.resolve(`oci-layout:${layout}:${tag}`);
  Bun.gc(true);
  await writeFile("/proc/self/clear_refs", "5");
  const before = await peakMiB("self");
  const helper = watchHelper();
  const first = await timed(() => resolve("one"));
  const helperPeak = helper.stop();
  row("conversion: verify, unpack, ext4, commit, sync", `${first.toFixed(1)} s`, speed(first));
  row("ratio to gzip -dc | tar x", (first / untar).toFixed(2), "less is better");
  if (!Number.isNaN(kernel)) row("ratio to the mounted ext4 image", (first / kernel).toFixed(2));
  if (!Number.isNaN(reference)) row("ratio to overlaybd-apply", (first / reference).toFixed(2));
  row(
    "peak memory of the server's part",
    `${(await peakMiB("self")).toFixed(0)} MiB`,
    `${before.toFixed(0)} MiB before`,
  );
  row("peak memory of the ext4 helper", `${helperPeak.toFixed(0)} MiB`);
  const { rssBytes } = await rig.blockClient.stats();
  row("memory of the block daemon afterwards", `${(rssBytes / MIB).toFixed(0)} MiB`);
  const again = await timed(() => resolve("one"));
  row("second pull", `${(again * 1000).toFixed(1)} ms`, "all from the cache");
  const shared = await timed(() => resolve("two"));
  row(
    "pull of an image that shares the layer",
    `${(shared * 1000).toFixed(0)} ms`,
    "one small layer converted",
  );
  const restarted = rig.service({ virtualSizeBytes: 64 * 2 ** 30 });
  const cold = await timed(() => restarted.resolve(`oci-layout:${layout}:one`));
  row("first use after a restart", `${(cold * 1000).toFixed(0)} ms`, "every cached byte is hashed once");
} finally {
  await rig[Symbol.asyncDispose]();
  await rm(work, { recursive: true, force: true });
}
