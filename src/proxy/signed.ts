import { createHash, timingSafeEqual } from "node:crypto";
import type { Orchestrator } from "../orchestrator/types.ts";

/*
 * Clients with one fixed data-plane URL make signed file links that name no sandbox. The signature is a
 * digest over path, operation, user, expiration and the sandbox's own token, so it fits exactly one
 * sandbox. Finding that one means trying them: work that anybody can ask for, hence the bounds.
 */

export interface SignedUrl {
  readonly method: string;
  readonly query: URLSearchParams;
}

export type SignedLookup =
  | { readonly kind: "found"; readonly sandboxId: string }
  /** No running sandbox has made it, or its time is over. */
  | { readonly kind: "refused"; readonly reason: string }
  | { readonly kind: "busy" };

/** Sandboxes tried at most for one URL. */
const MAX_CANDIDATES = 20_000;
/** Tries per second over all requests, about a tenth of a processor. */
const TRIES_PER_SECOND = 20_000;
const REMEMBERED = 1024;
const SIGNATURE = /^v1_[A-Za-z0-9+/]{43}$/;

const OPERATIONS: Readonly<Record<string, string>> = { GET: "read", HEAD: "read", POST: "write" };

export class SignedUrls {
  readonly #orchestrator: Pick<Orchestrator, "list" | "accessToken">;
  readonly #now: () => number;
  /** What was found before; the agent verifies every request again. */
  readonly #known = new Map<string, string>();
  #budget = TRIES_PER_SECOND;
  #budgetAtMs: number;

  constructor(orchestrator: Pick<Orchestrator, "list" | "accessToken">, now: () => number = Date.now) {
    this.#orchestrator = orchestrator;
    this.#now = now;
    this.#budgetAtMs = now();
  }

  find(url: SignedUrl): SignedLookup {
    const { query } = url;
    // A plus that was not escaped arrives as a blank.
    const signature = (query.get("signature") ?? "").replaceAll(" ", "+");
    const operation = OPERATIONS[url.method];
    if (operation === undefined || !SIGNATURE.test(signature) || query.getAll("signature").length > 1) {
      return { kind: "refused", reason: "invalid signature" };
    }
    const expiration = query.get("signature_expiration");
    if (expiration !== null && !(Number(expiration) * 1000 > this.#now())) {
      return { kind: "refused", reason: "signature is already expired" };
    }
    const prefix = `${query.get("path") ?? ""}:${operation}:${query.get("username") ?? ""}:`;
    const suffix = expiration === null ? "" : `:${expiration}`;
    const key = `${prefix}${suffix}:${signature}`;
    const candidates = this.#orchestrator
      .list()
      .filter((record) => record.state === "running" && record.secure)
      .slice(-MAX_CANDIDATES);
    const known = this.#known.get(key);
    if (known !== undefined) {
      if (candidates.some((record) => record.id === known)) return { kind: "found", sandboxId: known };
      this.#known.delete(key);
    }
    if (!this.#spend(candidates.length)) return { kind: "busy" };
    const wanted = Buffer.from(signature.slice(3), "base64");
    const matches = candidates.filter((record) => {
      const text = `${prefix}${this.#orchestrator.accessToken(record.id)}${suffix}`;
      return timingSafeEqual(createHash("sha256").update(text).digest(), wanted);
    });
    const [match] = matches;
    if (match === undefined || matches.length > 1) return { kind: "refused", reason: "invalid signature" };
    if (this.#known.size >= REMEMBERED) this.#known.delete(this.#known.keys().next().value!);
    this.#known.set(key, match.id);
    return { kind: "found", sandboxId: match.id };
  }

  /** A big search may overdraw the budget; the next one then waits for it. */
  #spend(tries: number): boolean {
    const now = this.#now();
    const refill = ((now - this.#budgetAtMs) / 1000) * TRIES_PER_SECOND;
    this.#budget = Math.min(TRIES_PER_SECOND, this.#budget + Math.max(0, refill));
    this.#budgetAtMs = now;
    if (this.#budget <= 0) return false;
    this.#budget -= Math.max(1, tries);
    return true;
  }
}
