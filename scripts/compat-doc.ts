/**
 * Renders docs/e2b-compatibility.md from the results of tests/e2e/compat.test.ts. As a program: writes the
 * page from build/compatibility.json, which every run of that test leaves.
 */
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

export interface CompatRow {
  /** Client library and version, e.g. `JavaScript 2.51.0`. */
  readonly client: string;
  readonly group: string;
  readonly feature: string;
  readonly result: "pass" | "fail" | "skip";
  readonly reason?: string;
}

export function renderCompatibility(rows: readonly CompatRow[]): string {
  const tried = rows.filter((row) => row.result !== "skip");
  const clients = [...new Set(tried.map((row) => row.client))];
  const features = new Map<string, Map<string, string>>();
  for (const row of tried) {
    const key = `| ${row.group} | ${row.feature} |`;
    const results = features.get(key) ?? new Map<string, string>();
    results.set(row.client, row.result);
    features.set(key, results);
  }
  const skipped = rows.filter((row) => row.result === "skip");
  return `# Compatibility with the E2B clients

Unmodified clients against this server with real microVMs. This page is written by the test that tries
them (\`AENV_UPDATE_DOCS=1 bun test tests/e2e/compat.test.ts\`) and checked by every run of it. An empty cell:
not tried with that client.

| Part | Feature | ${clients.join(" | ")} |
| --- | --- | ${clients.map(() => "---").join(" | ")} |
${[...features].map(([key, results]) => `${key} ${clients.map((client) => results.get(client) ?? "").join(" | ")} |`).join("\n")}
${skipped.map((row) => `\n${row.client}: not tried, ${row.reason}.\n`).join("")}`;
}

if (import.meta.main) {
  const root = join(import.meta.dir, "..");
  const rows = JSON.parse(await readFile(join(root, "build/compatibility.json"), "utf8")) as CompatRow[];
  await writeFile(join(root, "docs/e2b-compatibility.md"), renderCompatibility(rows));
  console.log(`docs/e2b-compatibility.md: ${rows.length} rows`);
}
