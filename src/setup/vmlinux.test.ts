import { expect, test } from "bun:test";
import { makeBzImage, makeVmlinux } from "./testing.ts";
import { extractVmlinux, isElfKernel, kernelRelease } from "./vmlinux.ts";

const RELEASE = "6.12.95+deb12-cloud-amd64";

test.each(["zstd", "gzip"] as const)("the kernel comes out of a %s bzImage unchanged", (compression) => {
  const vmlinux = makeVmlinux(RELEASE);
  const extracted = extractVmlinux("vmlinuz", makeBzImage(vmlinux, compression));
  expect(Buffer.compare(extracted, vmlinux)).toBe(0);
  expect(isElfKernel(extracted)).toBe(true);
  expect(kernelRelease("vmlinux", extracted)).toBe(RELEASE);
});

test("anything else is refused with the reason", () => {
  const image = makeBzImage(makeVmlinux(RELEASE));
  const altered = (offset: number, value: number) => {
    const copy = Buffer.from(image);
    copy[offset] = value;
    return copy;
  };
  expect(() => extractVmlinux("k", Buffer.from("short"))).toThrow("too short");
  expect(() => extractVmlinux("k", Buffer.alloc(4096))).toThrow("neither an ELF file nor a bzImage");
  expect(() => extractVmlinux("k", altered(0x206, 0).fill(0, 0x207, 0x208))).toThrow("boot protocol");
  expect(() => extractVmlinux("k", image.subarray(0, 1400))).toThrow("truncated");
  expect(() => extractVmlinux("k", makeBzImage(makeVmlinux(RELEASE), "none"))).toThrow(
    "neither zstd nor gzip",
  );
  const payloadAt = image.readUInt32LE(0x248) + 1024;
  expect(() => extractVmlinux("k", altered(payloadAt + 20, image[payloadAt + 20]! ^ 0xff))).toThrow();
  expect(() => extractVmlinux("k", makeBzImage(Buffer.from("not a kernel at all")))).toThrow(
    "not an x86-64 ELF",
  );
  expect(() => kernelRelease("k", Buffer.from("Linux version of nothing"))).toThrow("no version banner");
});
