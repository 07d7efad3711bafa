import { STATUS_CODES } from "node:http";
import type { ErrorStyle } from "./classify.ts";
import { formatHead } from "./http1.ts";

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
} satisfies Record<string, ProxyFault>;

export function portClosed(port: number): ProxyFault {
  return {
    agentenv: [502, ""],
    e2b: [502, "The sandbox is running but port is not open", { port }],
  };
}

export function formatFault(
  fault: ProxyFault,
  style: ErrorStyle,
  sandboxId: string,
  options: { readonly close: boolean; readonly head: boolean },
): Buffer {
  const cors = ["Access-Control-Allow-Origin", "*"] as const;
  if (style === "agentenv") {
    const [status, text] = fault.agentenv;
    const type = text === "" ? [] : [["Content-Type", "text/plain; charset=utf-8"] as const];
    return formatReply(status, [...type, cors], Buffer.from(text), options);
  }
  const [status, message, extra] = fault.e2b;
  const body = JSON.stringify({ sandboxId, message, ...extra, code: status });
  return formatReply(status, [["Content-Type", "application/json"], cors], Buffer.from(body), options);
}

/** Errors before it is known whom a request is for: the control plane's error body. */
export function formatPlainError(
  status: number,
  message: string,
  options: { readonly close: boolean; readonly head: boolean },
): Buffer {
  return formatReply(
    status,
    [
      ["Content-Type", "application/json"],
      ["Access-Control-Allow-Origin", "*"],
    ],
    Buffer.from(`${JSON.stringify({ code: status, message })}\n`),
    options,
  );
}
