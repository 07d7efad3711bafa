import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import type { CapturedState } from "../sandbox/types.ts";
import { formatName, parseAlias, parseName } from "../snapshot/index.ts";
import type { SnapshotRecord, SnapshotRepository } from "../snapshot/types.ts";
import { type Entry, isoTime } from "./entry.ts";
import type { SnapshotFilter } from "./types.ts";

/* Snapshots that were made of sandboxes, in the repository they share with the templates. */

/** Error `alias_conflict` 400 for a name of a template, before a guest has to stand still for it. */
export async function checkSnapshotName(repository: SnapshotRepository, name: string): Promise<void> {
  const { base, tag } = parseAlias(name);
  const holder = await repository.resolve(formatName(base, tag));
  if (holder?.source.kind === "template") throw nameTaken(name, holder.templateId);
}

/** Stores what was captured of `source`, under the name if one is given; nothing of it stays after an error. */
export async function publishSnapshot(
  repository: SnapshotRepository,
  source: Entry,
  state: CapturedState,
  name: string | undefined,
  nowMs: number,
): Promise<SnapshotRecord> {
  const { envVars, defaultUser, defaultWorkdir, image, imageReference, bootArgs } = source.startup;
  const { cpuCount, memoryMiB, diskSizeMiB } = source.record;
  const id = newId();
  const now = isoTime(nowMs);
  const record: SnapshotRecord = {
    id,
    templateId: id,
    aliases: [],
    public: false,
    source: { kind: "sandbox", sourceSandboxId: source.id },
    resources: { cpuCount, memoryMiB, diskSizeMiB },
    createdAt: now,
    updatedAt: now,
    committed: {
      state,
      context: {
        exposedPorts: [],
        volumes: [],
        labels: {},
        ...image,
        envVars,
        ...(defaultUser === undefined ? {} : { user: defaultUser }),
        ...(defaultWorkdir === undefined ? {} : { workdir: defaultWorkdir }),
        ...(bootArgs === undefined ? {} : { bootArgs }),
      },
      ...(imageReference === undefined ? {} : { imageReference }),
    },
  };
  const committed = await repository.commit(record, state);
  if (name === undefined) return committed;
  try {
    await repository.bindAlias(name, id);
  } catch (error) {
    await repository.delete(id);
    const taken = error instanceof AenvError && error.code === "alias_conflict";
    throw taken ? nameTaken(name, undefined, error) : error;
  }
  return (await repository.get(id)) ?? committed;
}

/** Newest first. */
export async function listSnapshots(
  repository: SnapshotRepository,
  filter: SnapshotFilter,
): Promise<SnapshotRecord[]> {
  const name = filter.name === undefined ? undefined : parseName(filter.name);
  if (filter.name !== undefined && name === undefined) return [];
  const named = ({ id, aliases }: SnapshotRecord): boolean =>
    name === undefined ||
    (name.isId ? id === name.base : aliases.some((alias) => parseAlias(alias).base === name.base));
  const records = (await repository.list()).filter(
    (record) =>
      record.source.kind === "sandbox" &&
      record.committed !== undefined &&
      (filter.sandboxId === undefined || record.source.sourceSandboxId === filter.sandboxId) &&
      named(record),
  );
  return records.sort((a, b) => (a.createdAt + a.id < b.createdAt + b.id ? 1 : -1));
}

/** By id or name. Error `snapshot_not_found` 404. */
export async function getSnapshot(repository: SnapshotRepository, name: string): Promise<SnapshotRecord> {
  const record = await repository.resolve(name);
  if (record?.source.kind === "sandbox" && record.committed !== undefined) return record;
  throw new AenvError({
    code: "snapshot_not_found",
    status: 404,
    message: `snapshot ${name} was not found`,
    remediation: "list the snapshots there are with `aenv snapshot list` (GET /snapshots)",
  });
}

function nameTaken(name: string, templateId: string | undefined, cause?: unknown): AenvError {
  return new AenvError({
    code: "alias_conflict",
    status: 400,
    message: `the name ${name} belongs to template ${templateId ?? "of another kind"}`,
    remediation: "choose another name: a snapshot takes over another snapshot's, never a template's",
    cause,
  });
}
