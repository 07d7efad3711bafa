import { expect, test } from "bun:test";
import {
  decodeDevInfo,
  encodeDevInfo,
  encodeParams,
  Feature,
  hasBit,
  maskOf,
  paramsSizeBytes,
} from "./layout.ts";

/** What a 6.12 kernel answers to GET_FEATURES: bits 1 to 8. */
const LINUX_6_12 = 0x1fe;

test("feature masks", () => {
  for (const name of ["userRecovery", "userRecoveryReissue", "ioctlEncode", "userCopy"] as const)
    expect([name, hasBit(LINUX_6_12, Feature[name])]).toEqual([name, true]);
  expect(hasBit(LINUX_6_12, Feature.updateSize)).toBe(false);
  expect(hasBit(2 ** 40, 40)).toBe(true);
  expect(maskOf(["userRecovery", "userRecoveryReissue", "ioctlEncode", "userCopy"])).toBe(0b1101_1000);
});

test("a device's description has its fields where the kernel looks for them", () => {
  const bytes = encodeDevInfo({
    queueDepth: 64,
    maxIoBytes: 524_288,
    id: -1,
    flags: 0xd8,
    stamp: 2 ** 48 - 1,
  });
  expect(Buffer.from(bytes).toString("hex")).toBe(
    [
      "0100", // queues
      "4000", // depth
      "0000", // state
      "0000",
      "00000800", // bytes a request
      "ffffffff", // id: the kernel picks
      "00000000", // server's pid
      "00000000",
      "d800000000000000", // flags
      "ffffffffffff0000", // the server's own
      "00".repeat(24),
    ].join(""),
  );
  expect(decodeDevInfo(bytes)).toMatchObject({
    queueDepth: 64,
    state: 0,
    maxIoBytes: 524_288,
    flags: 0xd8,
    stamp: 2 ** 48 - 1,
  });
});

test("parameters say size, cache and discards; a read-only device has neither of the last", () => {
  const size = 64 * 2 ** 30;
  const writable = encodeParams({ sizeBytes: size, readOnly: false, maxIoBytes: 524_288 });
  const view = new DataView(writable.buffer);
  const u32 = (at: number) => view.getUint32(at, true);
  expect(writable.length).toBe(112);
  expect([u32(0), u32(4), u32(8)]).toEqual([112, 3, 4 | 8]);
  expect([...writable.subarray(12, 16)]).toEqual([9, 12, 16, 12]);
  expect(u32(16)).toBe(1024);
  expect(paramsSizeBytes(writable)).toBe(size);
  expect([u32(44), u32(48), u32(52), view.getUint16(56, true)]).toEqual([4096, 1 << 21, 1 << 21, 1]);

  const readOnly = new DataView(
    encodeParams({ sizeBytes: size, readOnly: true, maxIoBytes: 524_288 }).buffer,
  );
  expect([readOnly.getUint32(4, true), readOnly.getUint32(8, true), readOnly.getUint32(48, true)]).toEqual([
    1, 1, 0,
  ]);
});
