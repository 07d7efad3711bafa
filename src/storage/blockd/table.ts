import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, renameSync, rmSync } from "node:fs";
import { open, rename, rm } from "node:fs/promises";
import { join } from "node:path";
import type { Logger } from "../../lib/log.ts";
import { type DeviceRecord, describeIssues, recordSchema } from "./schema.ts";

/** A short name for a device that fits into a socket's path whatever its id is. */
export function fileStem(deviceId: string): string {
  return createHash("sha256").update(deviceId).digest("hex").slice(0, 20);
}

/**
 * The devices on disk, one JSON file each, so that a change costs the same however many there are.
 * A change is on stable storage when its call returns.
 */
export class DeviceTable {
  readonly #dir: string;

  constructor(runtimeDir: string) {
    this.#dir = join(runtimeDir, "devices");
    mkdirSync(this.#dir, { recursive: true, mode: 0o700 });
  }

  #path(deviceId: string): string {
    return join(this.#dir, `${fileStem(deviceId)}.json`);
  }

  /** A file that cannot be understood is set aside under another name and logged. */
  load(log: Logger): DeviceRecord[] {
    const records: DeviceRecord[] = [];
    for (const name of readdirSync(this.#dir).sort()) {
      const path = join(this.#dir, name);
      if (name.endsWith(".tmp")) rmSync(path, { force: true });
      if (!name.endsWith(".json")) continue;
      const reason = this.#read(path, records);
      if (reason === undefined) continue;
      renameSync(path, `${path}.corrupt`);
      log.error({ file: `${path}.corrupt`, reason }, "device record cannot be read and was set aside");
    }
    return records;
  }

  #read(path: string, into: DeviceRecord[]): string | undefined {
    let value: unknown;
    try {
      value = JSON.parse(readFileSync(path, "utf8"));
    } catch (error) {
      return error instanceof Error ? error.message : String(error);
    }
    const parsed = recordSchema.safeParse(value);
    if (!parsed.success) return describeIssues(parsed.error);
    if (this.#path(parsed.data.spec.deviceId) !== path) return "the file's name is not that of its device";
    into.push(parsed.data);
    return undefined;
  }

  async save(record: DeviceRecord): Promise<void> {
    const path = this.#path(record.spec.deviceId);
    const temporary = `${path}.tmp`;
    const file = await open(temporary, "w", 0o600);
    try {
      await file.writeFile(JSON.stringify(record));
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(temporary, path);
    await this.#syncDirectory();
  }

  async remove(deviceId: string): Promise<void> {
    await rm(this.#path(deviceId), { force: true });
    await this.#syncDirectory();
  }

  async #syncDirectory(): Promise<void> {
    const dir = await open(this.#dir, "r");
    try {
      await dir.sync();
    } finally {
      await dir.close();
    }
  }
}
