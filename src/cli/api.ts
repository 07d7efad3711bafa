import { CliError } from "./command.ts";
import { type Credentials, loadCredentials } from "./credentials.ts";

/** Requests to this machine never go through a proxy of the environment. */
export function bypassProxyForLocalhost(): void {
  const names = ["localhost", "127.0.0.1", "::1"];
  const present = process.env.NO_PROXY ?? process.env.no_proxy ?? "";
  const all = [...present.split(",").filter((name) => name !== ""), ...names].join(",");
  process.env.NO_PROXY = all;
  process.env.no_proxy = all;
}

const REQUEST_TIMEOUT_MS = 120_000;

export interface ApiReply<Body> {
  readonly status: number;
  readonly body: Body;
  readonly headers: Headers;
}

interface ErrorBody {
  readonly message?: unknown;
  readonly cause?: unknown;
  readonly remediation?: unknown;
}

/** An answer of the server that is an error; `status` tells which. */
export class ApiError extends CliError {
  readonly status: number;
  constructor(status: number, message: string, hint: string | undefined) {
    super(message, hint === undefined ? {} : { hint });
    this.name = "ApiError";
    this.status = status;
  }
}

function apiError(status: number, text: string): ApiError {
  let message = text.trim();
  let hint: string | undefined;
  try {
    const body = JSON.parse(text) as ErrorBody;
    if (typeof body.message === "string") message = body.message;
    if (Array.isArray(body.cause) && body.cause.length > 0) message += `: ${body.cause.join(": ")}`;
    if (typeof body.remediation === "string") hint = body.remediation;
  } catch {
    // Not JSON: the raw text is the message.
  }
  if (status === 401) {
    return new ApiError(
      401,
      `authentication failed${message === "" ? "" : `: ${message}`}`,
      "run: aenv auth",
    );
  }
  return new ApiError(status, `HTTP ${status}: ${message === "" ? "no message" : message}`, hint);
}

/** The control plane of one server. */
export class Api {
  readonly credentials: Credentials;

  constructor(credentials: Credentials) {
    this.credentials = credentials;
  }

  static async open(): Promise<Api> {
    bypassProxyForLocalhost();
    return new Api(await loadCredentials());
  }

  async request<Body>(
    method: string,
    path: string,
    options: { readonly body?: unknown; readonly timeoutMs?: number } = {},
  ): Promise<ApiReply<Body>> {
    const timeoutMs = options.timeoutMs ?? REQUEST_TIMEOUT_MS;
    let response: Response;
    let text: string;
    try {
      response = await fetch(`${this.credentials.url}${path}`, {
        method,
        headers: {
          "x-api-key": this.credentials.apiKey,
          ...(options.body === undefined ? {} : { "content-type": "application/json" }),
        },
        ...(options.body === undefined ? {} : { body: JSON.stringify(options.body) }),
        signal: AbortSignal.timeout(timeoutMs),
      });
      text = await response.text();
    } catch (cause) {
      if (cause instanceof Error && cause.name === "TimeoutError") {
        throw new CliError(`${this.credentials.url} did not answer within ${timeoutMs / 1000} s`, { cause });
      }
      throw new CliError(`cannot reach the server at ${this.credentials.url}`, {
        hint: "is it running? start it with `agentenv serve` (or `make start`), or set another address with `aenv auth`",
        cause,
      });
    }
    if (!response.ok) throw apiError(response.status, text);
    return {
      status: response.status,
      body: (text.trim() === "" ? undefined : JSON.parse(text)) as Body,
      headers: response.headers,
    };
  }

  /** All pages of a list. */
  async list<Item>(path: string): Promise<Item[]> {
    const items: Item[] = [];
    let token: string | null = null;
    do {
      const separator = path.includes("?") ? "&" : "?";
      const query: string = token === null ? "" : `&nextToken=${encodeURIComponent(token)}`;
      const page: ApiReply<Item[]> = await this.request("GET", `${path}${separator}limit=100${query}`);
      items.push(...page.body);
      token = page.headers.get("x-next-token");
    } while (token !== null);
    return items;
  }

  /** A template argument: an id as it is, anything else looked up as a name. */
  async templateId(name: string): Promise<string> {
    if (/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(name)) return name;
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
  readonly state: "running" | "paused";
  readonly cpuCount: number;
  readonly memoryMB: number;
  readonly diskSizeMB: number;
  readonly startedAt: string;
  readonly endAt: string;
  readonly envdAccessToken?: string;
}

export interface TemplateJson {
  readonly templateID: string;
  readonly buildID: string;
  readonly buildStatus: string;
  readonly aliases: readonly string[];
  readonly names: readonly string[];
  readonly cpuCount: number;
  readonly memoryMB: number;
  readonly diskSizeMB: number;
  readonly updatedAt: string;
}

export interface BuildInfoJson {
  readonly templateID: string;
  readonly buildID: string;
  readonly status: string;
  readonly logEntries: readonly {
    readonly timestamp: string;
    readonly level: string;
    readonly message: string;
  }[];
  readonly reason?: { readonly message: string; readonly step?: string };
}
