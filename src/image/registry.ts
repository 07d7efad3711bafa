import { type FileHandle, open } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { AenvError, assert } from "../lib/errors.ts";
import type { RegistryLogin } from "./credentials.ts";
import { digestMismatch, diskFault, truncated } from "./faults.ts";
import { type Descriptor, type IndexEntry, MEDIA_TYPES, parseManifest } from "./manifest.ts";
import { Reach } from "./reach.ts";
import { formatReference, type RegistryReference } from "./reference.ts";
import { type FetchedManifest, type ImageSource, MAX_MANIFEST_BYTES, sha256Digest } from "./source.ts";

/**
 * Client of the OCI distribution API (pull side) for one repository.
 *
 * Transport: HTTPS. Plain HTTP only for registries that are local by their name, before any look-up:
 * `localhost` and names under it, names without a dot (a compose or cluster service), and loopback, private
 * and link-local addresses. Loopback tries HTTP first, the others HTTPS first; the second is tried when the
 * first cannot be spoken at all. A registry elsewhere never gets a request, let alone a password, in clear.
 */
export interface RetryPolicy {
  /** Tries of one request, or of one blob without progress in between. */
  readonly attempts: number;
  /** First pause; doubles each time. */
  readonly baseDelayMs: number;
  /** Longest pause, also for a registry's Retry-After. */
  readonly maxDelayMs: number;
  /** A connection that says nothing for this long is given up. */
  readonly idleTimeoutMs: number;
}

export const DEFAULT_RETRY: RetryPolicy = {
  attempts: 5,
  baseDelayMs: 500,
  maxDelayMs: 60_000,
  idleTimeoutMs: 45_000,
};

export interface RegistryOptions {
  readonly reference: RegistryReference;
  readonly login?: RegistryLogin;
  readonly retry?: RetryPolicy;
  /** Where the registry may send this server. Default: to no internal address but its own. */
  readonly reach?: Reach;
}

const MAX_REDIRECTS = 5;
/** Of one blob, progress or not: bounds a server that breaks off after every few bytes. */
const MAX_BLOB_TRIES = 50;
const MAX_ERROR_BODY_BYTES = 16 << 10;
const MAX_TOKEN_BODY_BYTES = 1 << 20;
const CLIENT_ID = "agentenv";
const ACCEPTED = Object.values(MEDIA_TYPES).join(", ");

type Locality = "loopback" | "private" | "public";

/** By the host's text alone: see the rule above. */
export function hostLocality(registry: string): Locality {
  const host = registry
    .replace(/:\d+$/, "")
    .replace(/^\[|\]$/g, "")
    .toLowerCase();
  if (
    host === "localhost" ||
    host.endsWith(".localhost") ||
    host === "::1" ||
    /^127(?:\.\d{1,3}){3}$/.test(host)
  ) {
    return "loopback";
  }
  const octets = /^(\d{1,3})\.(\d{1,3})\.\d{1,3}\.\d{1,3}$/.exec(host);
  if (octets !== null) {
    const [a, b] = [Number(octets[1]), Number(octets[2])];
    const local =
      a === 10 || (a === 172 && b >= 16 && b < 32) || (a === 192 && b === 168) || (a === 169 && b === 254);
    return local ? "private" : "public";
  }
  if (host.includes(":"))
    return /^f[cd][0-9a-f]{2}:/.test(host) || /^fe[89ab][0-9a-f]:/.test(host) ? "private" : "public";
  return host.includes(".") ? "public" : "private";
}

/** Registries of this machine are not behind the environment's proxy, whatever NO_PROXY says or leaves out. */
function bypassProxy(hostname: string): void {
  const names = [hostname, hostname.replace(/^\[|\]$/g, "")];
  // One of the two hides the other: both get all names.
  const { NO_PROXY = "", no_proxy = "" } = process.env;
  const present = `${NO_PROXY},${no_proxy}`.split(",").filter((name) => name !== "");
  const wanted = [...new Set([...present, ...names])].join(",");
  if (NO_PROXY !== wanted) process.env.NO_PROXY = wanted;
  if (no_proxy !== wanted) process.env.no_proxy = wanted;
}

function baseUrls(registry: string): string[] {
  const host = registry === "docker.io" ? "registry-1.docker.io" : registry;
  const locality = hostLocality(registry);
  if (locality === "public") return [`https://${host}`];
  return locality === "loopback"
    ? [`http://${host}`, `https://${host}`]
    : [`https://${host}`, `http://${host}`];
}

/** A failure that a later try may not meet. */
class Transient extends Error {
  readonly retryAfterMs: number | undefined;

  constructor(message: string, options: { cause?: unknown; retryAfterMs?: number | undefined } = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.retryAfterMs = options.retryAfterMs;
  }
}

/** No server answered: the way there fails, so that nothing is known of the image. */
class NoAnswer extends Transient {}

/** `image_registry_unreachable` for the network's sake: neither the registry nor its token server spoke. */
export class RegistryUnreached extends AenvError {}

/** Of the system, and the runtime's own names for the same. */
const NO_WAY = new Set([
  "ENOTFOUND",
  "EAI_AGAIN",
  "ETIMEDOUT",
  "ECONNREFUSED",
  "EHOSTUNREACH",
  "ENETUNREACH",
  "ConnectionRefused",
  "FailedToOpenSocket",
  "Timeout",
]);

function isNoWay(error: unknown): boolean {
  if (error instanceof NoAnswer) return true;
  return error instanceof Error && "code" in error && NO_WAY.has(String(error.code));
}

/** A name that the host's resolver does not know, or not now. */
function isUnresolved(error: unknown): error is Error & { readonly hostname?: string } {
  return error instanceof Error && "code" in error && ["ENOTFOUND", "EAI_AGAIN"].includes(String(error.code));
}

/** Seconds or an HTTP date. */
export function parseRetryAfter(value: string | null, nowMs: number): number | undefined {
  if (value === null) return undefined;
  if (/^\d+$/.test(value.trim())) return Number(value) * 1000;
  const at = Date.parse(value);
  return Number.isNaN(at) ? undefined : Math.max(0, at - nowMs);
}

interface Challenge {
  readonly scheme: string;
  readonly parameters: Readonly<Record<string, string>>;
}

/** `WWW-Authenticate` with quoted or bare parameters (RFC 9110 §11.6.1). The first challenge we can answer. */
export function parseChallenge(header: string | null): Challenge | undefined {
  if (header === null) return undefined;
  for (const match of header.matchAll(
    /(?:^|,\s*)(bearer|basic)(?:\s+((?:[\w-]+\s*=\s*(?:"(?:[^"\\]|\\.)*"|[^\s,]*)\s*,?\s*)*))?/gi,
  )) {
    const parameters: Record<string, string> = {};
    for (const pair of (match[2] ?? "").matchAll(/([\w-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,]*))/g)) {
      parameters[pair[1]!.toLowerCase()] = pair[2]?.replace(/\\(.)/g, "$1") ?? pair[3] ?? "";
    }
    return { scheme: match[1]!.toLowerCase(), parameters };
  }
  return undefined;
}

function basicHeader(username: string, password: string): string {
  return `Basic ${Buffer.from(`${username}:${password}`, "utf8").toString("base64")}`;
}

/** The body's first `limit` bytes and whether that is all; the rest is never read. */
async function readBounded(
  response: Response,
  limit: number,
): Promise<{ readonly text: string; readonly whole: boolean }> {
  const reader = response.body?.getReader();
  const pieces: Uint8Array[] = [];
  let total = 0;
  try {
    while (reader !== undefined && total <= limit) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      total += value.length;
    }
  } finally {
    // Frees the connection; an error is on its way up already.
    await reader?.cancel().catch(() => undefined);
  }
  return { text: Buffer.concat(pieces).subarray(0, limit).toString("utf8"), whole: total <= limit };
}

/** What an error's body says to people. */
function errorText(text: string): string {
  try {
    const parsed: unknown = JSON.parse(text);
    if (typeof parsed === "object" && parsed !== null && "errors" in parsed && Array.isArray(parsed.errors)) {
      const messages = parsed.errors.flatMap((entry: unknown) => {
        if (typeof entry !== "object" || entry === null) return [];
        const code = "code" in entry ? String(entry.code) : "";
        const message = "message" in entry ? String(entry.message) : "";
        return [[code, message].filter(Boolean).join(": ")];
      });
      return messages.join("; ").slice(0, 500);
    }
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  return /^\s*</.test(text) ? "" : text.trim().slice(0, 300);
}

/** Aborts when nothing has happened for a while; `touch` starts the time anew. */
class IdleGuard implements Disposable {
  readonly #controller = new AbortController();
  readonly #idleMs: number;
  #timer: Timer | undefined;
  readonly signal: AbortSignal;

  constructor(signal: AbortSignal, idleMs: number) {
    this.#idleMs = idleMs;
    this.signal = AbortSignal.any([signal, this.#controller.signal]);
    this.touch();
  }

  get expired(): boolean {
    return this.#controller.signal.aborted;
  }

  touch(): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#controller.abort(), this.#idleMs);
  }

  [Symbol.dispose](): void {
    clearTimeout(this.#timer);
  }
}

interface Outgoing {
  readonly method?: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body?: URLSearchParams;
}

interface GuardedResponse extends Disposable {
  readonly response: Response;
  readonly guard: IdleGuard;
  /** It came from the origin that was asked, without a step elsewhere: its challenges and words count. */
  readonly own: boolean;
  /** The beginning of its body, where that was read. */
  readonly said?: string;
}

class RegistrySource implements ImageSource {
  readonly reference: string;
  readonly wanted: string | undefined;
  readonly #reference: RegistryReference;
  readonly #login: RegistryLogin | undefined;
  readonly #retry: RetryPolicy;
  readonly #reach: Reach;
  #bases: string[];
  #authorization: string | undefined;

  constructor(options: RegistryOptions) {
    this.#reference = options.reference;
    this.reference = formatReference(options.reference);
    this.wanted = options.reference.digest ?? options.reference.tag;
    this.#login = options.login;
    this.#retry = options.retry ?? DEFAULT_RETRY;
    this.#reach = options.reach ?? new Reach();
    this.#bases = baseUrls(options.reference.registry);
  }

  async manifest(wanted: string | undefined, signal: AbortSignal): Promise<FetchedManifest> {
    assert(wanted !== undefined, "a registry manifest is fetched by tag or digest");
    return this.#retrying(signal, `manifest ${wanted}`, async () => {
      using answer = await this.#get(`manifests/${wanted}`, { accept: ACCEPTED }, signal);
      const { response, guard } = answer;
      const bytes = await this.#readAll(response, guard, MAX_MANIFEST_BYTES, signal);
      const digest = sha256Digest(bytes);
      const expected = wanted.includes(":") ? wanted : response.headers.get("docker-content-digest");
      if (expected?.startsWith("sha256:") && expected !== digest) {
        throw digestMismatch(this.reference, `manifest ${wanted}`, expected, digest);
      }
      const contentType = response.headers.get("content-type");
      return { bytes, digest, ...(contentType === null ? {} : { contentType }) };
    });
  }

  async referrers(digest: string, signal: AbortSignal): Promise<readonly IndexEntry[]> {
    let failure: AenvError | undefined;
    for (const path of [`referrers/${digest}`, `manifests/${digest.replace(":", "-")}`]) {
      try {
        const bytes = await this.#retrying(signal, path, async () => {
          using answer = await this.#get(path, { accept: MEDIA_TYPES.ociIndex }, signal);
          return this.#readAll(answer.response, answer.guard, MAX_MANIFEST_BYTES, signal);
        });
        const parsed = parseManifest(this.reference, bytes, MEDIA_TYPES.ociIndex);
        if ("index" in parsed) return parsed.index.manifests;
      } catch (error) {
        // A registry without the endpoint says so in one way or another.
        if (!(error instanceof AenvError)) throw error;
        if (error.code !== "image_not_found") failure ??= error;
      }
    }
    if (failure !== undefined) throw failure;
    return [];
  }

  async blob(
    descriptor: Pick<Descriptor, "digest" | "size">,
    target: string,
    signal: AbortSignal,
    onProgress: (doneBytes: number) => void,
  ): Promise<void> {
    await using file = await open(target, "wx").catch((error: unknown) => {
      throw diskFault(error, `downloading ${descriptor.digest}`);
    });
    await new BlobDownload(file, descriptor, (done) => this.#blobPiece(descriptor, done, signal), {
      image: this.reference,
      retry: this.#retry,
      signal,
      onProgress,
      giveUp: (error, what) => this.#giveUp(error, what, signal),
    }).run();
  }

  /** The rest of a blob from `done` on; a server that cannot do ranges answers with all of it. */
  async #blobPiece(
    descriptor: Pick<Descriptor, "digest">,
    done: number,
    signal: AbortSignal,
  ): Promise<GuardedResponse> {
    const headers: Record<string, string> = done > 0 ? { range: `bytes=${done}-` } : {};
    return this.#get(`blobs/${descriptor.digest}`, headers, signal);
  }

  async #readAll(
    response: Response,
    guard: IdleGuard,
    limit: number,
    signal: AbortSignal,
  ): Promise<Uint8Array> {
    const pieces: Uint8Array[] = [];
    let total = 0;
    try {
      for await (const piece of response.body ?? []) {
        guard.touch();
        total += piece.length;
        if (total > limit) {
          throw new AenvError({
            code: "image_unsupported",
            status: 400,
            message: `${this.reference}: a manifest larger than ${limit} bytes`,
          });
        }
        pieces.push(piece);
      }
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof AenvError) throw error;
      throw new Transient("the answer broke off", { cause: error });
    }
    return Buffer.concat(pieces);
  }

  async #retrying<T>(signal: AbortSignal, what: string, attempt: () => Promise<T>): Promise<T> {
    for (let tries = 1; ; tries++) {
      try {
        return await attempt();
      } catch (error) {
        signal.throwIfAborted();
        if (!(error instanceof Transient) || tries >= this.#retry.attempts)
          throw this.#giveUp(error, what, signal);
        await pause(this.#retry, tries, error.retryAfterMs, signal);
      }
    }
  }

  #giveUp(error: unknown, what: string, signal: AbortSignal): unknown {
    signal.throwIfAborted();
    if (!(error instanceof Transient)) return error;
    return new (error instanceof NoAnswer ? RegistryUnreached : AenvError)({
      code: "image_registry_unreachable",
      status: 502,
      message: `${this.reference}: cannot get ${what} from ${this.#reference.registry}: ${error.message}`,
      remediation: isUnresolved(error.cause)
        ? `this host cannot resolve ${error.cause.hostname ?? this.#reference.registry} (DNS or proxy)`
        : "check the registry's name, the network and proxy settings of the server, and try again",
      cause: error.cause,
    });
  }

  /** One request with transport choice, login and redirects; anything but 2xx is an error. */
  async #get(path: string, headers: Record<string, string>, signal: AbortSignal): Promise<GuardedResponse> {
    const target = `/v2/${this.#reference.repository}/${path}`;
    let answer = await this.#send(target, headers, signal);
    // Storage behind a redirect may not ask for the registry's password.
    if (answer.response.status === 401 && answer.own) {
      // An old token may have expired in mid-pull: one new login per request.
      const challenge = parseChallenge(answer.response.headers.get("www-authenticate"));
      const detail = await this.#consume(answer);
      this.#authorization = await this.#authenticate(challenge, detail, signal);
      answer = await this.#send(target, headers, signal);
    }
    if (answer.response.ok) return answer;
    const { status } = answer.response;
    const retryAfterMs = parseRetryAfter(answer.response.headers.get("retry-after"), Date.now());
    const detail = await this.#consume(answer);
    throw this.#statusError(status, detail, path, retryAfterMs);
  }

  /** Ends an answer. What it says is for whoever named the registry, so it must be the registry's own. */
  async #consume(answer: GuardedResponse): Promise<string> {
    using guarded = answer;
    if (guarded.said !== undefined) return errorText(guarded.said);
    if (!guarded.own) {
      // Its failure changes nothing: the answer is not used.
      await guarded.response.body?.cancel().catch(() => undefined);
      return "from where the registry redirects to";
    }
    return readBounded(guarded.response, MAX_ERROR_BODY_BYTES).then(
      ({ text }) => errorText(text),
      (error: unknown) => `(no readable answer: ${String(error)})`,
    );
  }

  #statusError(status: number, detail: string, path: string, retryAfterMs: number | undefined): Error {
    const said = detail === "" ? "" : `: ${detail}`;
    if (status === 401 || status === 403) return this.#unauthorized(`HTTP ${status}${said}`);
    if (status === 404) {
      return new AenvError({
        code: "image_not_found",
        status: 404,
        message: `${this.reference}: not found at ${this.#reference.registry} (${path}${said})`,
        remediation: "check name and tag; a private image may also need credentials",
      });
    }
    // A range behind the end: what is stored there is shorter than the manifest says.
    if (status === 416) return new Transient("the registry has no more than what arrived");
    if (status === 429 || status >= 500 || status === 408) {
      return new Transient(`HTTP ${status}${said}`, { retryAfterMs });
    }
    return new AenvError({
      code: "image_registry_unreachable",
      status: 502,
      message: `${this.reference}: the registry refused ${path} with HTTP ${status}${said}`,
    });
  }

  #unauthorized(detail: string): AenvError {
    return new AenvError({
      code: "image_unauthorized",
      status: 400,
      message: `${this.reference}: access denied by ${this.#reference.registry} (${detail})`,
      remediation:
        this.#login === undefined
          ? "the image does not exist or is private: give credentials with the request or log in with docker login on the server"
          : "check the user name and password (or token) and that they may pull this image",
    });
  }

  /** Tries the bases in order until one can be spoken, then stays with it. */
  async #send(
    target: string,
    headers: Record<string, string>,
    signal: AbortSignal,
  ): Promise<GuardedResponse> {
    const causes: unknown[] = [];
    for (const base of this.#bases) {
      try {
        let answer = await this.#follow(new URL(`${base}${target}`), { headers }, signal, (at, from) =>
          at.origin === from.origin ? this.#authorization : undefined,
        );
        // An HTTPS server that gets plain HTTP answers 400 in clear.
        const wrongScheme =
          base.startsWith("http:") && answer.response.status === 400 && this.#bases.length > 1;
        if (wrongScheme && answer.own) {
          const { text: said } = await readBounded(answer.response, MAX_ERROR_BODY_BYTES);
          answer = { ...answer, said };
          if (said.includes("HTTPS server")) {
            answer[Symbol.dispose]();
            causes.push(new Error("it speaks HTTPS, not HTTP"));
            continue;
          }
        }
        this.#bases = [base];
        return answer;
      } catch (error) {
        signal.throwIfAborted();
        if (error instanceof AenvError) throw error;
        causes.push(error);
      }
    }
    const reasons = causes.map((cause) =>
      // The runtime's question to programmers.
      (cause instanceof Error ? cause.message : String(cause)).replace(
        /:? *Unable to connect\. Is the computer able to access the url\?/,
        "",
      ),
    );
    const Failure = causes.every(isNoWay) ? NoAnswer : Transient;
    throw new Failure([...new Set(reasons)].join("; "), { cause: causes.find(isUnresolved) });
  }

  /**
   * Follows redirects. `authorize` gives the header for an origin; once a redirect has led elsewhere it is not
   * asked any more, also not on the way back.
   */
  async #follow(
    from: URL,
    request: Outgoing,
    signal: AbortSignal,
    authorize: (at: URL, from: URL) => string | undefined,
  ): Promise<GuardedResponse> {
    let at = from;
    let own = true;
    for (let hops = 0; ; hops++) {
      const authorization = own ? authorize(at, from) : undefined;
      const headers = { ...request.headers, ...(authorization ? { authorization } : {}) };
      const answer = await this.#fetch(at, { ...request, headers }, own, signal);
      const location = answer.response.headers.get("location");
      if (answer.response.status < 300 || answer.response.status >= 400 || location === null) return answer;
      using _redirect = answer;
      await answer.response.body?.cancel().catch(() => undefined);
      if (request.body !== undefined) throw new Transient(`${at.host} redirects what is sent to it: refused`);
      if (hops >= MAX_REDIRECTS) throw new Transient(`more than ${MAX_REDIRECTS} redirects`);
      const next = URL.parse(location, at.href);
      if (next === null) throw new Transient("a redirect to what is no URL");
      if (next.protocol !== "https:" && (next.protocol !== "http:" || at.protocol === "https:")) {
        throw new Transient(`a redirect from ${at.protocol} to ${next.protocol} was refused`);
      }
      own &&= next.origin === from.origin;
      at = next;
    }
  }

  /** One request; where others named the URL, only to the addresses that were looked at. */
  async #fetch(url: URL, request: Outgoing, own: boolean, signal: AbortSignal): Promise<GuardedResponse> {
    const addresses = this.#isRegistry(url) ? undefined : await this.#reach.addresses(url, this.reference);
    if (addresses === undefined) return this.#ask(url, request, own, signal);
    let failure: unknown;
    for (const address of addresses) {
      try {
        return await this.#ask(url, request, own, signal, address);
      } catch (error) {
        signal.throwIfAborted();
        if (!isNoWay(error)) throw error;
        failure ??= error;
      }
    }
    throw failure ?? new NoAnswer(`${url.host} has no address`);
  }

  /** The registry's own host and port, whatever the scheme. */
  #isRegistry(url: URL): boolean {
    return baseUrls(this.#reference.registry).some((base) => new URL(base).host === url.host);
  }

  async #ask(
    url: URL,
    { method = "GET", headers, body }: Outgoing,
    own: boolean,
    signal: AbortSignal,
    address?: string,
  ): Promise<GuardedResponse> {
    const guard = new IdleGuard(signal, this.#retry.idleTimeoutMs);
    if (hostLocality(url.host) === "loopback") bypassProxy(url.hostname);
    const to = new URL(url);
    if (address !== undefined) to.hostname = address.includes(":") ? `[${address}]` : address;
    try {
      const response = await fetch(to, {
        method,
        headers: {
          ...headers,
          "user-agent": CLIENT_ID,
          "accept-encoding": "identity",
          ...(address === undefined ? {} : { host: url.host }),
        },
        ...(body === undefined ? {} : { body }),
        redirect: "manual",
        decompress: false,
        // Our own idle time counts; the runtime's would cut long downloads.
        timeout: false,
        signal: guard.signal,
        // The certificate is the name's. A kept connection would be found by its address, whatever the name.
        ...(address === undefined ? {} : { keepalive: false, tls: { serverName: url.hostname } }),
      } as BunFetchRequestInit & { timeout: false });
      guard.touch();
      return { response, guard, own, [Symbol.dispose]: () => guard[Symbol.dispose]() };
    } catch (error) {
      guard[Symbol.dispose]();
      signal.throwIfAborted();
      if (guard.expired)
        throw new NoAnswer(`no answer within ${this.#retry.idleTimeoutMs / 1000} s`, { cause: error });
      throw error;
    }
  }

  // ---- login ----------------------------------------------------------------------------------------

  async #authenticate(
    challenge: Challenge | undefined,
    detail: string,
    signal: AbortSignal,
  ): Promise<string> {
    if (challenge?.scheme === "basic") {
      if (this.#login?.kind !== "basic") throw this.#unauthorized(detail || "it asks for a password");
      const header = basicHeader(this.#login.username, this.#login.password);
      if (header === this.#authorization) throw this.#unauthorized(detail || "wrong password");
      return header;
    }
    const realm = challenge?.parameters.realm;
    if (challenge === undefined || !realm) throw this.#unauthorized(detail || "it offers no login we know");
    return `Bearer ${await this.#token(realm, challenge.parameters, signal)}`;
  }

  async #token(realm: string, parameters: Challenge["parameters"], signal: AbortSignal): Promise<string> {
    let url: URL;
    try {
      url = new URL(realm);
    } catch (cause) {
      throw new AenvError({
        code: "image_registry_unreachable",
        status: 502,
        message: `${this.reference}: the registry's token server is not a URL: ${realm.slice(0, 200)}`,
        cause,
      });
    }
    const clearAllowed =
      hostLocality(this.#reference.registry) !== "public" && hostLocality(url.host) !== "public";
    if (url.protocol !== "https:" && !(url.protocol === "http:" && clearAllowed)) {
      throw new AenvError({
        code: "image_registry_unreachable",
        status: 502,
        message: `${this.reference}: the registry's token server ${url.origin} would be spoken to in clear: refused`,
      });
    }
    const scope = parameters.scope || `repository:${this.#reference.repository}:pull`;
    let body: URLSearchParams | undefined;
    let authorization: string | undefined;
    if (this.#login?.kind === "identityToken") {
      body = new URLSearchParams({
        grant_type: "refresh_token",
        client_id: CLIENT_ID,
        refresh_token: this.#login.token,
        service: parameters.service ?? "",
        scope,
      });
    } else {
      if (parameters.service) url.searchParams.set("service", parameters.service);
      url.searchParams.set("scope", scope);
      if (this.#login !== undefined) authorization = basicHeader(this.#login.username, this.#login.password);
    }
    const request = { headers: {}, ...(body === undefined ? {} : { method: "POST", body }) };
    let answer: GuardedResponse;
    try {
      answer = await this.#follow(url, request, signal, () => authorization);
    } catch (cause) {
      signal.throwIfAborted();
      if (cause instanceof AenvError) throw cause;
      const Failure = isNoWay(cause) ? NoAnswer : Transient;
      throw new Failure(`token server ${url.host} cannot be reached`, { cause });
    }
    using guarded = answer;
    const { response } = guarded;
    const { text, whole } = await readBounded(response, MAX_TOKEN_BODY_BYTES).catch((cause: unknown) => {
      signal.throwIfAborted();
      throw new Transient(`token server ${url.host}: the answer broke off`, { cause });
    });
    if (response.status === 401 || response.status === 403 || response.status === 400) {
      // Its words are shown only where it is the registry itself, as of any other host.
      const said = guarded.own && this.#isRegistry(url) ? errorText(text) : "";
      throw this.#unauthorized(`token server ${url.host}: HTTP ${response.status} ${said}`.trim());
    }
    if (!response.ok) {
      throw new Transient(`token server ${url.host}: HTTP ${response.status}`, {
        retryAfterMs: parseRetryAfter(response.headers.get("retry-after"), Date.now()),
      });
    }
    const parsed = whole ? parseToken(text) : undefined;
    if (parsed === undefined) throw this.#unauthorized(`token server ${url.host} gave no token`);
    return parsed;
  }
}

/** The token of a token server's answer, by either of its names. */
function parseToken(text: string): string | undefined {
  let answer: unknown;
  try {
    answer = JSON.parse(text);
  } catch {
    // Whatever it is, it is no token.
    return undefined;
  }
  if (typeof answer !== "object" || answer === null) return undefined;
  if ("token" in answer && typeof answer.token === "string") return answer.token;
  if ("access_token" in answer && typeof answer.access_token === "string") return answer.access_token;
  return undefined;
}

async function pause(
  retry: RetryPolicy,
  tries: number,
  retryAfterMs: number | undefined,
  signal: AbortSignal,
): Promise<void> {
  const delay = Math.max(retryAfterMs ?? 0, retry.baseDelayMs * 2 ** (tries - 1));
  await sleep(Math.min(delay, retry.maxDelayMs), undefined, { signal });
}

interface DownloadContext {
  readonly image: string;
  readonly retry: RetryPolicy;
  readonly signal: AbortSignal;
  readonly onProgress: (doneBytes: number) => void;
  readonly giveUp: (error: unknown, what: string) => unknown;
}

/** One blob into one file: hashes while it writes and goes on by range where a connection broke off. */
class BlobDownload {
  readonly #file: FileHandle;
  readonly #descriptor: Pick<Descriptor, "digest" | "size">;
  readonly #fetchFrom: (done: number) => Promise<GuardedResponse>;
  readonly #context: DownloadContext;
  #hasher = new Bun.CryptoHasher("sha256");
  #done = 0;

  constructor(
    file: FileHandle,
    descriptor: Pick<Descriptor, "digest" | "size">,
    fetchFrom: (done: number) => Promise<GuardedResponse>,
    context: DownloadContext,
  ) {
    this.#file = file;
    this.#descriptor = descriptor;
    this.#fetchFrom = fetchFrom;
    this.#context = context;
  }

  async run(): Promise<void> {
    const { size, digest } = this.#descriptor;
    const { signal, retry, image } = this.#context;
    let idleTries = 0;
    for (let tries = 1; this.#done < size; tries++) {
      const before = this.#done;
      try {
        await this.#piece();
      } catch (error) {
        signal.throwIfAborted();
        idleTries = this.#done > before ? 1 : idleTries + 1;
        const last = idleTries >= retry.attempts || tries >= MAX_BLOB_TRIES;
        if (!(error instanceof Transient)) throw diskFault(error, `downloading ${digest}`);
        if (last) {
          if (this.#done > 0) throw truncated(image, `blob ${digest}`, this.#done, size, error);
          throw this.#context.giveUp(error, `blob ${digest}`);
        }
        await pause(retry, idleTries, error.retryAfterMs, signal);
      }
    }
    const found = `sha256:${this.#hasher.digest("hex")}`;
    if (found !== digest) throw digestMismatch(image, `blob ${digest}`, digest, found);
    this.#context.onProgress(this.#done);
  }

  async #restart(): Promise<void> {
    this.#done = 0;
    this.#hasher = new Bun.CryptoHasher("sha256");
    await this.#file.truncate(0);
  }

  async #piece(): Promise<void> {
    const { size, digest } = this.#descriptor;
    using answer = await this.#fetchFrom(this.#done);
    const { response, guard } = answer;
    if (this.#done > 0) {
      const start = /^bytes (\d+)-/.exec(response.headers.get("content-range") ?? "")?.[1];
      if (response.status !== 206 || Number(start) !== this.#done) {
        // No ranges here: the answer is the whole blob (or a wrong part, which the digest would show).
        if (response.status === 206) throw new Transient("the registry answered with another range");
        await this.#restart();
      }
    }
    const { signal } = this.#context;
    const reader = response.body?.getReader();
    try {
      for (;;) {
        const { done, value } = (await reader?.read().catch((cause: unknown) => {
          signal.throwIfAborted();
          throw new Transient(guard.expired ? "the download stalled" : "the connection broke off", { cause });
        })) ?? { done: true as const, value: undefined };
        if (done) break;
        guard.touch();
        if (this.#done + value.length > size) {
          throw digestMismatch(this.#context.image, `blob ${digest}`, `${size} bytes`, "more than that");
        }
        for (let written = 0; written < value.length; ) {
          const part = await this.#file.write(value, written, value.length - written, this.#done + written);
          written += part.bytesWritten;
        }
        this.#hasher.update(value);
        this.#done += value.length;
        this.#context.onProgress(this.#done);
      }
    } finally {
      // Frees the connection when we stop early; the reason is on its way up already.
      await reader?.cancel().catch(() => undefined);
    }
    if (this.#done < size) throw new Transient(`it ended after ${this.#done} of ${size} bytes`);
  }
}

/** The image source for one registry reference. */
export function createRegistrySource(options: RegistryOptions): ImageSource {
  return new RegistrySource(options);
}
