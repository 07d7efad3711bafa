import { AgentError, type AgentTarget, errorOf, routingHeaders, unary } from "./agent.ts";
import { decodeEntries, encodeListDir, encodePath, type RemoteEntry } from "./protocol.ts";

const CALL_MS = 60_000;

/** The entry at a path of the sandbox; undefined when nothing is there. */
export async function stat(target: AgentTarget, path: string): Promise<RemoteEntry | undefined> {
  try {
    const [entry] = decodeEntries(
      await unary(target, "filesystem.Filesystem/Stat", encodePath(path), CALL_MS),
    );
    return entry;
  } catch (error) {
    if (error instanceof AgentError && error.code === "not_found") return undefined;
    throw error;
  }
}

/** What is directly in a directory of the sandbox. */
export async function listDirectory(target: AgentTarget, path: string): Promise<RemoteEntry[]> {
  return decodeEntries(await unary(target, "filesystem.Filesystem/ListDir", encodeListDir(path, 1), CALL_MS));
}

/** Makes a directory and its parents; one that is there is what was wanted. */
export async function makeDirectory(target: AgentTarget, path: string): Promise<void> {
  try {
    await unary(target, "filesystem.Filesystem/MakeDir", encodePath(path), CALL_MS);
  } catch (error) {
    if (!(error instanceof AgentError) || error.code !== "already_exists") throw error;
  }
}

/** Removes whatever is at a path, if anything is. */
export async function remove(target: AgentTarget, path: string): Promise<void> {
  await unary(target, "filesystem.Filesystem/Remove", encodePath(path), CALL_MS);
}

function filesUrl(target: AgentTarget, path: string): string {
  const user = target.user === undefined ? "" : `&username=${encodeURIComponent(target.user)}`;
  return `${target.url}/files?path=${encodeURIComponent(path)}${user}`;
}

async function send(url: string, init: BunFetchRequestInit): Promise<Response> {
  const signal = init.signal;
  let response: Response;
  const unlimited: BunFetchRequestInit & { readonly timeout: false } = {
    ...init,
    redirect: "manual",
    keepalive: false,
    timeout: false,
  };
  try {
    response = await fetch(url, unlimited);
  } catch (cause) {
    if (signal?.aborted === true) throw signal.reason;
    throw new AgentError("cut", "the connection to the sandbox was cut", cause);
  }
  if (response.status !== 200) throw await errorOf(response);
  return response;
}

export interface Body {
  readonly stream: ReadableStream<Uint8Array>;
  /** Bytes in all, when known. */
  readonly length: number | undefined;
  readonly contentType: string;
}

/** Writes one file of the sandbox. It is there under its name only when this resolves. */
export async function put(target: AgentTarget, path: string, body: Body, signal: AbortSignal): Promise<void> {
  const response = await send(filesUrl(target, path), {
    method: "POST",
    headers: {
      ...routingHeaders(target),
      "content-type": body.contentType,
      ...(body.length === undefined ? {} : { "content-length": String(body.length) }),
    },
    body: body.stream,
    signal,
  });
  await response.arrayBuffer();
}

/** Opens a file of the sandbox for reading; the body is as long as `content-length` says, or it was cut. */
export async function get(target: AgentTarget, path: string, signal: AbortSignal): Promise<Response> {
  return send(filesUrl(target, path), {
    method: "GET",
    headers: { ...routingHeaders(target), "accept-encoding": "identity" },
    signal,
  });
}
