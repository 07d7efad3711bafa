import { isUuid } from "../lib/ids.ts";
import { headerValues, lowerCaseNames, type RawHeaders } from "./http1.ts";

/** Whose error texts and statuses a client expects: decided by how it named the sandbox. */
export type ErrorStyle = "agentenv" | "e2b";

/** How a request named its sandbox. */
export type DataSource = "proxy_host" | "proxy_header" | "proxy_prefix";

export type Classification =
  | { readonly plane: "control" }
  | {
      readonly plane: "data";
      readonly style: ErrorStyle;
      readonly sandboxId: string;
      readonly port: number;
      /** Path and query as the service sees them, byte for byte. */
      readonly target: string;
      readonly source: DataSource;
    }
  /** A signed file URL that names no sandbox: the signature tells whose it is. */
  | { readonly plane: "signed"; readonly target: string; readonly query: URLSearchParams }
  | {
      readonly plane: "invalid";
      readonly style: ErrorStyle;
      readonly message: string;
      /** Outside /proxy a caller without an API key learns nothing: 401. */
      readonly needsApiKey: boolean;
    };

export const ROUTING_HEADERS = new Set([
  "x-agentenv-sandbox-id",
  "x-agentenv-target-port",
  "e2b-sandbox-id",
  "e2b-sandbox-port",
]);

function firstNonEmpty(headers: RawHeaders, names: readonly string[]): string | undefined {
  for (const name of names) {
    const value = headerValues(headers, name).find((text) => text.trim() !== "");
    if (value !== undefined) return value.trim();
  }
  return undefined;
}

function parsePort(text: string): number | undefined {
  if (!/^\d{1,5}$/.test(text)) return undefined;
  const port = Number(text);
  return port >= 1 && port <= 65_535 ? port : undefined;
}

type HostRoute =
  | { readonly kind: "none" }
  | { readonly kind: "sandbox"; readonly sandboxId: string; readonly port: number }
  | { readonly kind: "invalid"; readonly message: string };

/** `{port}-{sandboxId}.{domain}`: the label is split at its first dash, an id has dashes of its own. */
export function parseSandboxHost(host: string, domains: readonly string[]): HostRoute {
  const name = host.trim().replace(/:\d+$/, "").replace(/\.+$/, "").toLowerCase();
  for (const domain of [...domains].sort((a, b) => b.length - a.length)) {
    if (name === domain) return { kind: "none" };
    if (!name.endsWith(`.${domain}`)) continue;
    const label = name.slice(0, -domain.length - 1);
    const dash = label.indexOf("-");
    if (label.includes(".") || dash < 0) return { kind: "none" };
    const invalid = (what: string): HostRoute => ({
      kind: "invalid",
      message: `invalid sandbox data-plane host: ${what}`,
    });
    const sandboxId = label.slice(dash + 1);
    const port = parsePort(label.slice(0, dash));
    if (sandboxId === "") return invalid("sandbox id is empty");
    if (port === undefined) return invalid("port is invalid");
    if (!isUuid(sandboxId)) return invalid("sandbox id is invalid");
    return { kind: "sandbox", sandboxId, port };
  }
  return { kind: "none" };
}

/** Path and query of a request target; an absolute-form target gives its host, too. */
export function splitTarget(target: string): { readonly target: string; readonly authority?: string } {
  const absolute = /^https?:\/\/([^/?#]*)([^#]*)/i.exec(target);
  if (absolute === null) return { target };
  const rest = absolute[2]!;
  return { target: rest.startsWith("/") ? rest : `/${rest}`, authority: absolute[1]! };
}

export function pathOf(target: string): string {
  const query = target.indexOf("?");
  return query < 0 ? target : target.slice(0, query);
}

export interface ClassifyOptions {
  /** Lower case, without trailing dots. */
  readonly domains: readonly string[];
  readonly isControlPath: (path: string) => boolean;
}

/** Decides which plane a request belongs to. The order of the rules is part of the contract. */
export function classify(rawTarget: string, headers: RawHeaders, options: ClassifyOptions): Classification {
  const { target, authority } = splitTarget(rawTarget);
  const path = pathOf(target);

  const idText = firstNonEmpty(headers, ["x-agentenv-sandbox-id", "e2b-sandbox-id"]);
  const portText = firstNonEmpty(headers, ["x-agentenv-target-port", "e2b-sandbox-port"]);
  const style: ErrorStyle = lowerCaseNames(headers).some((name) => name.startsWith("x-agentenv-"))
    ? "agentenv"
    : "e2b";

  const byHeaders = (forwarded: string, source: DataSource): Classification => {
    const needsApiKey = source !== "proxy_prefix";
    const headerStyle = idText === undefined && portText === undefined ? "agentenv" : style;
    const invalid = (message: string): Classification => ({
      plane: "invalid",
      style: headerStyle,
      message,
      needsApiKey,
    });
    if (idText === undefined) return invalid("missing sandbox routing header");
    if (!isUuid(idText)) return invalid("invalid sandbox routing header");
    if (portText === undefined) return invalid("missing target port routing header");
    const port = parsePort(portText);
    if (port === undefined) return invalid("invalid target port routing header");
    return {
      plane: "data",
      style: headerStyle,
      sandboxId: idText.toLowerCase(),
      port,
      target: forwarded,
      source,
    };
  };

  if (path === "/proxy" || path.startsWith("/proxy/")) {
    const rest = target.slice("/proxy".length);
    return byHeaders(rest.startsWith("/") ? rest : `/${rest}`, "proxy_prefix");
  }

  if (options.domains.length > 0) {
    const host = parseSandboxHost(authority ?? headerValues(headers, "host")[0] ?? "", options.domains);
    if (host.kind === "invalid") {
      return { plane: "invalid", style: "e2b", message: host.message, needsApiKey: true };
    }
    if (host.kind === "sandbox") {
      return {
        plane: "data",
        style: "e2b",
        sandboxId: host.sandboxId,
        port: host.port,
        target,
        source: "proxy_host",
      };
    }
  }

  // The clients' health probe of a sandbox comes under the same path as ours.
  if (idText !== undefined && portText !== undefined && (path === "/health" || path === "/metrics")) {
    return byHeaders(target, "proxy_header");
  }
  if (options.isControlPath(path)) return { plane: "control" };
  if (idText !== undefined) return byHeaders(target, "proxy_header");
  if (path === "/files" && target.includes("signature=")) {
    const query = new URLSearchParams(target.slice(path.length));
    if (query.has("signature")) return { plane: "signed", target, query };
  }
  return { plane: "control" };
}
