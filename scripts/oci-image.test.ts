import { afterEach, beforeEach, expect, test } from "bun:test";
import { mkdir, mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runCommand, tryCommand } from "../src/lib/command.ts";

const TOOL = join(import.meta.dir, "oci-image.ts");
const REGISTRY = join(import.meta.dir, "registry.sh");
let dir = "";

beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), "setup-oci-"));
});
afterEach(() => rm(dir, { recursive: true, force: true }));

const tool = (...args: string[]) => runCommand([process.execPath, TOOL, ...args]);
const sha256 = (bytes: Uint8Array) => `sha256:${new Bun.CryptoHasher("sha256").update(bytes).digest("hex")}`;

async function makeImage(content: string): Promise<string> {
  await mkdir(join(dir, "root"), { recursive: true });
  await writeFile(join(dir, "root", "file"), content);
  await runCommand(["tar", "-C", join(dir, "root"), "-cf", join(dir, "root.tar"), "."]);
  await tool("pack", join(dir, "root.tar"), join(dir, "image"));
  return join(dir, "image");
}

interface Descriptor {
  readonly digest: string;
  readonly size: number;
}

test("the layout holds what its digests say, and nothing of an earlier image", async () => {
  await makeImage("first");
  const image = await makeImage("second");
  const blobs = join(image, "blobs", "sha256");
  const names = await readdir(blobs);
  expect(names).toHaveLength(3);
  for (const name of names) expect(sha256(await Bun.file(join(blobs, name)).bytes())).toBe(`sha256:${name}`);
  const blob = (descriptor: Descriptor) => Bun.file(join(blobs, descriptor.digest.slice("sha256:".length)));
  const index = (await Bun.file(join(image, "index.json")).json()) as { manifests: Descriptor[] };
  const manifest = (await blob(index.manifests[0]!).json()) as { config: Descriptor; layers: Descriptor[] };
  const config = (await blob(manifest.config).json()) as {
    rootfs: { diff_ids: string[] };
    config: { Cmd: string[] };
  };
  const layer = await blob(manifest.layers[0]!).bytes();
  expect(layer.length).toBe(manifest.layers[0]!.size);
  const tar = Bun.gunzipSync(layer);
  expect(config.rootfs.diff_ids).toEqual([sha256(tar)]);
  expect(await runCommand(["tar", "-xO", "./file"], { stdin: tar })).toBe("second");
  expect(config.config.Cmd).toEqual(["bash"]);
});

test("wrong arguments and references are refused", async () => {
  expect((await tryCommand([process.execPath, TOOL])).exitCode).toBe(2);
  const { exitCode, stderr } = await tryCommand([process.execPath, TOOL, "push", dir, "https://x/y:z"]);
  expect(exitCode).toBe(1);
  expect(stderr).toContain("is not http://HOST:PORT/NAME:TAG");
});

const registryMissing = Bun.which("docker-registry") === null;
if (registryMissing) console.log("skipped: pushing to a registry (docker-registry is not installed)");

test.skipIf(registryMissing)(
  "a registry starts once, takes a push, keeps it over a restart and stops",
  async () => {
    const image = await makeImage("pushed");
    const storage = join(dir, "registry");
    try {
      const url = (await runCommand([REGISTRY, "start", storage])).trim();
      expect(url).toMatch(/^http:\/\/127\.0\.0\.1:\d+$/);
      expect((await runCommand([REGISTRY, "start", storage])).trim()).toBe(url);
      expect((await runCommand([REGISTRY, "url", storage])).trim()).toBe(url);
      expect(await tool("push", image, `${url}/some/image:tag`)).toContain(`pushed to ${url}/some/image:tag`);
      const fetchManifest = async (base: string) => {
        const response = await fetch(`${base}/v2/some/image/manifests/tag`, {
          headers: { accept: "application/vnd.oci.image.manifest.v1+json" },
        });
        return { status: response.status, digest: sha256(await response.bytes()) };
      };
      const index = (await Bun.file(join(image, "index.json")).json()) as { manifests: Descriptor[] };
      const digest = index.manifests[0]!.digest;
      expect(await fetchManifest(url)).toEqual({ status: 200, digest });
      await runCommand([REGISTRY, "stop", storage]);
      expect((await tryCommand([REGISTRY, "url", storage])).exitCode).toBe(1);
      const again = (await runCommand([REGISTRY, "start", storage])).trim();
      expect(await fetchManifest(again)).toEqual({ status: 200, digest });
    } finally {
      await runCommand([REGISTRY, "stop", storage]);
    }
  },
  120_000,
);
