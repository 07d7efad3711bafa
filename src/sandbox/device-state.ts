import { readFile } from "node:fs/promises";
import { AenvError } from "../lib/errors.ts";
import type { DeviceStateSum } from "./types.ts";

/** Reads the file whole: some ten KB. At 64 KiB that and the sum take 0.1 ms, at 1 MiB a little more than one. */
export async function sumDeviceState(path: string): Promise<DeviceStateSum> {
  return sumOf(await readFile(path));
}

function sumOf(bytes: Uint8Array): DeviceStateSum {
  return { sizeBytes: bytes.length, digest: `sha256:${Bun.SHA256.hash(bytes, "hex")}` };
}

/**
 * Whether the file still is what was written. A VMM would take most of what is changed in it, and the guest go on with
 * other registers. `written` undefined: the state was captured before there were sums, and is taken as it is. Error
 * `device_state_damaged` 500.
 */
export async function verifyDeviceState(path: string, written: DeviceStateSum | undefined): Promise<void> {
  if (written === undefined) return;
  let bytes: Uint8Array;
  try {
    bytes = await readFile(path);
  } catch (cause) {
    throw damaged(`the device state ${path} cannot be read`, cause);
  }
  const found = sumOf(bytes);
  if (found.sizeBytes !== written.sizeBytes) {
    throw damaged(
      `the device state ${path} has ${found.sizeBytes} bytes where ${written.sizeBytes} were written`,
    );
  }
  if (found.digest !== written.digest) {
    throw damaged(`the device state ${path} is damaged: ${found.digest} where ${written.digest} was written`);
  }
}

function damaged(message: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "device_state_damaged",
    message,
    remediation:
      "restore that file from a backup and check the disk it lies on; without a backup, delete the sandbox, snapshot or template it belongs to",
    ...(cause === undefined ? {} : { cause }),
  });
}
