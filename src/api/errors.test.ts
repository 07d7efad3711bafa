import { expect, test } from "bun:test";
import { AenvError } from "../lib/errors.ts";
import { errorResponse } from "./errors.ts";

test("a full disk is told wherever it was noticed, other surprises are not explained", async () => {
  const full = Object.assign(new Error("ENOSPC: no space left on device, write"), { code: "ENOSPC" });
  for (const error of [full, new Error("the record was not stored", { cause: full })]) {
    const response = errorResponse(error);
    expect(response.status).toBe(507);
    expect(await response.json()).toMatchObject({ code: 507, error_code: "disk_full" });
  }
  const secret = errorResponse(new Error("/var/lib/aenv/secret"));
  expect(secret.status).toBe(500);
  expect(await secret.text()).not.toContain("secret");
  expect(errorResponse(new AenvError({ code: "x", status: 409, message: "m", cause: full })).status).toBe(
    409,
  );
});
