import { createHash } from "node:crypto";
import { chmodSync, mkdirSync, readFileSync, renameSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import ext4Path from "../../build/aenv-ext4" with { type: "file" };
import jailPath from "../../build/aenv-jail" with { type: "file" };
import envdPath from "../../build/envd" with { type: "file" };
import shieldPath from "../../build/memshield.so" with { type: "file" };

/** Native helpers embedded in the executable. */
const ASSETS = {
  /** Guest init and agent, static. */
  envd: envdPath,
  /** Writes tar entries into an ext4 file system over NBD, static. */
  "aenv-ext4": ext4Path,
  /** Shuts a VMM in before it starts, static. */
  "aenv-jail": jailPath,
  /** Preloaded into QEMU. */
  memshield: shieldPath,
} as const;

export type AssetName = keyof typeof ASSETS;

export function readAsset(name: AssetName): Uint8Array {
  return readFileSync(ASSETS[name]);
}

/** Puts an embedded program into `dir` under a name that carries its content's hash; returns the path. */
export function installAsset(name: AssetName, dir: string): string {
  const bytes = readAsset(name);
  const path = join(dir, `${name}-${createHash("sha256").update(bytes).digest("hex").slice(0, 16)}`);
  const present = statSync(path, { throwIfNoEntry: false });
  if (present?.isFile() && present.size === bytes.length) return path;
  mkdirSync(dir, { recursive: true });
  const temporary = `${path}.${process.pid}.tmp`;
  writeFileSync(temporary, bytes, { mode: 0o755 });
  chmodSync(temporary, 0o755);
  renameSync(temporary, path);
  return path;
}
