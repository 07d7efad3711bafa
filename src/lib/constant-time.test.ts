import { expect, test } from "bun:test";
import { constantTimeEqual } from "./constant-time.ts";

test("a key or a token is equal as a whole or not at all", () => {
  const key = "4f00f2a93a87c37161ae01c59b6d4f84506668113441277e9f6272dd4bfae1a7";
  expect(constantTimeEqual(key, key)).toBeTrue();
  const others = [
    "",
    key.slice(1),
    key.slice(0, -1),
    `${key}0`,
    `${key}, ${key}`,
    ` ${key}`,
    key.toUpperCase(),
  ];
  for (const other of [...others, key.replace("4", "5"), `${key}\0`]) {
    expect(constantTimeEqual(key, other)).toBeFalse();
    expect(constantTimeEqual(other, key)).toBeFalse();
  }
});
