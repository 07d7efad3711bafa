import { Database } from "bun:sqlite";
import { existsSync, mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import { isPausedVersion, type PausedState } from "../sandbox/types.ts";
import type { StartupContext } from "../snapshot/types.ts";
import type { SandboxRecord } from "./types.ts";

/** What a sandbox is started with besides its record: image and build results plus the request's own. */
export interface Startup {
  readonly envVars: Readonly<Record<string, string>>;
  readonly defaultUser?: string;
  readonly defaultWorkdir?: string;
  /** The rest of what its template or snapshot says, for snapshots made of it. */
  readonly image?: Omit<StartupContext, "envVars" | "user" | "workdir" | "bootArgs">;
  readonly imageReference?: string;
  /** Words for the kernel besides ours, at every boot; absent: none. */
  readonly bootArgs?: readonly string[];
}

/** A paused sandbox as it is kept on disk. Tokens are not in it: they are derived. */
export interface PausedDocument {
  readonly version: 1;
  readonly record: Omit<SandboxRecord, "state">;
  readonly startup: Startup;
  /** Directory of the capture; everything `state` names without a digest lies in it. */
  readonly artifactDir: string;
  readonly state: PausedState;
}

/** A running sandbox as another process finds it: with the files of the sandbox room it can be adopted. */
export interface RunningDocument {
  readonly version: 1;
  readonly record: Omit<SandboxRecord, "state">;
  readonly startup: Startup;
  /** Content-addressed files it runs on. */
  readonly pins: readonly string[];
}

/** `resuming` marks that a start was under way: the artifacts are immutable, so it can be tried again. */
export type Lifecycle = "paused" | "resuming";

/** Opens the database of records. Error `records_unreadable` 500, which names the file. */
export function openRecords(path: string, options: { readonly create?: true } = {}): Database {
  return readingRecords(path, () => new Database(path, { ...options, readwrite: true, strict: true }));
}

/** What is done to the database at `path`; a damaged one is told with its name and the cure. */
export function readingRecords<T>(path: string, work: () => T): T {
  try {
    return work();
  } catch (cause) {
    throw new AenvError({
      code: "records_unreadable",
      message: `the records of sandboxes in ${path} cannot be read`,
      remediation:
        "restore the file, with its -wal if it has one, from a backup; moved away together with the directory of captures, it means a start without the paused sandboxes",
      cause,
    });
  }
}

/** Whether there are no records yet: no file, an empty one, or one without tables. */
export function isNewDatabase(path: string): boolean {
  if (!existsSync(path)) return true;
  using db = openRecords(path);
  return readingRecords(path, () => db.query("SELECT 1 FROM sqlite_master LIMIT 1").get() === null);
}

/**
 * Durable records of sandboxes: SQLite, WAL. A call about a paused one that returned is on stable storage. A
 * call about a running one survives the process, not the host: neither does its VM.
 */
export class SandboxStore implements Disposable {
  readonly #db: Database;
  /** The same file without an fsync per change. */
  readonly #swift: Database;
  readonly #log: Logger;

  constructor(path: string, log: Logger) {
    this.#log = log;
    mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
    const db = openRecords(path, { create: true });
    this.#db = db;
    this.#swift = readingRecords(path, () => {
      db.run("PRAGMA journal_mode = WAL");
      db.run("PRAGMA synchronous = FULL");
      db.run("PRAGMA busy_timeout = 2000");
      db.run(`CREATE TABLE IF NOT EXISTS sandboxes (
        id TEXT PRIMARY KEY,
        lifecycle TEXT NOT NULL CHECK (lifecycle IN ('paused', 'resuming')),
        document TEXT NOT NULL
      ) STRICT`);
      db.run("CREATE TABLE IF NOT EXISTS running (id TEXT PRIMARY KEY, document TEXT NOT NULL) STRICT");
      const swift = openRecords(path);
      swift.run("PRAGMA synchronous = NORMAL");
      swift.run("PRAGMA busy_timeout = 2000");
      return swift;
    });
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
        if (
          document.version !== 1 ||
          document.record?.id !== row.id ||
          !isPausedVersion(document.state?.version)
        ) {
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

  /** Every readable record of a sandbox that ran; the others are reported and dropped: nothing can use them. */
  loadRunning(): RunningDocument[] {
    const rows = this.#db
      .query<{ id: string; document: string }, []>("SELECT id, document FROM running ORDER BY id")
      .all();
    const documents: RunningDocument[] = [];
    for (const row of rows) {
      try {
        const document = JSON.parse(row.document) as Partial<RunningDocument>;
        if (document.version !== 1 || document.record?.id !== row.id || document.startup === undefined) {
          throw new Error(`not a record of version 1 of sandbox ${row.id}`);
        }
        documents.push(document as RunningDocument);
      } catch (error) {
        this.#log.error({ err: error, sandboxId: row.id }, "record of a running sandbox cannot be read");
        this.deleteRunning(row.id);
      }
    }
    return documents;
  }

  putRunning(document: RunningDocument): void {
    this.#write(document.record.id, () => {
      this.#swift
        .query("INSERT OR REPLACE INTO running (id, document) VALUES (?, ?)")
        .run(document.record.id, JSON.stringify(document));
    });
  }

  deleteRunning(id: string): void {
    this.#write(id, () => {
      this.#swift.query("DELETE FROM running WHERE id = ?").run(id);
    });
  }

  /** From paused to running, in one step. */
  setResumed(document: RunningDocument): void {
    const { id } = document.record;
    this.#write(id, () => {
      this.#db.transaction(() => {
        this.#db
          .query("INSERT OR REPLACE INTO running (id, document) VALUES (?, ?)")
          .run(id, JSON.stringify(document));
        this.#db.query("DELETE FROM sandboxes WHERE id = ?").run(id);
      })();
    });
  }

  /** From running to paused, in one step. */
  setPaused(document: PausedDocument): void {
    const { id } = document.record;
    this.#write(id, () => {
      this.#db.transaction(() => {
        this.#db
          .query("INSERT OR REPLACE INTO sandboxes (id, lifecycle, document) VALUES (?, 'paused', ?)")
          .run(id, JSON.stringify(document));
        this.#db.query("DELETE FROM running WHERE id = ?").run(id);
      })();
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
        ...(full ? { remediation: "free space on the file system that holds $AENV_HOME_PATH" } : {}),
        cause,
      });
    }
  }

  [Symbol.dispose](): void {
    this.#swift.close();
    this.#db.close();
  }
}
