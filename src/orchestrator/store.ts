import { Database } from "bun:sqlite";
import { mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { CapturedState } from "../sandbox/types.ts";
import type { SandboxRecord } from "./types.ts";

/** What a sandbox is started with besides its record: image and build results plus the request's own. */
export interface Startup {
  readonly envVars: Readonly<Record<string, string>>;
  readonly defaultUser?: string;
  readonly defaultWorkdir?: string;
}

/** A paused sandbox as it is kept on disk. Tokens are not in it: they are derived. */
export interface PausedDocument {
  readonly version: 1;
  readonly record: Omit<SandboxRecord, "state">;
  readonly startup: Startup;
  /** Directory of the capture; everything `state` names without a digest lies in it. */
  readonly artifactDir: string;
  readonly state: CapturedState;
}

/** `resuming` marks that a start was under way: the artifacts are immutable, so it can be tried again. */
export type Lifecycle = "paused" | "resuming";

/**
 * Durable records of paused sandboxes: SQLite, WAL, one fsync per change. A call that returned is on
 * stable storage.
 */
export class PausedStore implements Disposable {
  readonly #db: Database;
  readonly #log: Logger;

  constructor(path: string, log: Logger) {
    this.#log = log;
    mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
    this.#db = new Database(path, { create: true, strict: true });
    this.#db.run("PRAGMA journal_mode = WAL");
    this.#db.run("PRAGMA synchronous = FULL");
    this.#db.run("PRAGMA busy_timeout = 2000");
    this.#db.run(`CREATE TABLE IF NOT EXISTS sandboxes (
      id TEXT PRIMARY KEY,
      lifecycle TEXT NOT NULL CHECK (lifecycle IN ('paused', 'resuming')),
      document TEXT NOT NULL
    ) STRICT`);
  }

  /**
   * Every record, and the ids of all rows. A row that cannot be read is reported and left alone, its
   * artifacts with it: a newer program may understand what this one does not.
   */
  load(): { readonly documents: PausedDocument[]; readonly ids: ReadonlySet<string> } {
    const rows = this.#db
      .query<{ id: string; document: string }, []>("SELECT id, document FROM sandboxes ORDER BY id")
      .all();
    const documents: PausedDocument[] = [];
    for (const row of rows) {
      try {
        const document = JSON.parse(row.document) as Partial<PausedDocument>;
        if (document.version !== 1 || document.record?.id !== row.id || document.state?.version !== 1) {
          throw new Error(`not a record of version 1 of sandbox ${row.id}`);
        }
        documents.push(document as PausedDocument);
      } catch (error) {
        this.#log.error(
          { err: error, sandboxId: row.id },
          "record of a paused sandbox cannot be read and is left as it is",
        );
      }
    }
    return { documents, ids: new Set(rows.map((row) => row.id)) };
  }

  put(document: PausedDocument): void {
    this.#write(document.record.id, () => {
      this.#db
        .query("INSERT OR REPLACE INTO sandboxes (id, lifecycle, document) VALUES (?, 'paused', ?)")
        .run(document.record.id, JSON.stringify(document));
    });
  }

  setLifecycle(id: string, lifecycle: Lifecycle): void {
    this.#write(id, () => {
      this.#db.query("UPDATE sandboxes SET lifecycle = ? WHERE id = ?").run(lifecycle, id);
    });
  }

  delete(id: string): void {
    this.#write(id, () => {
      this.#db.query("DELETE FROM sandboxes WHERE id = ?").run(id);
    });
  }

  #write(id: string, change: () => void): void {
    try {
      change();
    } catch (cause) {
      const full = cause instanceof Error && "code" in cause && cause.code === "SQLITE_FULL";
      throw new AenvError({
        code: full ? "disk_full" : "persistence_failed",
        status: full ? 507 : 500,
        message: `the record of sandbox ${id} could not be stored`,
        ...(full ? { remediation: "free space on the file system that holds $AENV_HOME" } : {}),
        cause,
      });
    }
  }

  [Symbol.dispose](): void {
    this.#db.close();
  }
}
