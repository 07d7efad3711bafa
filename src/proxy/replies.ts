import { STATUS_CODES } from "node:http";
import type { ErrorStyle } from "./classify.ts";
import { formatHead, headerTokens, headerValue, type RawHeaders } from "./http1.ts";

/** A finished reply as bytes; `close` adds `Connection: close`. */
export function formatReply(
  status: number,
  headers: ReadonlyArray<readonly [string, string]>,
  body: Uint8Array,
  options: { readonly close: boolean; readonly head?: boolean },
): Buffer {
  const bodiless = status === 204 || status === 304 || (status >= 100 && status < 200);
  const head = formatHead(`HTTP/1.1 ${status} ${STATUS_CODES[status] ?? ""}`, [
    ...headers,
    ...(bodiless ? [] : [["Content-Length", String(body.length)] as const]),
    ["Date", new Date().toUTCString()],
    ...(options.close ? [["Connection", "close"] as const] : []),
  ]);
  return bodiless || options.head === true ? head : Buffer.concat([head, body]);
}

/** What the proxy itself answers on the data plane, in the texts of the style the client speaks. */
export interface ProxyFault {
  /** Status and text for each style; an empty text is an empty body in the agentenv style. */
  readonly agentenv: readonly [status: number, text: string];
  readonly e2b: readonly [status: number, message: string, extra?: Readonly<Record<string, unknown>>];
}

export const faults = {
  notFound: {
    agentenv: [404, "sandbox not found"],
    e2b: [502, "The sandbox was not found"],
  },
  paused: {
    agentenv: [410, "sandbox is not proxyable in its current state"],
    e2b: [502, "The sandbox was not found"],
  },
  transitional: {
    agentenv: [410, "sandbox is not proxyable in its current state"],
    e2b: [409, "The sandbox is still transitioning, try again in a moment"],
  },
  routeMissing: {
    agentenv: [502, "sandbox route is temporarily unavailable"],
    e2b: [502, "The sandbox route is temporarily unavailable"],
  },
  resumeFailed: {
    agentenv: [502, "sandbox auto-resume failed"],
    e2b: [502, "The sandbox could not be resumed"],
  },
  resumeTimedOut: {
    agentenv: [504, "sandbox auto-resume timed out"],
    e2b: [504, "The sandbox was not resumed in time"],
  },
  gone: {
    agentenv: [502, ""],
    e2b: [502, "The sandbox stopped while the request was running"],
  },
  badGateway: {
    agentenv: [502, ""],
    e2b: [502, "The service in the sandbox closed the connection without an answer"],
  },
  timeout: {
    agentenv: [504, ""],
    e2b: [504, "The service in the sandbox did not answer in time"],
  },
  envdToken: {
    agentenv: [401, ""],
    e2b: [401, "Missing or invalid X-Access-Token header"],
  },
  trafficToken: {
    agentenv: [401, ""],
    e2b: [403, "Missing or invalid e2b-traffic-access-token header"],
  },
  tooManyConnections: {
    agentenv: [429, "too many connections to this sandbox"],
    e2b: [429, "There are too many open connections to the sandbox"],
  },
} satisfies Record<string, ProxyFault>;

export function portClosed(port: number): ProxyFault {
  return {
    agentenv: [502, ""],
    e2b: [502, "The sandbox is running but port is not open", { port }],
  };
}

/** A person looks at it: only then an error is a page. What the client calls itself says nothing. */
export function isNavigation(method: string, headers: RawHeaders): boolean {
  if (method !== "GET" && method !== "HEAD") return false;
  const mode = headerValue(headers, "sec-fetch-mode");
  if (mode !== undefined) return mode.toLowerCase() === "navigate";
  const [first] = headerTokens(headers, "accept");
  return first?.split(";")[0]?.trim() === "text/html";
}

const escapeHtml = (text: string) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);

function page(status: number, message: string, sandboxId: string): string {
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>${status} ${escapeHtml(STATUS_CODES[status] ?? "")}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:15vh auto;padding:0 1rem}code{color:#666}</style>
</head><body><h1>${status}</h1><p>${escapeHtml(message)}.</p><p>Sandbox <code>${escapeHtml(sandboxId)}</code></p></body></html>
`;
}

export function formatFault(
  fault: ProxyFault,
  style: ErrorStyle,
  sandboxId: string,
  options: { readonly close: boolean; readonly head: boolean; readonly navigation?: boolean },
): Buffer {
  const common: [string, string][] = [["Access-Control-Allow-Origin", "*"]];
  const status = fault[style][0];
  if (status === 429) common.push(["Retry-After", "1"]);
  if (style === "agentenv") {
    const text = fault.agentenv[1];
    const type = text === "" ? [] : [["Content-Type", "text/plain; charset=utf-8"] as const];
    return formatReply(status, [...type, ...common], Buffer.from(text), options);
  }
  const [, message, extra] = fault.e2b;
  common.push(["Vary", "Accept, Sec-Fetch-Mode"]);
  if (options.navigation === true) {
    const html = page(status, message, sandboxId);
    return formatReply(
      status,
      [["Content-Type", "text/html; charset=utf-8"], ...common],
      Buffer.from(html),
      options,
    );
  }
  const body = JSON.stringify({ sandboxId, message, ...extra, code: status });
  return formatReply(status, [["Content-Type", "application/json"], ...common], Buffer.from(body), options);
}

/** Errors before it is known whom a request is for: the control plane's error body. */
export function formatPlainError(
  status: number,
  message: string,
  options: { readonly close: boolean; readonly head: boolean; readonly headers?: RawHeaders },
): Buffer {
  return formatReply(
    status,
    [["Content-Type", "application/json"], ["Access-Control-Allow-Origin", "*"], ...(options.headers ?? [])],
    Buffer.from(`${JSON.stringify({ code: status, message })}\n`),
    options,
  );
}
