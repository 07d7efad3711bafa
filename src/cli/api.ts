import { createConnection, type Socket } from "node:net";
import { CliError } from "./command.ts";
import { type Credentials, environmentCredentials, ignoredUrl, loadCredentials } from "./credentials.ts";
import { plainText } from "./output.ts";

const REQUEST_TIMEOUT_MS = 120_000;
const CONNECT_TIMEOUT_MS = 5_000;

/** Starting or waking a sandbox on a busy host takes its time; the server bounds every part of it. */
export const START_TIMEOUT_MS = 300_000;

export interface ApiReply<Body> {
  readonly body: Body;
  readonly headers: Headers;
}

export interface RequestOptions {
  readonly body?: unknown;
  readonly timeoutMs?: number;
  /** Without a TCP connection after this time the server counts as unreachable. */
  readonly connectTimeoutMs?: number;
  readonly signal?: AbortSignal;
}

interface ErrorBody {
  readonly message?: unknown;
  readonly cause?: unknown;
  readonly remediation?: unknown;
}

/** An answer of the server that is an error; `status` tells which. */
export class ApiError extends CliError {
  readonly status: number;
  constructor(status: number, message: string, hint: string | undefined, cause?: unknown) {
    super(message, { ...(hint === undefined ? {} : { hint }), ...(cause === undefined ? {} : { cause }) });
    this.name = "ApiError";
    this.status = status;
  }
}

/** No answer: nobody there, or the connection or the waiting came to an end. */
export class UnreachableError extends CliError {
  override readonly name = "UnreachableError";
}

/** True for what may be over in a moment: a restart of the server, a busy gateway. */
export function isPassing(error: unknown): error is CliError {
  if (error instanceof UnreachableError) return true;
  return error instanceof ApiError && [429, 500, 502, 503, 504].includes(error.status);
}

const FOREIGN_HINT = "is that the right address? set another one with `aenv auth`";
const PROXY_HINT = "a proxy in front of the server tells that it cannot reach it: is it running?";

/** An answer that no server of ours gives. */
function foreignAnswer(url: string, status: number, what: string): ApiError {
  return new ApiError(
    status,
    `${url} answered HTTP ${status} with ${what}: that is no AgentENV server`,
    [502, 503, 504].includes(status) ? PROXY_HINT : FOREIGN_HINT,
  );
}

const isMarkup = (response: Response, text: string) =>
  /^text\/html\b|[/+]xml\b/i.test(response.headers.get("content-type") ?? "") || /^\s*<[!?a-z]/i.test(text);

const LONGEST_MESSAGE = 1_000;

function apiError(status: number, text: string): ApiError {
  let body: ErrorBody = {};
  let message = text.trim();
  if (message.startsWith("{")) {
    try {
      body = JSON.parse(message) as ErrorBody;
    } catch {
      body = {}; // Not JSON after all: the raw text is the message.
    }
  }
  if (message.length > LONGEST_MESSAGE) message = `${message.slice(0, LONGEST_MESSAGE)}…`;
  if (typeof body.message === "string") message = body.message;
  const hint = typeof body.remediation === "string" ? body.remediation : undefined;
  const causes = Array.isArray(body.cause) ? body.cause.map(String) : [];
  const cause = causes.reduceRight<Error | undefined>(
    (inner, said) => new Error(said, { cause: inner }),
    undefined,
  );
  if (status === 401) {
    const detail = message === "" ? "" : `: ${message.replace(/^authentication failed:? */i, "")}`;
    return new ApiError(
      401,
      `authentication failed${detail}`,
      environmentCredentials() === undefined
        ? "set the server's API key with: aenv auth"
        : "the key is that of $E2B_API_KEY: correct it, or unset it to use what `aenv auth` stored",
      cause,
    );
  }
  return new ApiError(status, `HTTP ${status}: ${message === "" ? "no message" : message}`, hint, cause);
}

function isLoopback(hostname: string): boolean {
  const host = hostname.replace(/^\[|\]$/g, "");
  return host === "localhost" || host === "::1" || /^127(\.\d+){3}$/.test(host);
}

/** Requests to this machine never go through a proxy of the environment. */
function bypassProxy(url: URL): void {
  if (!isLoopback(url.hostname)) return;
  const names = new Set([url.hostname, url.hostname.replace(/^\[|\]$/g, "")]);
  for (const variable of ["NO_PROXY", "no_proxy"]) {
    const present = (process.env[variable] ?? "").split(",").filter((name) => name !== "");
    process.env[variable] = [...new Set([...present, ...names])].join(",");
  }
}

function usesProxy(url: URL): boolean {
  const name = url.protocol === "https:" ? "https_proxy" : "http_proxy";
  return !isLoopback(url.hostname) && (process.env[name] ?? process.env[name.toUpperCase()] ?? "") !== "";
}

/**
 * `fetch` waits for a connection as long as for an answer. While a request has no answer, another
 * connection to the same address is tried: when that one gets nowhere in time, neither does the request.
 */
class ConnectWatch implements Disposable {
  readonly #timers: ReturnType<typeof setTimeout>[] = [];
  #socket: Socket | undefined;

  constructor(url: URL, timeoutMs: number, unreachable: () => void) {
    if (usesProxy(url)) return;
    // A server that answers at once is not bothered.
    const grace = Math.min(1_000, timeoutMs / 2);
    this.#timers.push(
      setTimeout(() => this.#tryConnection(url), grace),
      setTimeout(() => {
        if (this.#socket?.connecting === true) unreachable();
      }, timeoutMs),
    );
  }

  #tryConnection(url: URL): void {
    const host = url.hostname.replace(/^\[|\]$/g, "");
    const socket = createConnection({
      host,
      port: Number(url.port) || (url.protocol === "https:" ? 443 : 80),
    });
    this.#socket = socket;
    socket.on("connect", () => socket.destroy());
    // Refused: the request itself is told so.
    socket.on("error", () => socket.destroy());
  }

  [Symbol.dispose](): void {
    for (const timer of this.#timers) clearTimeout(timer);
    this.#socket?.destroy();
  }
}

/** The control plane of one server. */
export class Api {
  readonly credentials: Credentials;
  readonly #url: URL;

  constructor(credentials: Credentials) {
    this.credentials = credentials;
    this.#url = new URL(credentials.url);
    bypassProxy(this.#url);
  }

  static async open(): Promise<Api> {
    const credentials = await loadCredentials();
    const ignored = ignoredUrl(credentials);
    if (ignored !== undefined) {
      process.stderr.write(`${plainText(`Warning: ${ignored}; the server is ${credentials.url}`)}\n`);
    }
    return new Api(credentials);
  }

  /** Errors: `ApiError` for an answer that is one, `UnreachableError` when there is no answer. */
  async request<Body>(method: string, path: string, options: RequestOptions = {}): Promise<ApiReply<Body>> {
    const { url, apiKey } = this.credentials;
    const timeoutMs = options.timeoutMs ?? REQUEST_TIMEOUT_MS;
    const connectMs = options.connectTimeoutMs ?? CONNECT_TIMEOUT_MS;
    const abort = new AbortController();
    const timer = setTimeout(
      () => abort.abort(new Error(`no answer within ${timeoutMs / 1000} s`)),
      timeoutMs,
    );
    using _connect = new ConnectWatch(this.#url, connectMs, () =>
      abort.abort(new Error(`no connection within ${connectMs / 1000} s`)),
    );
    let response: Response;
    let text: string;
    try {
      response = await fetch(`${url}${path}`, {
        method,
        headers: {
          "x-api-key": apiKey,
          ...(options.body === undefined ? {} : { "content-type": "application/json" }),
        },
        ...(options.body === undefined ? {} : { body: JSON.stringify(options.body) }),
        // A key must not follow a redirection to where it does not belong.
        redirect: "manual",
        signal: options.signal === undefined ? abort.signal : AbortSignal.any([abort.signal, options.signal]),
      });
      text = await response.text();
    } catch (error) {
      throw new UnreachableError(`cannot reach the server at ${url}`, {
        hint: "is it running? start it with `agentenv serve` (or `make start` in a checkout), or set another address with `aenv auth`",
        cause: abort.signal.aborted ? abort.signal.reason : error,
      });
    } finally {
      clearTimeout(timer);
    }
    if (response.status >= 300 && response.status < 400) {
      throw new ApiError(
        response.status,
        `HTTP ${response.status}: ${url} sends on to ${response.headers.get("location") ?? "nowhere"}`,
        "if that is the server, set its address with `aenv auth`",
      );
    }
    if (isMarkup(response, text)) throw foreignAnswer(url, response.status, "a web page");
    if (!response.ok) {
      const error = apiError(response.status, text);
      // Ours tell in JSON what is not there.
      if ([404, 405].includes(error.status) && error.message === `HTTP ${error.status}: ${text.trim()}`) {
        throw foreignAnswer(url, error.status, "something other than an error of ours");
      }
      throw error;
    }
    try {
      return {
        body: (text.trim() === "" ? undefined : JSON.parse(text)) as Body,
        headers: response.headers,
      };
    } catch {
      throw foreignAnswer(url, response.status, "something other than JSON");
    }
  }

  /** All pages of a list; `path` may have a query. */
  async list<Item>(path: string, options: RequestOptions = {}): Promise<Item[]> {
    const items: Item[] = [];
    let token: string | null = null;
    do {
      const query: string = token === null ? "" : `&nextToken=${encodeURIComponent(token)}`;
      const page: ApiReply<Item[]> = await this.request(
        "GET",
        `${path}${path.includes("?") ? "&" : "?"}limit=100${query}`,
        options,
      );
      if (!Array.isArray(page.body))
        throw foreignAnswer(this.credentials.url, 200, "something other than a list");
      items.push(...page.body);
      const next = page.headers.get("x-next-token");
      if (next !== null && next === token)
        throw new CliError("the server gives the same page again and again");
      token = next;
    } while (token !== null && token !== "");
    return items;
  }

  /** A template argument: an id as it is, anything else looked up as a name. */
  async templateId(name: string): Promise<string> {
    if (/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(name)) return name;
    // As a part of a path these would be steps, not names.
    if (/^\.+$/.test(name)) throw new CliError(`"${name}" is no template name`, { exitCode: 2 });
    const found = await this.request<{ templateID: string }>(
      "GET",
      `/templates/aliases/${encodeURIComponent(name)}`,
    );
    return found.body.templateID;
  }
}

export interface SandboxJson {
  readonly sandboxID: string;
  readonly templateID: string;
  readonly alias?: string;
  readonly state?: "running" | "paused";
  readonly cpuCount?: number;
  readonly memoryMB?: number;
  readonly diskSizeMB?: number;
  readonly startedAt?: string;
  readonly endAt?: string;
  readonly envdAccessToken?: string | null;
}

/** `GET /sandboxes/{id}` */
export interface SandboxDetailJson extends SandboxJson {
  readonly envdVersion?: string;
  readonly trafficAccessToken?: string | null;
  readonly domain?: string | null;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly volumeMounts?: readonly { readonly name: string; readonly path: string }[];
  readonly allowInternetAccess?: boolean | null;
  readonly network?: unknown;
  readonly lifecycle?: { readonly autoResume: boolean; readonly onTimeout: string };
}

/** One child of `POST /sandboxes/{id}/fork`: exactly one of the two. */
export interface ForkResultJson {
  readonly sandbox?: SandboxJson;
  readonly error?: { readonly message?: string };
}

export interface SnapshotJson {
  readonly snapshotID: string;
  readonly names?: readonly string[];
  readonly imageRef?: string;
}

export interface MetricJson {
  readonly timestamp: string;
  readonly timestampUnix: number;
  /** Share of all virtual CPUs together, 0 to 100. */
  readonly cpuUsedPct: number;
  readonly cpuCount: number;
  /** Bytes, as all that follow. */
  readonly memUsed: number;
  readonly memTotal: number;
  readonly memCache: number;
  readonly diskUsed: number;
  readonly diskTotal: number;
}

export interface LogJson {
  readonly timestamp: string;
  readonly message: string;
  readonly level: string;
  readonly fields?: Readonly<Record<string, string>>;
}

export interface TemplateJson {
  readonly templateID: string;
  readonly buildID?: string;
  readonly buildStatus?: string;
  readonly aliases?: readonly string[];
  readonly names?: readonly string[];
  readonly cpuCount?: number;
  readonly memoryMB?: number;
  readonly diskSizeMB?: number;
  readonly updatedAt?: string;
}

export interface BuildInfoJson {
  readonly templateID: string;
  readonly buildID: string;
  readonly status: string;
  readonly logEntries?: readonly {
    readonly timestamp: string;
    readonly level: string;
    readonly message: string;
  }[];
  readonly reason?: { readonly message: string; readonly step?: string };
}
