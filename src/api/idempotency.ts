import { createHash } from "node:crypto";
import { AenvError } from "../lib/errors.ts";
import type { SandboxOrigin } from "../orchestrator/types.ts";
import { badRequest } from "./errors.ts";
import type { RouteReply } from "./route.ts";

const KEY = /^[\x21-\x7e]{1,255}$/;

interface Remembered {
  readonly fingerprint: string;
  readonly reply: Promise<RouteReply>;
  /** Set when the work has succeeded; until then the entry does not expire. */
  expiresMs: number;
}

/** What an earlier server, which is not there any more, made of a request with this key. */
export interface Recalled {
  readonly fingerprint: string;
  readonly createdMs: number;
  readonly reply: RouteReply;
}

function sameRequest(before: string, now: string): void {
  if (before === now) return;
  throw new AenvError({
    code: "idempotency_key_reused",
    status: 422,
    message: "the Idempotency-Key was used before with another request body",
    remediation: "use a new key for a new request",
  });
}

function replayed(reply: RouteReply): RouteReply {
  return { ...reply, headers: { ...reply.headers, "idempotency-replayed": "true" } };
}

/**
 * `Idempotency-Key` on calls that create: the same key and body give the same answer, however often and
 * however concurrently they are sent. Failures are not remembered: a retry may succeed. Kept in memory,
 * bounded in time and number; what is made with a key keeps it, for the next server to recall.
 */
export class IdempotentCalls {
  readonly #calls = new Map<string, Remembered>();
  readonly #keepMs: number;
  readonly #maxKeys: number;
  readonly #now: () => number;

  constructor(keepMs = 3_600_000, maxKeys = 10_000, now: () => number = Date.now) {
    this.#keepMs = keepMs;
    this.#maxKeys = maxKeys;
    this.#now = now;
  }

  /** `scope` is the endpoint; a key means nothing on another one. `work` gets what to keep with the result. */
  async run(
    scope: string,
    request: Request,
    body: unknown,
    work: (origin?: SandboxOrigin) => Promise<RouteReply>,
    recall: (key: string) => Recalled | undefined = () => undefined,
  ): Promise<RouteReply> {
    const key = request.headers.get("idempotency-key");
    if (key === null) return work();
    if (!KEY.test(key)) {
      throw badRequest("invalid Idempotency-Key header: it must be 1 to 255 visible ASCII characters");
    }
    const id = `${scope} ${key}`;
    const fingerprint = createHash("sha256").update(JSON.stringify(body)).digest("hex");
    const earlier = this.#calls.get(id);
    if (earlier !== undefined && earlier.expiresMs > this.#now()) {
      sameRequest(earlier.fingerprint, fingerprint);
      return replayed(await earlier.reply);
    }
    const recalled = recall(id);
    if (recalled !== undefined && recalled.createdMs + this.#keepMs > this.#now()) {
      sameRequest(recalled.fingerprint, fingerprint);
      return replayed(recalled.reply);
    }
    this.#makeRoom();
    const reply = work({ key: id, fingerprint });
    const call: Remembered = { fingerprint, reply, expiresMs: Number.POSITIVE_INFINITY };
    this.#calls.delete(id);
    this.#calls.set(id, call);
    try {
      const answer = await reply;
      call.expiresMs = this.#now() + this.#keepMs;
      return answer;
    } catch (error) {
      if (this.#calls.get(id) === call) this.#calls.delete(id);
      throw error;
    }
  }

  /** Oldest first: expired ones go, and finished ones when there are too many. */
  #makeRoom(): void {
    const now = this.#now();
    for (const [id, call] of this.#calls) {
      const over = this.#calls.size >= this.#maxKeys && call.expiresMs !== Number.POSITIVE_INFINITY;
      if (call.expiresMs > now && !over) {
        // In order of their beginning, so nearly in that of their end: the rest is younger.
        if (call.expiresMs !== Number.POSITIVE_INFINITY) return;
        continue;
      }
      this.#calls.delete(id);
    }
  }
}
