import { expect, test } from "bun:test";
import { deriveEnvdToken, deriveTrafficToken } from "./tokens.ts";

test("tokens equal the published vectors", () => {
  const id = "01936f8e-72f5-7000-8000-000000000001";
  expect(deriveEnvdToken("test-seed", id)).toBe(
    "4f00f2a93a87c37161ae01c59b6d4f84506668113441277e9f6272dd4bfae1a7",
  );
  expect(deriveTrafficToken("test-seed", id)).toBe(
    "586547d7c10facb0f4871297fdbfd9d2b4376f4b02b2e1487646c1c87a293bd8",
  );
});
