import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { fakeState } from "../../tests/support/fake-sandboxes.ts";
import { silent } from "../../tests/support/orchestrator.ts";
import { newId } from "../lib/ids.ts";
import type { PausedState } from "../sandbox/types.ts";
import { type PausedDocument, SandboxStore } from "./store.ts";

const base = mkdtempSync("/tmp/orch-store-");
afterAll(() => rmSync(base, { recursive: true, force: true }));

test("paused sandboxes of each version of a state are found, another version's are left alone", () => {
  using store = new SandboxStore(join(base, "records.db"), silent);
  const paused = (version: number): string => {
    const id = newId();
    const state = { ...fakeState(join(base, id), 1), version } as PausedState;
    const record = { id } as PausedDocument["record"];
    store.setPaused({ version: 1, record, startup: { envVars: {} }, artifactDir: join(base, id), state });
    return id;
  };
  const readable = [paused(1), paused(2), paused(3)];
  const newer = paused(4);
  const { documents, ids } = store.load();
  expect(documents.map(({ record }) => record.id).sort()).toEqual(readable.sort());
  expect(ids.has(newer)).toBe(true);
});
