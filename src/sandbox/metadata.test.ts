import { expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { guestMetadata } from "./factory.ts";

test("a guest's metadata has its ids, and its token only by the hash", () => {
  const identity = { sandboxId: "s-1", templateId: "t-1", envVars: {} };
  const hash = (text: string) => createHash("sha512").update(text).digest("hex");
  const secured = guestMetadata({ ...identity, accessToken: "secret" });
  expect(secured).toEqual({ instanceID: "s-1", envID: "t-1", address: "", accessTokenHash: hash("secret") });
  expect(JSON.stringify(secured)).not.toContain('secret"');
  expect(guestMetadata(identity).accessTokenHash).toBe(hash(""));
});
