import { expect } from "bun:test";
import { existsSync, mkdtempSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { newId } from "../../src/lib/ids.ts";
import { createLogger } from "../../src/lib/log.ts";
import type { OrchestratorOptions } from "../../src/orchestrator/index.ts";
import type { CreateSandboxRequest, NodeOrchestrator } from "../../src/orchestrator/types.ts";
import { createPosixRepository } from "../../src/snapshot/index.ts";
import type { SnapshotRepository } from "../../src/snapshot/types.ts";
import { FakeSandboxFactory, fakeState } from "./fake-sandboxes.ts";

/* What tests of the orchestrator with stand-ins for VMs have in common. */

export const silent = createLogger("test");
silent.level = "silent";

/** Places under `home` and short times. */
export function testOptions(
  home: string,
  parts: Pick<OrchestratorOptions, "repository" | "sandboxes">,
): OrchestratorOptions {
  return {
    ...parts,
    statePath: join(home, "state.db"),
    artifactsDir: join(home, "artifacts"),
    tokenSeed: "test-seed",
    defaultTimeoutSeconds: 15,
    autoResumeMinTimeoutSeconds: 60,
    evictIntervalMs: 5,
    maxConcurrentStarts: 4,
    log: silent,
  };
}

/** A ready template of that name; returns its id. */
export async function addTemplate(
  repository: SnapshotRepository,
  home: string,
  name: string,
): Promise<string> {
  const id = newId();
  const state = fakeState(join(home, `template-${name}`), 0);
  const record = {
    id,
    templateId: id,
    aliases: [],
    public: true,
    source: { kind: "template", build: { status: "ready" } },
    resources: { cpuCount: 1, memoryMiB: 128, diskSizeMiB: 1024 },
    createdAt: new Date().toISOString(),
    updatedAt: new Date().toISOString(),
    committed: {
      state,
      context: {
        envVars: { A: "image", B: "image" },
        workdir: "/srv",
        user: "app",
        entrypoint: ["/entry"],
        exposedPorts: ["80/tcp"],
        volumes: [],
        labels: { of: "image" },
      },
      imageReference: "host/repo@sha256:0",
    },
  } as const;
  await repository.commit(record, state);
  await repository.bindAlias(name, id);
  return id;
}

/** From the template `base`. */
export const createRequest = (changes: Partial<CreateSandboxRequest> = {}): CreateSandboxRequest => ({
  template: "base",
  timeoutSeconds: 300,
  onTimeout: "pause",
  autoResume: false,
  secure: true,
  metadata: { who: "me" },
  envVars: { B: "request", C: "3" },
  ...changes,
});

/** A home of its own under `base`, with a repository that has the template `base`. */
export async function freshParts(base: string) {
  const home = mkdtempSync(join(base, "h-"));
  const repository = createPosixRepository({
    root: join(home, "repository"),
    log: silent,
    collectGraceMs: 0,
  });
  const template = await addTemplate(repository, home, "base");
  return { home, repository, template, factory: new FakeSandboxFactory() };
}

/** Ends what a test opened, without the faults it wished for; no VM may be left. */
export async function endAll(factory: FakeSandboxFactory, opened: NodeOrchestrator[]): Promise<void> {
  for (const key of Object.keys(factory.faults)) delete factory.faults[key as keyof typeof factory.faults];
  for (const made of opened.splice(0)) await made.shutdown();
  expect([...factory.live]).toEqual([]);
}

/** Captures of a sandbox on the disk. */
export function generationsIn(home: string, id: string): string[] {
  const dir = join(home, "artifacts", id);
  return existsSync(dir) ? readdirSync(dir) : [];
}
