import { Elysia } from "elysia";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { type Logger, withLogContext } from "../lib/log.ts";
import type { Observer } from "../observability/types.ts";
import { isAuthorized, strayHost, unauthorized } from "./auth.ts";
import { buildRoutes } from "./builds.ts";
import { errorResponse } from "./errors.ts";
import { networkRoutes } from "./network.ts";
import { nodeRoutes, teamRoutes } from "./nodes.ts";
import { openApiDocument, openApiPage } from "./openapi.ts";
import { type PathParams, type Route, route, runRoute } from "./route.ts";
import { sandboxRoutes } from "./sandboxes.ts";
import { snapshotRoutes } from "./snapshots.ts";
import { telemetryRoutes } from "./telemetry.ts";
import { templateRoutes } from "./templates.ts";
import type { ApiOrchestrator, ApiTemplates } from "./types.ts";

export interface ControlApiOptions {
  readonly orchestrator: ApiOrchestrator;
  readonly templates: ApiTemplates;
  readonly observer: Observer;
  /** One key, or two while a rotation lasts. */
  readonly apiKeys: readonly string[];
  readonly defaultTimeoutSeconds: number;
  readonly sandboxProxyDomains: readonly string[];
  readonly version: string;
  readonly log: Logger;
}

export interface ControlApi {
  /** Answers one control-plane request; never rejects. */
  handle(request: Request): Promise<Response>;
  /** True when a route of the control plane has this path, whatever the method. */
  hasPath(pathname: string): boolean;
  /** True when the route of this method and path reads its body as a stream. */
  streamsBody(method: string, pathname: string): boolean;
  readonly routes: readonly Route[];
}

/** Sandbox a request is about, for its log lines. */
const SANDBOX_PATH = /\/sandboxes\/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:[/?#]|$)/;

const CORS_EXPOSED =
  "X-Next-Token, X-Total-Running, X-Request-Id, X-Agentenv-Sandbox-Id, X-Agentenv-Ignored-Fields, Retry-After, Idempotency-Replayed, Server-Timing";

function withCommonHeaders(response: Response, requestId: string): Response {
  response.headers.set("access-control-allow-origin", "*");
  response.headers.set("access-control-expose-headers", CORS_EXPOSED);
  response.headers.set("x-request-id", requestId);
  return response;
}

function preflight(request: Request): Response {
  return new Response(null, {
    status: 204,
    headers: {
      "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
      "access-control-allow-headers": request.headers.get("access-control-request-headers") ?? "*",
      "access-control-max-age": "86400",
    },
  });
}

function firstPart(path: string): string {
  const end = path.indexOf("/", 1);
  return end < 0 ? path : path.slice(0, end);
}

function once<T>(make: () => T): () => T {
  let made: { readonly value: T } | undefined;
  return () => {
    made ??= { value: make() };
    return made.value;
  };
}

export function createControlApi(options: ControlApiOptions): ControlApi {
  const { orchestrator, templates, observer, log } = options;

  const serverRoutes: Route[] = [
    route({
      method: "GET",
      path: "/health",
      summary: "The server answers",
      tag: "node",
      authenticated: false,
      success: [{ status: 204, description: "Healthy" }],
      errors: [],
      run: async () => ({ status: 204 }),
    }),
    route({
      method: "GET",
      path: "/metrics",
      summary: "Prometheus metrics",
      tag: "node",
      authenticated: false,
      success: [{ status: 200, description: "Prometheus text format" }],
      errors: [],
      run: async () =>
        new Response(await observer.render(), {
          headers: { "content-type": "text/plain; version=0.0.4; charset=utf-8" },
        }),
    }),
    route({
      method: "GET",
      path: "/openapi.json",
      summary: "This API as an OpenAPI document",
      tag: "node",
      authenticated: false,
      success: [{ status: 200, description: "OpenAPI 3.1" }],
      errors: [],
      run: async () => ({ status: 200, json: document() }),
    }),
    route({
      method: "GET",
      path: "/docs",
      summary: "This API as a page",
      tag: "node",
      authenticated: false,
      success: [{ status: 200, description: "HTML" }],
      errors: [],
      run: async () => new Response(page(), { headers: { "content-type": "text/html; charset=utf-8" } }),
    }),
  ];
  const domain = options.sandboxProxyDomains[0];
  const sandboxOptions = {
    orchestrator,
    defaultTimeoutSeconds: options.defaultTimeoutSeconds,
    ...(domain === undefined ? {} : { domain }),
  };
  const routes: Route[] = [
    ...serverRoutes,
    ...nodeRoutes({
      observer,
      orchestrator,
      cachedBuilds: async () =>
        (await templates.list()).filter((build) => build.committed).map(({ id }) => id),
    }),
    ...teamRoutes(observer),
    ...telemetryRoutes({ observer, orchestrator }),
    ...sandboxRoutes(sandboxOptions),
    ...networkRoutes(orchestrator),
    ...snapshotRoutes(sandboxOptions),
    ...buildRoutes(templates),
    ...templateRoutes(templates, observer),
  ];
  // Made when somebody asks: it takes a fifth of the server's start.
  const document = once(() => openApiDocument(routes, options.version));
  const page = once(() => openApiPage(document()));

  // Every request of the data plane is asked for, too: by the first part of the path it is mostly over.
  const shapes = Map.groupBy(
    routes.map((entry) => ({
      method: entry.method,
      streamsBody: entry.streamsBody === true,
      first: firstPart(entry.path),
      shape: new RegExp(`^${entry.path.replace(/:[A-Za-z]+/g, "[^/]+")}/?$`),
    })),
    (entry) => entry.first,
  );
  const shapesOf = (pathname: string) =>
    (shapes.get(firstPart(pathname)) ?? []).filter(({ shape }) => shape.test(pathname));
  /** Methods of a path; empty when it is not one of ours. */
  const methodsOf = (pathname: string) => [...new Set(shapesOf(pathname).map(({ method }) => method))];

  const notFound = (request: Request) => {
    if (!isAuthorized(request.headers, options.apiKeys)) return errorResponse(unauthorized(request.headers));
    const { pathname } = new URL(request.url);
    const methods = methodsOf(pathname);
    const stray = strayHost(request.headers);
    return errorResponse(
      new AenvError({
        code: "route_not_found",
        status: 404,
        message: `route not found: ${request.method} ${pathname}`,
        ...(methods.length === 0
          ? stray === undefined
            ? {}
            : { remediation: stray }
          : {
              remediation: `this path answers to: ${methods.join(", ")}`,
              headers: { allow: methods.join(", ") },
            }),
      }),
    );
  };

  const app = new Elysia({ normalize: false });
  /** Route of a request, for logs and metrics: the pattern has no ids in it. */
  const patterns = new WeakMap<Request, string>();
  for (const definition of routes) {
    app.route(
      definition.method,
      definition.path,
      async ({ request, params }) => {
        patterns.set(request, definition.path);
        try {
          if (definition.authenticated && !isAuthorized(request.headers, options.apiKeys))
            throw unauthorized(request.headers);
          return await runRoute(definition, request, params as PathParams);
        } catch (error) {
          if (!(error instanceof AenvError) || error.status >= 500) {
            log.error({ err: error, method: request.method, route: definition.path }, "request failed");
          }
          return errorResponse(error);
        }
      },
      { parse: "none" },
    );
  }
  app.onError(({ request, code, error }) => {
    if (code === "NOT_FOUND") return notFound(request);
    log.error({ err: error, code }, "request failed outside a route");
    return errorResponse(error);
  });

  /** Answers one request; the ids in its log lines are set around it. */
  const answer = async (request: Request, requestId: string): Promise<Response> => {
    const started = performance.now();
    const response =
      request.method === "OPTIONS" ? preflight(request) : ((await app.fetch(request)) as Response);
    const seconds = (performance.now() - started) / 1000;
    const pattern = patterns.get(request) ?? "none";
    observer.request("control_plane", request.method, pattern, response.status, seconds);
    // Looking is frequent and changes nothing.
    const level = request.method === "GET" || request.method === "HEAD" ? "debug" : "info";
    if (log.isLevelEnabled(level)) {
      log[level](
        {
          method: request.method,
          route: pattern,
          path: new URL(request.url).pathname,
          status: response.status,
          ms: Math.round(seconds * 10_000) / 10,
        },
        "request",
      );
    }
    return withCommonHeaders(response, requestId);
  };

  return {
    routes,
    streamsBody: (method, pathname) =>
      shapesOf(pathname).some((entry) => entry.streamsBody && entry.method === method),
    hasPath: (pathname) => shapesOf(pathname).length > 0,
    async handle(request) {
      const requestId = newId();
      const id = SANDBOX_PATH.exec(request.url)?.[1];
      return withLogContext({ requestId, ...(id === undefined ? {} : { sandboxId: id }) }, () =>
        answer(request, requestId),
      );
    },
  };
}
