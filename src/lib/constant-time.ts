import { createHash, timingSafeEqual } from "node:crypto";

/** Compares two texts in time that depends on neither: both are hashed first, so lengths do not matter. */
export function constantTimeEqual(a: string, b: string): boolean {
  return timingSafeEqual(createHash("sha256").update(a).digest(), createHash("sha256").update(b).digest());
}
