import { expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { newId } from "../lib/ids.ts";
import type { SandboxRecord } from "../orchestrator/types.ts";
import { SignedUrls } from "./signed.ts";

const sandboxes = (count: number, patch: Partial<SandboxRecord> = {}) =>
  Array.from(
    { length: count },
    () => ({ id: newId(), state: "running", secure: true, ...patch }) as SandboxRecord,
  );

const token = (id: string) => `token of ${id}`;

function sign(id: string, path: string, operation = "read", expiration?: number) {
  const text = [path, operation, "", token(id), ...(expiration === undefined ? [] : [expiration])].join(":");
  const signature = `v1_${createHash("sha256").update(text).digest("base64").replaceAll("=", "")}`;
  return new URLSearchParams({
    path,
    signature,
    ...(expiration === undefined ? {} : { signature_expiration: String(expiration) }),
  });
}

function rig(records: readonly SandboxRecord[]) {
  const state = { records: [...records], now: 1_800_000_000_000, derived: 0 };
  const urls = new SignedUrls(
    {
      list: () => state.records,
      accessToken: (id) => {
        state.derived++;
        return token(id);
      },
    },
    () => state.now,
  );
  return { state, find: (query: URLSearchParams, method = "GET") => urls.find({ method, query }) };
}

test("the sandbox whose token signed it is found, for its operation alone", () => {
  const records = sandboxes(50);
  const { find } = rig(records);
  const { id } = records[31]!;
  expect(find(sign(id, "/a b/ü+%"))).toEqual({ kind: "found", sandboxId: id });
  expect(find(sign(id, "/x"), "HEAD")).toEqual({ kind: "found", sandboxId: id });
  expect(find(sign(id, "/x"), "POST").kind).toBe("refused");
  expect(find(sign(id, "/x", "write"), "POST")).toEqual({ kind: "found", sandboxId: id });
  expect(find(sign(id, "/x"), "DELETE").kind).toBe("refused");
});

test("tampered, foreign, expired and malformed ones are refused", () => {
  const records = sandboxes(3);
  const { find, state } = rig(records);
  const { id } = records[0]!;
  const tampered = sign(id, "/x");
  tampered.set("path", "/y");
  expect(find(tampered)).toEqual({ kind: "refused", reason: "invalid signature" });
  expect(find(sign(newId(), "/x")).kind).toBe("refused");
  const seconds = state.now / 1000;
  expect(find(sign(id, "/x", "read", seconds + 5)).kind).toBe("found");
  expect(find(sign(id, "/x", "read", seconds))).toEqual({
    kind: "refused",
    reason: "signature is already expired",
  });
  expect(find(new URLSearchParams("path=/x&signature=short")).kind).toBe("refused");
  expect(find(new URLSearchParams("path=/x")).kind).toBe("refused");
});

test("only running and secured sandboxes count", () => {
  const [paused] = sandboxes(1, { state: "paused" });
  const [open] = sandboxes(1, { secure: false });
  const { find } = rig([paused!, open!]);
  expect(find(sign(paused!.id, "/x")).kind).toBe("refused");
  expect(find(sign(open!.id, "/x")).kind).toBe("refused");
});

test("guessing is slowed down; what was found before is found without a search", () => {
  const records = sandboxes(1000);
  const { find, state } = rig(records);
  const good = sign(records[0]!.id, "/x");
  expect(find(good).kind).toBe("found");
  const kinds = Array.from({ length: 30 }, (_, i) => find(sign(newId(), `/${i}`)).kind);
  expect(kinds).toContain("busy");
  expect(state.derived).toBeLessThanOrEqual(21_000);
  expect(find(good).kind).toBe("found");
  state.now += 1000;
  expect(find(sign(newId(), "/later")).kind).toBe("refused");
  state.records = state.records.slice(1);
  state.now += 1000;
  expect(find(good).kind).toBe("refused");
});
