import { AenvError } from "../lib/errors.ts";

const GZIP = [0x1f, 0x8b];
const ZSTD = [0x28, 0xb5, 0x2f, 0xfd];
const startsWith = (bytes: Uint8Array, magic: readonly number[]) =>
  magic.every((byte, i) => bytes[i] === byte);

function invalid(what: string, why: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "kernel_image_invalid",
    message: `${what} is not a usable kernel image: ${why}`,
    remediation: "give an x86_64 Linux kernel as ELF vmlinux, or as bzImage compressed with zstd or gzip",
    cause,
  });
}

/** True for a 64-bit x86-64 ELF executable. */
export function isElfKernel(bytes: Uint8Array): boolean {
  if (bytes.length < 64 || !startsWith(bytes, [0x7f, 0x45, 0x4c, 0x46, 2, 1])) return false;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const EM_X86_64 = 62;
  return view.getUint16(18, true) === EM_X86_64;
}

/**
 * The ELF kernel that a bzImage unpacks at boot. The x86 boot protocol (Documentation/arch/x86/boot.rst)
 * says where: setup_sects at 0x1f1, "HdrS" at 0x202, payload_offset at 0x248 (counted from the end of the
 * setup sectors) and payload_length at 0x24c, whose last 4 bytes are the uncompressed size.
 */
export function extractVmlinux(what: string, image: Uint8Array): Uint8Array {
  if (image.length < 0x250) throw invalid(what, "it is too short");
  const view = new DataView(image.buffer, image.byteOffset, image.byteLength);
  if (view.getUint16(0x1fe, true) !== 0xaa55 || view.getUint32(0x202, true) !== 0x53726448) {
    throw invalid(what, "it is neither an ELF file nor a bzImage");
  }
  if (view.getUint16(0x206, true) < 0x208) throw invalid(what, "its boot protocol is older than 2.08");
  const setupSectors = view.getUint8(0x1f1) || 4;
  const offset = (setupSectors + 1) * 512 + view.getUint32(0x248, true);
  const length = view.getUint32(0x24c, true);
  if (length < 8 || offset + length > image.length) throw invalid(what, "it is truncated");
  const sizeField = view.getUint32(offset + length - 4, true);
  const payload = image.subarray(offset, offset + length);
  let kernel: Uint8Array;
  try {
    if (startsWith(payload, ZSTD)) kernel = Bun.zstdDecompressSync(copy(payload.subarray(0, length - 4)));
    else if (startsWith(payload, GZIP)) kernel = Bun.gunzipSync(copy(payload));
    else throw invalid(what, "its payload is compressed with neither zstd nor gzip");
  } catch (cause) {
    if (cause instanceof AenvError) throw cause;
    throw invalid(what, "its payload cannot be decompressed", cause);
  }
  if (kernel.length !== sizeField)
    throw invalid(what, `its payload has ${kernel.length} bytes, its header says ${sizeField}`);
  if (!isElfKernel(kernel)) throw invalid(what, "its payload is not an x86-64 ELF file");
  return kernel;
}

function copy(bytes: Uint8Array): Uint8Array<ArrayBuffer> {
  return new Uint8Array(bytes);
}

/** The release in the kernel's own banner (`Linux version 6.12.95+… (`), which is what `uname -r` prints. */
export function kernelRelease(what: string, vmlinux: Uint8Array): string {
  const buffer = Buffer.from(vmlinux.buffer, vmlinux.byteOffset, vmlinux.byteLength);
  const marker = "Linux version ";
  for (let at = buffer.indexOf(marker); at >= 0; at = buffer.indexOf(marker, at + 1)) {
    const release = /^(\d+\.\d+[!-~]*) \(/.exec(buffer.toString("latin1", at + marker.length, at + 256))?.[1];
    if (release !== undefined) return release;
  }
  throw invalid(what, "it carries no version banner");
}
