import { open } from "node:fs/promises";
import { AenvError } from "../lib/errors.ts";

/** The banner every Linux image carries: `Linux version 6.12.95+deb12-cloud-amd64 (…`. */
const BANNER = "Linux version ";
const CHUNK = 4 << 20;

/** Release of an uncompressed kernel image, read from its banner. */
export async function readKernelVersion(path: string): Promise<string> {
  const file = await open(path, "r").catch((cause: unknown) => {
    throw new AenvError({
      code: "kernel_not_found",
      message: `cannot open the guest kernel ${path}`,
      remediation: "run agentenv setup, or set [kernel].image_path to an uncompressed kernel (vmlinux)",
      cause,
    });
  });
  try {
    const buffer = Buffer.alloc(CHUNK);
    // Chunks overlap so that a banner across a border is seen whole.
    for (let offset = 0; ; offset += CHUNK - 256) {
      const { bytesRead } = await file.read(buffer, 0, CHUNK, offset);
      if (bytesRead === 0) break;
      const found = buffer.subarray(0, bytesRead).indexOf(BANNER);
      if (found < 0) continue;
      const release = /^\d+\.\d+[^\s(]*/.exec(
        buffer.toString("latin1", found + BANNER.length, found + BANNER.length + 128),
      );
      if (release !== null) return release[0];
    }
  } finally {
    await file.close();
  }
  throw new AenvError({
    code: "kernel_invalid",
    message: `${path} is not an uncompressed Linux kernel (no version banner in it)`,
    remediation: "set [kernel].image_path to a vmlinux, not a compressed bzImage",
  });
}
