import { writeSync } from "node:fs";
import { join } from "node:path";
import { newId } from "../../src/lib/ids.ts";
import { createLogger } from "../../src/lib/log.ts";
import { createOrchestrator } from "../../src/orchestrator/index.ts";
import { createPosixRepository } from "../../src/snapshot/index.ts";
import { FakeSandboxFactory, fakeState } from "../support/fake-sandboxes.ts";

/* Tells what was done right after it was told to be done; runs under a tracer. Argument: a new directory. */

const home = process.argv[2]!;
const log = createLogger("power");
log.level = "silent";

function mark(text: string): void {
  writeSync(1, `MARK ${text}\n`);
}

const repository = createPosixRepository({ root: join(home, "store/repository"), log, collectGraceMs: 0 });
const id = newId();
const state = fakeState(join(home, "made"), 0);
const now = new Date().toISOString();
const record = {
  id,
  templateId: id,
  aliases: [],
  public: true,
  source: { kind: "template", build: { status: "ready" } },
  resources: { cpuCount: 1, memoryMiB: 128, diskSizeMiB: 1024 },
  createdAt: now,
  updatedAt: now,
  committed: { state, context: { envVars: {}, exposedPorts: [], volumes: [], labels: {} } },
} as const;
await repository.commit(record, state);
mark("template committed");
await repository.bindAlias("base", id);
mark("name bound");

await using orchestrator = createOrchestrator({
  repository,
  sandboxes: new FakeSandboxFactory(),
  statePath: join(home, "persisted/records.db"),
  artifactsDir: join(home, "persisted/artifacts"),
  tokenSeed: "seed",
  defaultTimeoutSeconds: 300,
  autoResumeMinTimeoutSeconds: 300,
  evictIntervalMs: 1000,
  log,
});
await orchestrator.start();
const wishes = { timeoutSeconds: 300, autoResume: false, secure: true, metadata: {}, envVars: {} };
const sandbox = await orchestrator.create({ template: "base", onTimeout: "pause", ...wishes });
await orchestrator.pause(sandbox.id);
mark("paused");
await orchestrator.resume(sandbox.id, 300);
const snapshot = await orchestrator.snapshot(sandbox.id, { name: "point:v1" });
mark("snapshot made");
await orchestrator.pause(sandbox.id);
mark("paused again");
await orchestrator.kill(sandbox.id);
mark("paused one deleted");
await repository.delete(snapshot.id);
mark("snapshot deleted");
