import { z } from "zod";
import { AenvError } from "../lib/errors.ts";
import { badRequest } from "./errors.ts";

export type Method = "GET" | "POST" | "PUT" | "PATCH" | "DELETE";

export interface RouteInput<Query, Body> {
  readonly request: Request;
  readonly params: Readonly<Record<string, string>>;
  readonly query: Query;
  readonly body: Body;
}

export interface RouteReply {
  readonly status: number;
  /** JSON body; absent: an empty body with `Content-Length: 0`. */
  readonly json?: unknown;
  readonly headers?: Readonly<Record<string, string>>;
}

/** One endpoint: what the OpenAPI document says and what runs, from the same schemas. */
export interface Route {
  readonly method: Method;
  /** `/sandboxes/:id` */
  readonly path: string;
  readonly summary: string;
  readonly tag: "sandboxes" | "templates" | "node";
  /** false: open to everybody. */
  readonly authenticated: boolean;
  /** The handler reads the body itself as it arrives; else bodies are small documents that are collected. */
  readonly streamsBody?: boolean;
  readonly query?: z.ZodObject;
  readonly body?: z.ZodType;
  readonly success: readonly {
    readonly status: number;
    readonly schema?: z.ZodType;
    readonly description: string;
  }[];
  /** Error statuses besides 401, 500 and 503. */
  readonly errors: readonly number[];
  readonly run: (input: RouteInput<unknown, unknown>) => Promise<RouteReply | Response>;
}

/** Declares a route; the handler sees the query and body as their schemas give them. */
export function route<
  Query extends z.ZodObject = z.ZodObject<Record<never, never>>,
  Body extends z.ZodType = z.ZodUndefined,
>(
  definition: Omit<Route, "run" | "query" | "body"> & {
    readonly query?: Query;
    readonly body?: Body;
    readonly run: (input: RouteInput<z.output<Query>, z.output<Body>>) => Promise<RouteReply | Response>;
  },
): Route {
  return definition as unknown as Route;
}

/** Names the members of a request body that mean nothing to the call. */
export const IGNORED_FIELDS = "x-agentenv-ignored-fields";

/** Control calls carry small JSON documents only. */
const MAX_BODY_BYTES = 4 * 1024 * 1024;

function describeIssues(error: z.ZodError, what: string): AenvError {
  const unknown: string[] = [];
  const problems: string[] = [];
  for (const issue of error.issues) {
    const path = issue.path.map(String);
    if (issue.code === "unrecognized_keys") {
      unknown.push(...issue.keys.map((key) => [...path, key].join(".")));
    } else problems.push(path.length === 0 ? issue.message : `${path.join(".")}: ${issue.message}`);
  }
  if (unknown.length > 0) problems.unshift(`unknown field: ${shortList(unknown)}`);
  return badRequest(
    `invalid ${what}: ${problems.slice(0, 8).join("; ")}`,
    "invalid_request",
    unknown.length > 0 ? "leave it out; GET /openapi.json has the fields of this call" : undefined,
  );
}

/** Names from a request, for a message or a header. */
function shortList(names: readonly string[]): string {
  return names
    .slice(0, 8)
    .map((name) => name.replace(/[^\x21-\x7e]/g, "?").slice(0, 64))
    .join(", ");
}

/** Members of a body that its schema does not know and lets pass. */
function ignoredFields(schema: z.ZodType, json: unknown): string[] {
  const isOpen = !(schema instanceof z.ZodObject) || schema.def.catchall !== undefined;
  if (isOpen || typeof json !== "object" || json === null) return [];
  return Object.keys(json).filter((key) => !(key in schema.shape));
}

function parseQuery(schema: z.ZodObject, url: URL): unknown {
  const values: Record<string, string> = {};
  for (const key of Object.keys(schema.shape)) {
    const given = url.searchParams.getAll(key);
    if (given.length > 0) values[key] = given.join(",");
  }
  const parsed = schema.safeParse(values);
  if (!parsed.success) throw describeIssues(parsed.error, "query");
  return parsed.data;
}

interface ParsedBody {
  readonly data: unknown;
  readonly ignored: readonly string[];
}

/** As the router has them: none for a path without any, and without what it could not decode. */
export type PathParams = Readonly<Record<string, string | null | undefined>> | undefined;

function wholeParams(params: PathParams): Record<string, string> {
  const whole: Record<string, string> = {};
  for (const [name, value] of Object.entries(params ?? {})) {
    if (typeof value !== "string") throw badRequest(`${name} in the path is not percent-encoded UTF-8`);
    whole[name] = value;
  }
  return whole;
}

const PROTO = "__proto__";

/** A member of that name would be lost on its way through objects: it is refused, not dropped. */
function parseJson(text: string): unknown {
  const value: unknown = JSON.parse(text);
  // Escapes may spell it, too.
  if (text.includes(PROTO) || text.includes("\\u")) refuseProto(value);
  return value;
}

function refuseProto(value: unknown): void {
  if (typeof value !== "object" || value === null) return;
  if (!Array.isArray(value) && Object.hasOwn(value, PROTO)) {
    throw badRequest(`no member of the request body may have the name ${PROTO}`);
  }
  for (const member of Object.values(value)) refuseProto(member);
}

async function parseBody(schema: z.ZodType, request: Request): Promise<ParsedBody> {
  const declared = Number(request.headers.get("content-length") ?? 0);
  const tooLarge = () =>
    new AenvError({
      code: "request_too_large",
      status: 413,
      message: `the request body is larger than ${MAX_BODY_BYTES} bytes`,
    });
  if (declared > MAX_BODY_BYTES) throw tooLarge();
  const bytes = new Uint8Array(await request.arrayBuffer());
  if (bytes.length > MAX_BODY_BYTES) throw tooLarge();
  let json: unknown = {};
  if (bytes.length > 0) {
    let text: string;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch (cause) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "the request body is not UTF-8",
        cause,
      });
    }
    try {
      json = text.trim() === "" ? {} : parseJson(text);
    } catch (cause) {
      if (cause instanceof AenvError) throw cause;
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "the request body is not JSON",
        cause,
      });
    }
  }
  const parsed = schema.safeParse(json);
  if (!parsed.success) throw describeIssues(parsed.error, "request body");
  return { data: parsed.data, ignored: ignoredFields(schema, json) };
}

export async function runRoute(definition: Route, request: Request, params: PathParams): Promise<Response> {
  const url = new URL(request.url);
  const query = definition.query === undefined ? {} : parseQuery(definition.query, url);
  const body = definition.body === undefined ? undefined : await parseBody(definition.body, request);
  const reply = await definition.run({ request, params: wholeParams(params), query, body: body?.data });
  if (reply instanceof Response) return reply;
  // Dropped, but not silently.
  const told =
    body === undefined || body.ignored.length === 0 ? {} : { [IGNORED_FIELDS]: shortList(body.ignored) };
  if (reply.json === undefined) {
    return new Response(null, { status: reply.status, headers: { ...told, ...reply.headers } });
  }
  return new Response(`${JSON.stringify(reply.json)}\n`, {
    status: reply.status,
    headers: { "content-type": "application/json", ...told, ...reply.headers },
  });
}
