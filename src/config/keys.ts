import { z } from "zod";
import { configSchema, type KeyMeta, keyMeta } from "./schema.ts";

/** One key of the configuration: dotted TOML name and what is known about it. */
export interface ConfigKey {
  readonly name: string;
  readonly parts: readonly string[];
  readonly meta: KeyMeta;
}

type TableSchema = z.ZodObject<z.ZodRawShape>;

/** The table's object schema behind `prefault` and `optional`, or undefined for a plain key. */
function asTable(schema: z.core.$ZodType): TableSchema | undefined {
  if (schema instanceof z.ZodObject) return schema as TableSchema;
  if (schema instanceof z.ZodPrefault || schema instanceof z.ZodOptional) return asTable(schema.unwrap());
  return undefined;
}

function collect(tableSchema: TableSchema, prefix: readonly string[]): ConfigKey[] {
  return Object.entries(tableSchema.shape).flatMap(([name, schema]) => {
    const parts = [...prefix, name];
    const inner = asTable(schema);
    return inner === undefined
      ? [{ name: parts.join("."), parts, meta: keyMeta(schema) }]
      : collect(inner, parts);
  });
}

/** All keys in the order of the schema. */
export const CONFIG_KEYS: readonly ConfigKey[] = collect(configSchema, []);

/** All tables, dotted. */
export const CONFIG_TABLES: ReadonlySet<string> = new Set(
  CONFIG_KEYS.flatMap(({ parts }) =>
    parts.slice(0, -1).map((_, depth) => parts.slice(0, depth + 1).join(".")),
  ),
);

/** Other names a key may be written under. `[blockd]` is what the block daemon's settings are about. */
export const KEY_ALIASES: Readonly<Record<string, string>> = {
  "blockd.socket_path": "ublk.daemon_socket_path",
  "blockd.log_path": "ublk.daemon_log_path",
  "blockd.metrics_listen_addr": "ublk.daemon_metrics_listen_addr",
  "blockd.export": "ublk.export",
  "blockd.max_devices": "ublk.max_devices",
  "backend.oss.credentialProcess": "backend.oss.credential_process",
  "backend.oss.credential-process": "backend.oss.credential_process",
  "backend.oss.addressingStyle": "backend.oss.addressing_style",
  "backend.oss.addressing-style": "backend.oss.addressing_style",
};

function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, column) => column);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const replaced = row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(replaced, row[j]! + 1, next[j - 1]! + 1));
    }
    row = next;
  }
  return row[b.length]!;
}

/** The known key or table most like `name`; undefined when nothing is near. */
export function nearestKey(name: string): string | undefined {
  const leaf = name.slice(name.lastIndexOf(".") + 1);
  let best: { readonly candidate: string; readonly distance: number } | undefined;
  for (const candidate of [
    ...CONFIG_KEYS.map((known) => known.name),
    ...CONFIG_TABLES,
    ...Object.keys(KEY_ALIASES),
  ]) {
    // The right key in the wrong table is as good as one typing error.
    const sameLeaf = candidate.slice(candidate.lastIndexOf(".") + 1) === leaf ? 1 : Number.POSITIVE_INFINITY;
    const distance = Math.min(editDistance(name, candidate), sameLeaf);
    if (best === undefined || distance < best.distance) best = { candidate, distance };
  }
  return best !== undefined && best.distance <= Math.max(2, Math.floor(name.length / 5))
    ? best.candidate
    : undefined;
}
