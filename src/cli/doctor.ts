import { stat } from "node:fs/promises";
import { version } from "../version.ts";
import { routingHeaders } from "./agent.ts";
import { Api, ApiError, type SandboxJson } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { type Credentials, findCredentials, ignoredUrl } from "./credentials.ts";
import { plainText, print, printJson, wantsTable } from "./output.ts";
import { runningTarget } from "./target.ts";

const LIMIT_MS = 5_000;
const MAX_SKEW_SECONDS = 30;

export interface Finding {
  readonly name: string;
  /** `missing` keeps commands from working. */
  readonly status: "ok" | "warn" | "missing";
  readonly detail: string;
  readonly cure?: string;
}

function failure(name: string, error: unknown, status: Finding["status"] = "missing"): Finding {
  if (!(error instanceof CliError)) throw error;
  const cause = error.cause instanceof Error ? `: ${error.cause.message}` : "";
  return {
    name,
    status,
    detail: `${error.message}${cause}`,
    ...(error.hint === undefined ? {} : { cure: error.hint }),
  };
}

async function checkCredentials(): Promise<{ finding: Finding; credentials?: Credentials }> {
  const name = "credentials";
  try {
    const { credentials, path } = await findCredentials();
    if (path === undefined) {
      return { credentials, finding: { name, status: "ok", detail: "$E2B_API_URL and $E2B_API_KEY" } };
    }
    const ignored = ignoredUrl(credentials);
    if (ignored !== undefined) {
      const cure = "set E2B_API_KEY, too, or unset E2B_API_URL";
      return { credentials, finding: { name, status: "warn", detail: `${path}; ${ignored}`, cure } };
    }
    const { mode } = await stat(path);
    if ((mode & 0o077) !== 0) {
      const detail = `${path} can be read by others (mode ${(mode & 0o777).toString(8)})`;
      return { credentials, finding: { name, status: "warn", detail, cure: `chmod 600 ${path}` } };
    }
    return { credentials, finding: { name, status: "ok", detail: path } };
  } catch (error) {
    return { finding: failure(name, error) };
  }
}

async function checkServer(api: Api): Promise<Finding[]> {
  const { url } = api.credentials;
  const began = performance.now();
  let headers: Headers;
  try {
    headers = (await api.request("GET", "/health", { timeoutMs: LIMIT_MS })).headers;
  } catch (error) {
    return [failure("server", error)];
  }
  const findings: Finding[] = [
    { name: "server", status: "ok", detail: `${url} answers in ${Math.round(performance.now() - began)} ms` },
  ];
  const date = Date.parse(headers.get("date") ?? "");
  if (!Number.isNaN(date)) {
    const skew = Math.round((date - Date.now()) / 1000);
    const off = Math.abs(skew) > MAX_SKEW_SECONDS;
    findings.push({
      name: "clock",
      status: off ? "warn" : "ok",
      detail: off
        ? `the server's clock is ${Math.abs(skew)} s ${skew > 0 ? "ahead" : "behind"}`
        : "agrees with the server's",
      ...(off ? { cure: "set both by NTP: times that are shown and TLS depend on it" } : {}),
    });
  }
  return findings;
}

async function checkKey(api: Api): Promise<{ finding: Finding; sandboxes: readonly SandboxJson[] }> {
  const name = "API key";
  try {
    const { body } = await api.request<readonly SandboxJson[]>(
      "GET",
      "/v2/sandboxes?state=running&limit=100",
      {
        timeoutMs: LIMIT_MS,
      },
    );
    if (!Array.isArray(body)) throw new CliError("the server answers with something other than a list");
    return {
      sandboxes: body,
      finding: { name, status: "ok", detail: `accepted; ${body.length} sandboxes run` },
    };
  } catch (error) {
    return { sandboxes: [], finding: failure(name, error) };
  }
}

async function checkNodes(api: Api): Promise<Finding> {
  const name = "nodes";
  try {
    const { body } = await api.request<readonly { id: string; version: string; status: string }[]>(
      "GET",
      "/nodes",
      { timeoutMs: LIMIT_MS },
    );
    if (body.length === 0) return { name, status: "ok", detail: "the server does not show them" };
    const bad = body.filter((node) => node.status !== "ready");
    const other = body.filter((node) => node.version !== version);
    const versions = [...new Set(body.map((node) => node.version))].join(", ");
    const detail = `${body.length - bad.length} of ${body.length} ready, version ${versions}`;
    if (bad.length > 0)
      return { name, status: "warn", detail, cure: "agentenv doctor on the node tells why" };
    if (other.length > 0) {
      const cure = "other versions mostly work; the same one certainly does";
      return { name, status: "warn", detail: `${detail}, this is ${version}`, cure };
    }
    return { name, status: "ok", detail };
  } catch (error) {
    return error instanceof ApiError && error.status === 404
      ? { name, status: "ok", detail: "the server does not show them" }
      : failure(name, error, "warn");
  }
}

/** The way into a sandbox goes through the same address: a proxy in between may take one and not the other. */
async function checkInside(api: Api, sandboxes: readonly SandboxJson[]): Promise<Finding> {
  const name = "way inside";
  const [first] = sandboxes;
  if (first === undefined) return { name, status: "ok", detail: "no sandbox runs to try it with" };
  try {
    const target = await runningTarget(api, first.sandboxID);
    const response = await fetch(`${target.url}/health`, {
      headers: routingHeaders(target),
      redirect: "manual",
      signal: AbortSignal.timeout(LIMIT_MS),
    });
    const told = (await response.text()).slice(0, 200);
    if (response.status === 204) {
      return { name, status: "ok", detail: `the agent of ${first.sandboxID} answers` };
    }
    return {
      name,
      status: "warn",
      detail: `the agent of ${first.sandboxID} cannot be reached: HTTP ${response.status} ${told}`,
      cure: "a proxy in front of the server must pass the headers x-agentenv-* on",
    };
  } catch (error) {
    const detail = error instanceof Error ? error.message : String(error);
    return { name, status: "warn", detail: `the agent of ${first.sandboxID} cannot be reached: ${detail}` };
  }
}

function checkProxy(url: string): Finding | undefined {
  const variable = ["https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"].find(
    (name) => url.startsWith(`${name.toLowerCase().split("_")[0]}:`) && (process.env[name] ?? "") !== "",
  );
  if (variable === undefined) return undefined;
  return { name: "proxy", status: "ok", detail: `$${variable} is used unless the server is this machine` };
}

function checkTools(): Finding[] {
  const found: Finding[] = [];
  if (Bun.which("aenv") === null) {
    const cure = "put the directory of aenv into $PATH";
    found.push({ name: "aenv", status: "warn", detail: "not in $PATH: shells cannot complete it", cure });
  }
  if (Bun.which("tar") === null) {
    const cure = "install tar";
    found.push({ name: "tar", status: "warn", detail: "not here: no transfers with --preserve", cure });
  }
  return found;
}

/** `aenv doctor`. */
export async function doctor({ flags }: Invocation): Promise<number> {
  const { finding, credentials } = await checkCredentials();
  const findings = [finding];
  if (credentials !== undefined) {
    const api = new Api(credentials);
    const proxy = checkProxy(credentials.url);
    if (proxy !== undefined) findings.push(proxy);
    const server = await checkServer(api);
    findings.push(...server);
    if (server[0]?.status === "ok") {
      const key = await checkKey(api);
      findings.push(key.finding);
      if (key.finding.status === "ok") {
        findings.push(await checkNodes(api), await checkInside(api, key.sandboxes));
      }
    }
  }
  findings.push(...checkTools());
  if (wantsTable(flags.text("output") ?? "table")) {
    const width = Math.max(...findings.map(({ name }) => name.length));
    for (const { name, status, detail, cure } of findings) {
      print(`${status.padEnd(7)}  ${name.padEnd(width)}  ${plainText(detail)}`);
      if (cure !== undefined)
        print(`${" ".repeat(11 + width)}${cure.split("\n").join(`\n${" ".repeat(11 + width)}`)}`);
    }
  } else {
    printJson(findings);
  }
  return findings.some(({ status }) => status === "missing") ? 1 : 0;
}
