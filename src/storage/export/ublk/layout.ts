/**
 * Layouts and numbers of the kernel's ublk interface (linux/ublk_cmd.h of Linux 6.12 and
 * Documentation/block/ublk.rst), all little endian.
 */

/** Control commands, ioctl-encoded. */
export const Control = {
  getDevInfo: 0x80207502,
  addDev: 0xc0207504,
  delDev: 0xc0207505,
  startDev: 0xc0207506,
  stopDev: 0xc0207507,
  setParams: 0xc0207508,
  getParams: 0x80207509,
  startUserRecovery: 0xc0207510,
  endUserRecovery: 0xc0207511,
  getFeatures: 0x80207513,
  delDevAsync: 0x80207514,
  updateSize: 0xc0207515,
} as const;

/** Bits of the feature mask and of a device's flags. */
export const Feature = {
  userRecovery: 3,
  userRecoveryReissue: 4,
  ioctlEncode: 6,
  userCopy: 7,
  updateSize: 10,
} as const;

export type FeatureName = keyof typeof Feature;

/** Works for bits up to 52. */
export function hasBit(mask: number, bit: number): boolean {
  return Math.floor(mask / 2 ** bit) % 2 === 1;
}

export function maskOf(names: readonly FeatureName[]): number {
  return names.reduce((mask, name) => mask + 2 ** Feature[name], 0);
}

export const Op = { read: 0, write: 1, flush: 2, discard: 3, writeZeroes: 5 } as const;

/** In a descriptor's flags: the write is on stable storage before it is answered. */
export const FUA = 1 << 13;

export const SECTOR_BYTES = 512;

/** State of a device, `ublksrv_ctrl_dev_info.state`. */
export const State = { dead: 0, live: 1, quiesced: 2 } as const;

export const DEV_INFO_BYTES = 64;

/** `ublksrv_ctrl_dev_info`. */
export interface DevInfo {
  readonly queueDepth: number;
  readonly state: number;
  readonly maxIoBytes: number;
  readonly id: number;
  readonly serverPid: number;
  readonly flags: number;
  /** Free for the server's use; the kernel hands it back as it was given. */
  readonly stamp: number;
}

export function encodeDevInfo(info: {
  readonly queueDepth: number;
  readonly maxIoBytes: number;
  /** -1: the kernel picks. */
  readonly id: number;
  readonly flags: number;
  readonly stamp: number;
}): Uint8Array {
  const bytes = new Uint8Array(new ArrayBuffer(DEV_INFO_BYTES));
  const view = new DataView(bytes.buffer);
  view.setUint16(0, 1, true);
  view.setUint16(2, info.queueDepth, true);
  view.setUint32(8, info.maxIoBytes, true);
  view.setInt32(12, info.id, true);
  view.setBigUint64(24, BigInt(info.flags), true);
  view.setBigUint64(32, BigInt(info.stamp), true);
  return bytes;
}

export function decodeDevInfo(bytes: Uint8Array): DevInfo {
  const view = new DataView(bytes.buffer, bytes.byteOffset, DEV_INFO_BYTES);
  return {
    queueDepth: view.getUint16(2, true),
    state: view.getUint16(4, true),
    maxIoBytes: view.getUint32(8, true),
    id: view.getUint32(12, true),
    serverPid: view.getInt32(16, true),
    flags: Number(view.getBigUint64(24, true)),
    stamp: Number(view.getBigUint64(32, true)),
  };
}

export const PARAMS_BYTES = 112;
const TYPE_BASIC = 1;
const TYPE_DISCARD = 2;
const ATTR_READ_ONLY = 1;
const ATTR_VOLATILE_CACHE = 4;
const ATTR_FUA = 8;
/** Longest discard or write of zeros in one request, 1 GiB: an index change, no data. */
const MAX_DISCARD_SECTORS = 1 << 21;

/** `ublk_params`: 512-byte blocks, 4 KiB preferred; a write cache that flush and FUA empty. */
export function encodeParams(device: {
  readonly sizeBytes: number;
  readonly readOnly: boolean;
  readonly maxIoBytes: number;
}): Uint8Array {
  const bytes = new Uint8Array(new ArrayBuffer(PARAMS_BYTES));
  const view = new DataView(bytes.buffer);
  view.setUint32(0, PARAMS_BYTES, true);
  view.setUint32(4, TYPE_BASIC | (device.readOnly ? 0 : TYPE_DISCARD), true);
  view.setUint32(8, device.readOnly ? ATTR_READ_ONLY : ATTR_VOLATILE_CACHE | ATTR_FUA, true);
  view.setUint8(12, 9); // logical block: 512
  view.setUint8(13, 12); // physical block: 4096
  view.setUint8(14, 16); // optimal I/O: 64 KiB
  view.setUint8(15, 12); // minimum I/O: 4096
  view.setUint32(16, device.maxIoBytes / SECTOR_BYTES, true);
  view.setBigUint64(24, BigInt(device.sizeBytes / SECTOR_BYTES), true);
  if (!device.readOnly) {
    view.setUint32(44, 4096, true); // discard granularity
    view.setUint32(48, MAX_DISCARD_SECTORS, true);
    view.setUint32(52, MAX_DISCARD_SECTORS, true);
    view.setUint16(56, 1, true);
  }
  return bytes;
}

/** Size in bytes out of `ublk_params`. */
export function paramsSizeBytes(bytes: Uint8Array): number {
  return Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(24, true)) * SECTOR_BYTES;
}
