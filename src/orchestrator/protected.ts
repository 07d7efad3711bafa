import { existsSync } from "node:fs";
import { openRecords, readingRecords } from "./store.ts";

/**
 * Whether a persisted sandbox can only be reached with a token: a lost token seed is then an error and not
 * a reason to make a new one. Read before the orchestrator exists, which needs the seed.
 */
export function hasTokenProtectedSandboxes(statePath: string): boolean {
  if (!existsSync(statePath)) return false;
  using db = openRecords(statePath);
  return readingRecords(statePath, () =>
    ["sandboxes", "running"].some((table) => {
      const [found] = db
        .query<{ n: number }, [string]>("SELECT count(*) AS n FROM sqlite_master WHERE name = ?")
        .all(table);
      if (found?.n !== 1) return false;
      const [row] = db
        .query<{ n: number }, []>(
          `SELECT count(*) AS n FROM ${table} WHERE json_valid(document)
         AND (json_extract(document, '$.record.secure') = 1
              OR json_extract(document, '$.record.network.allowPublicTraffic') = 0)`,
        )
        .all();
      return (row?.n ?? 0) > 0;
    }),
  );
}
