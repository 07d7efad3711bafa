import { join } from "node:path";
import { z } from "zod";
import depsDocument from "../../config/deps.toml";
import { errorCode, writeDurable } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";

const sha256 = z.string().regex(/^[0-9a-f]{64}$/);
const pinned = z.array(
  z.strictObject({ package: z.string(), version: z.string(), architecture: z.string(), sha256 }),
);

const depsSchema = z.strictObject({
  schema: z.literal(1),
  kernel: z.strictObject({
    series: z.string().regex(/^\d+\.\d+$/),
    flavour: z.string(),
    modules: z.array(z.string()),
    pinned,
  }),
  qemu: z.strictObject({
    minimum_version: z.string(),
    preferred_major: z.string(),
    oldest_version: z.string(),
    packages: z.array(z.string()).nonempty(),
    without: z.array(z.string()),
    keep: z.array(z.string()),
    pinned,
  }),
});

export type DependencyPins = z.infer<typeof depsSchema>;
export type PinnedPackage = z.infer<typeof pinned>[number];

/** `config/deps.toml` as embedded. */
export const dependencyPins: DependencyPins = depsSchema.parse(depsDocument);

/** A file under the dependency directory, as it was installed. */
const installedFile = z.strictObject({
  /** Relative to the dependency directory. */
  path: z.string(),
  sizeBytes: z.number().int(),
  sha256,
});
const installedPackage = z.strictObject({ name: z.string(), version: z.string(), sha256 });

const manifestSchema = z.strictObject({
  schema: z.literal(1),
  kernel: z
    .strictObject({
      /** What `uname -r` prints. */
      release: z.string(),
      packages: z.array(installedPackage),
      vmlinux: installedFile,
      /** In load order. */
      modules: z.array(installedFile),
    })
    .optional(),
  qemu: z
    .discriminatedUnion("source", [
      z.strictObject({
        source: z.literal("unpacked"),
        version: z.string(),
        packages: z.array(installedPackage),
        /** Directory of the unpacked tree, relative; files below with their paths from the dependency directory. */
        directory: z.string(),
        files: z.array(installedFile),
        binary: z.string(),
        dataDirs: z.array(z.string()),
        libraryDirs: z.array(z.string()),
      }),
      z.strictObject({
        source: z.literal("installed"),
        version: z.string(),
        /** Absolute, with what its file looked like when its version was asked. */
        binary: z.string(),
        sizeBytes: z.number().int(),
        mtimeMs: z.number(),
      }),
    ])
    .optional(),
});

export type InstalledManifest = z.infer<typeof manifestSchema>;
export type InstalledFile = z.infer<typeof installedFile>;
export type InstalledPackage = z.infer<typeof installedPackage>;
export type InstalledKernel = NonNullable<InstalledManifest["kernel"]>;
export type InstalledQemu = NonNullable<InstalledManifest["qemu"]>;

export const MANIFEST_NAME = "manifest.json";

/** What setup installed; an absent file reads as nothing installed, a damaged one is an error. */
export async function readManifest(depsDir: string): Promise<InstalledManifest> {
  const path = join(depsDir, MANIFEST_NAME);
  let text: string;
  try {
    text = await Bun.file(path).text();
  } catch (error) {
    if (errorCode(error) === "ENOENT") return { schema: 1 };
    throw error;
  }
  try {
    return manifestSchema.parse(JSON.parse(text));
  } catch (cause) {
    throw new AenvError({
      code: "deps_manifest_damaged",
      message: `${path} is damaged or was written by another version`,
      remediation: `run agentenv setup --deps ${depsDir} --force to install afresh`,
      cause,
    });
  }
}

export async function writeManifest(depsDir: string, manifest: InstalledManifest): Promise<void> {
  await writeDurable(
    join(depsDir, MANIFEST_NAME),
    `${JSON.stringify(manifestSchema.parse(manifest), null, 2)}\n`,
    0o644,
  );
}
