import { constantTimeEqual } from "../lib/constant-time.ts";
import type { Orchestrator } from "../orchestrator/types.ts";
import { ROUTING_HEADERS } from "./classify.ts";
import { headerTokens, headerValues, lowerCaseNames, type RawHeaders } from "./http1.ts";
import { faults, type ProxyFault } from "./replies.ts";

/** Port of the guest agent in every guest. */
export const AGENT_PORT = 49_983;

/** Paths of the agent that only the host may call. */
const HOST_ONLY = new Set([
  "/init",
  "/freeze",
  "/unfreeze",
  "/collapse",
  "/fsfreeze",
  "/fsfrozen",
  "/fsthaw",
  "/halt",
  "/upgrade",
]);

export interface DataRequest {
  readonly method: string;
  readonly target: string;
  readonly path: string;
  readonly port: number;
  readonly sandboxId: string;
  readonly headers: RawHeaders;
}

function carriesExactly(headers: RawHeaders, name: string, expected: string): boolean {
  const given = headerValues(headers, name);
  return given.length === 1 && constantTimeEqual(given[0]!, expected);
}

function hasSignature(target: string): boolean {
  const query = target.indexOf("?");
  return query >= 0 && new URLSearchParams(target.slice(query)).has("signature");
}

/** True for agent paths that are never forwarded, whoever asks. */
export function isHostOnly(request: Pick<DataRequest, "port" | "path">): boolean {
  if (request.port !== AGENT_PORT) return false;
  // The agent decodes percent-escapes and folds slashes; so must this check.
  let path = request.path;
  try {
    path = decodeURIComponent(path);
  } catch {
    return true;
  }
  return HOST_ONLY.has(path.replace(/\/{2,}/g, "/").replace(/(.)\/+$/, "$1"));
}

/**
 * Checks a data-plane request before anything about the sandbox's state is looked at or changed.
 * Undefined: go on.
 */
export function authorizeData(
  request: DataRequest,
  orchestrator: Pick<Orchestrator, "access" | "accessToken" | "trafficToken">,
): ProxyFault | undefined {
  const access = orchestrator.access(request.sandboxId);
  if (access === undefined) return faults.notFound;
  if (request.port === AGENT_PORT) {
    if (!access.secure || request.method === "OPTIONS") return undefined;
    const tokens = headerValues(request.headers, "x-access-token");
    // A signed URL carries its own proof, which the agent verifies.
    if (
      tokens.length === 0 &&
      request.path === "/files" &&
      (request.method === "GET" || request.method === "POST" || request.method === "HEAD") &&
      hasSignature(request.target)
    ) {
      return undefined;
    }
    return carriesExactly(request.headers, "x-access-token", orchestrator.accessToken(request.sandboxId))
      ? undefined
      : faults.envdToken;
  }
  if (access.allowPublicTraffic) return undefined;
  return carriesExactly(
    request.headers,
    "e2b-traffic-access-token",
    orchestrator.trafficToken(request.sandboxId),
  )
    ? undefined
    : faults.trafficToken;
}

const HOP_BY_HOP = new Set([
  "connection",
  "keep-alive",
  "upgrade",
  "te",
  "proxy-authenticate",
  "proxy-authorization",
]);

/** Where a message ends, and whom it is for: no `Connection` field may take these away (RFC 9110, 7.6.1). */
const NEVER_DROPPED = new Set(["content-length", "transfer-encoding", "host"]);

/** Names of fields that concern one connection alone, as its message says. */
function connectionFields(headers: RawHeaders): Set<string> {
  return new Set(headerTokens(headers, "connection").filter((name) => !NEVER_DROPPED.has(name)));
}

export interface ForwardOptions {
  readonly upstreamAuthority: string;
  readonly apiKeys: readonly string[];
  /** The token was checked here and the agent may see it. */
  readonly passAccessToken: boolean;
  /** Protocol of an upgrade that is passed on, e.g. `websocket`. */
  readonly upgrade?: string;
}

/** Header fields as the service in the sandbox gets them. */
export function forwardedRequestHeaders(request: DataRequest, options: ForwardOptions): [string, string][] {
  const drop = connectionFields(request.headers);
  const result: [string, string][] = [["Host", options.upstreamAuthority]];
  const names = lowerCaseNames(request.headers);
  for (const [i, [name, value]] of request.headers.entries()) {
    const key = names[i]!;
    if (
      HOP_BY_HOP.has(key) ||
      drop.has(key) ||
      ROUTING_HEADERS.has(key) ||
      key === "host" ||
      key === "expect"
    )
      continue;
    if (key.startsWith("x-forwarded-") && FORWARDED.has(key)) continue;
    if (key === "e2b-traffic-access-token") continue;
    if (key === "x-access-token" && !options.passAccessToken) continue;
    if (key === "x-api-key" && options.apiKeys.some((apiKey) => constantTimeEqual(value, apiKey))) continue;
    result.push([name, value]);
  }
  const host = headerValues(request.headers, "host")[0];
  if (host !== undefined) result.push(["X-Forwarded-Host", host]);
  result.push(["X-Forwarded-Proto", options.upgrade === "websocket" ? "ws" : "http"]);
  result.push(["X-Forwarded-Method", request.method]);
  result.push(["X-Forwarded-Uri", request.target]);
  if (options.upgrade === undefined) result.push(["Connection", "close"]);
  else result.push(["Connection", "Upgrade"], ["Upgrade", options.upgrade]);
  return result;
}

const FORWARDED = new Set(["x-forwarded-host", "x-forwarded-proto", "x-forwarded-method", "x-forwarded-uri"]);

/** Header fields of the service's answer as the client gets them. */
export function forwardedResponseHeaders(
  headers: RawHeaders,
  options: { readonly close: boolean; readonly upgrade?: string },
): [string, string][] {
  const drop = connectionFields(headers);
  const result: [string, string][] = [];
  const names = lowerCaseNames(headers);
  for (const [i, [name, value]] of headers.entries()) {
    if (!HOP_BY_HOP.has(names[i]!) && !drop.has(names[i]!)) result.push([name, value]);
  }
  if (options.upgrade !== undefined) result.push(["Connection", "Upgrade"], ["Upgrade", options.upgrade]);
  else if (options.close) result.push(["Connection", "close"]);
  return result;
}
