import type { z } from "zod";
import { AenvError } from "../lib/errors.ts";
import { isUuid } from "../lib/ids.ts";
import type {
  AttachedDriveRequest,
  CreateSandboxRequest,
  SandboxOrigin,
  SandboxRecord,
} from "../orchestrator/types.ts";
import type { PhaseTimings } from "../sandbox/types.ts";
import { badRequest } from "./errors.ts";
import { IdempotentCalls } from "./idempotency.ts";
import { matchesMetadata, parseMetadataFilter, rawQueryValue } from "./metadata.ts";
import { Ordering, pageOf } from "./pagination.ts";
import { type Route, type RouteReply, route } from "./route.ts";
import * as schema from "./schemas.ts";
import type { ApiOrchestrator } from "./types.ts";

export interface SandboxRoutesOptions {
  readonly orchestrator: ApiOrchestrator;
  readonly defaultTimeoutSeconds: number;
  /** First configured sandbox proxy domain, told to clients. */
  readonly domain?: string;
}

type WarmBody = z.output<typeof schema.NewSandbox> | z.output<typeof schema.NewSandboxV2>;
type CreateBody = WarmBody | z.output<typeof schema.NewColdSandbox>;

const PAUSED_STATES = new Set(["pausing", "paused", "snapshotting", "forking"]);

function publicState(record: SandboxRecord): "running" | "paused" {
  return PAUSED_STATES.has(record.state) ? "paused" : "running";
}

function notFound(id: string): AenvError {
  return new AenvError({
    code: "sandbox_not_found",
    status: 404,
    message: `sandbox ${id} was not found`,
    remediation: "list the sandboxes there are with GET /v2/sandboxes or `aenv list`",
  });
}

/** An id that cannot be one is unknown, not malformed. */
export function sandboxId(params: Readonly<Record<string, string>>): string {
  const id = params.id ?? "";
  if (!isUuid(id)) throw notFound(id);
  return id.toLowerCase();
}

function isEmptyValue(value: unknown): boolean {
  return (
    value === null || value === undefined || (typeof value === "object" && Object.keys(value).length === 0)
  );
}

function unknownNetworkFields(network: Readonly<Record<string, unknown>> | undefined): string[] {
  return Object.entries(network ?? {})
    .filter(([key, value]) => !(key in schema.NetworkConfig.shape) && !isEmptyValue(value))
    .map(([key]) => `network.${key}`);
}

/** Fields that are part of the contract but whose part of the product is not built are refused, never ignored. */
function refuseUnsupported(body: {
  readonly customExtensionParams?: Record<string, unknown> | undefined;
  readonly volumeMounts?: readonly unknown[] | undefined;
  readonly network?: z.output<typeof schema.NetworkConfig> | undefined;
  readonly iam?: { readonly tokens?: Record<string, unknown> | undefined } | undefined;
}): void {
  const refused: string[] = [];
  if (Object.keys(body.customExtensionParams ?? {}).length > 0) refused.push("customExtensionParams");
  if ((body.volumeMounts ?? []).length > 0) refused.push("volumeMounts");
  // Unknown members of `network` would be silently weaker rules.
  refused.push(...unknownNetworkFields(body.network));
  if (Object.keys(body.iam?.tokens ?? {}).length > 0) refused.push("iam.tokens");
  if (refused.length > 0) {
    const cure = refused.includes("volumeMounts")
      ? "bring data in as an image with attachedDrives of POST /sandboxes-cold, or as files once it runs (aenv upload, files.write)"
      : "leave them out";
    throw badRequest(`not supported by this server: ${refused.join(", ")}`, "unsupported_field", cure);
  }
}

function driveRequest(drive: z.output<typeof schema.AttachedDrive>): AttachedDriveRequest {
  const { driveID, source, readOnly, mountPath, subPath, diskSizeMB } = drive;
  return {
    driveId: driveID,
    image: source.image,
    readOnly,
    ...(mountPath === undefined ? {} : { mountPath }),
    ...(subPath === undefined ? {} : { subPath }),
    ...(diskSizeMB === undefined ? {} : { diskSizeMiB: diskSizeMB }),
  };
}

/** What is kept at the deadline; a pause without memory is one that traffic cannot undo. */
function autoPauseMemory(body: WarmBody): { readonly autoPauseMemory?: false } {
  if (body.autoPauseMemory !== false) return {};
  const needs = (what: string): AenvError =>
    badRequest(`autoPauseMemory: false ${what}`, "invalid_auto_pause_memory");
  if (!body.autoPause) throw needs("is about the pause at the deadline: it needs autoPause: true");
  if (body.autoResume?.enabled === true) {
    throw needs(
      "cannot be had with autoResume.enabled: what is paused without memory is not woken by traffic",
    );
  }
  return { autoPauseMemory: false };
}

/** Where the time of an operation went, in the standard header that browsers and tools show. */
export function serverTiming(phases: PhaseTimings | undefined): Record<string, string> {
  if (phases === undefined) return {};
  const entries = Object.entries(phases).map(([name, ms]) => `${name};dur=${ms}`);
  return entries.length === 0 ? {} : { "server-timing": entries.join(", ") };
}

/** A sandbox as lists show it. */
export function listedSandbox(record: SandboxRecord) {
  return {
    templateID: record.templateId,
    sandboxID: record.id,
    clientID: "" as const,
    envdVersion: record.envdVersion,
    ...(record.alias === undefined ? {} : { alias: record.alias }),
    startedAt: record.startedAt,
    endAt: record.endAt,
    cpuCount: record.cpuCount,
    memoryMB: record.memoryMiB,
    diskSizeMB: record.diskSizeMiB,
    state: publicState(record),
    metadata: record.metadata,
  };
}

/** A sandbox as the calls that start one tell of it. */
export function startedSandbox({ orchestrator, domain }: SandboxRoutesOptions) {
  return (record: SandboxRecord) => ({
    templateID: record.templateId,
    sandboxID: record.id,
    clientID: "" as const,
    envdVersion: record.envdVersion,
    ...(record.alias === undefined ? {} : { alias: record.alias }),
    ...(record.secure ? { envdAccessToken: orchestrator.accessToken(record.id) } : {}),
    trafficAccessToken:
      record.network?.allowPublicTraffic === false ? orchestrator.trafficToken(record.id) : null,
    domain: domain ?? null,
  });
}

export function sandboxRoutes(options: SandboxRoutesOptions): Route[] {
  const { orchestrator, defaultTimeoutSeconds } = options;
  const domain = options.domain ?? null;
  const recordKey = (record: SandboxRecord) => ({ createdAt: record.startedAt, id: record.id });
  const sandboxOrder = new Ordering(recordKey);

  const started = startedSandbox(options);

  const idempotent = new IdempotentCalls();

  /** What all ways to make a sandbox have in common. */
  const wishesOf = (
    body: CreateBody,
    timeout: number | undefined,
    secure: boolean,
    allowInternetAccess: boolean | undefined,
    origin: SandboxOrigin | undefined,
  ) => ({
    ...(origin === undefined ? {} : { origin }),
    timeoutSeconds: timeout ?? defaultTimeoutSeconds,
    onTimeout: body.autoPause ? ("pause" as const) : ("kill" as const),
    autoResume: body.autoResume?.enabled ?? false,
    secure,
    metadata: body.metadata ?? {},
    envVars: body.envVars ?? {},
    ...(body.network === undefined ? {} : { network: body.network }),
    ...(allowInternetAccess === undefined ? {} : { allowInternetAccess }),
  });
  const fromTemplate = (
    body: WarmBody,
    timeout: number | undefined,
    secure: boolean,
    origin: SandboxOrigin | undefined,
  ): CreateSandboxRequest => ({
    ...wishesOf(body, timeout, secure, body.allow_internet_access, origin),
    template: body.templateID,
    ...autoPauseMemory(body),
    ...(body.mcp === undefined ? {} : { mcp: body.mcp }),
  });

  /** A call that starts a sandbox and can be repeated under one Idempotency-Key. */
  const createRoute = <Body extends CreateBody>(given: {
    readonly path: string;
    readonly summary: string;
    readonly body: z.ZodType<Body>;
    readonly errors: readonly number[];
    readonly start: (body: Body, origin: SandboxOrigin | undefined) => Promise<SandboxRecord>;
  }): Route =>
    route<z.ZodObject<Record<never, never>>, z.ZodType<Body>>({
      method: "POST",
      path: given.path,
      summary: given.summary,
      tag: "sandboxes",
      authenticated: true,
      body: given.body,
      success: [{ status: 201, schema: schema.Sandbox, description: "The sandbox runs" }],
      errors: given.errors,
      run: async ({ request, body }) => {
        refuseUnsupported(body);
        const reply = (record: SandboxRecord): RouteReply => ({
          status: 201,
          json: started(record),
          headers: {
            "x-agentenv-sandbox-id": record.id,
            ...serverTiming(orchestrator.timings(record.id).create),
          },
        });
        return idempotent.run(
          `POST ${given.path}`,
          request,
          body,
          async (origin) => reply(await given.start(body, origin)),
          (key) => {
            const made = orchestrator.list().find((record) => record.origin?.key === key);
            if (made?.origin === undefined) return undefined;
            const { fingerprint } = made.origin;
            return { fingerprint, createdMs: Date.parse(made.startedAt), reply: reply(made) };
          },
        );
      },
    });

  /** These calls answer 400 where /v2/sandboxes answers 404: their clients know no other. */
  const asBadRequest = (error: unknown): never => {
    if (
      error instanceof AenvError &&
      (error.code === "template_not_found" || error.code === "image_not_found")
    ) {
      throw new AenvError({
        code: error.code,
        status: 400,
        message: error.message,
        cause: error.cause,
        ...(error.remediation === undefined ? {} : { remediation: error.remediation }),
      });
    }
    throw error;
  };

  return [
    createRoute({
      path: "/sandboxes",
      summary: "Start a sandbox from a template or snapshot",
      body: schema.NewSandbox,
      errors: [400, 422, 429],
      start: (body, origin) =>
        orchestrator.create(fromTemplate(body, body.timeout, body.secure, origin)).catch(asBadRequest),
    }),
    createRoute({
      path: "/v2/sandboxes",
      summary: "Start a secured sandbox from a template or snapshot",
      body: schema.NewSandboxV2,
      errors: [400, 404, 422, 429],
      start: (body, origin) => orchestrator.create(fromTemplate(body, body.timeout, true, origin)),
    }),
    createRoute({
      path: "/sandboxes-cold",
      summary: "Boot a sandbox from an image, without a template",
      body: schema.NewColdSandbox,
      errors: [400, 422, 429, 502, 507],
      start: (body, origin) =>
        orchestrator
          .createCold({
            ...wishesOf(body, body.timeout, body.secure, body.allowInternetAccess, origin),
            image: body.image,
            ...(body.cpuCount === undefined ? {} : { cpuCount: body.cpuCount }),
            ...(body.memoryMB === undefined ? {} : { memoryMiB: body.memoryMB }),
            ...(body.diskSizeMB === undefined ? {} : { diskSizeMiB: body.diskSizeMB }),
            ...(body.extraBootArgs === undefined ? {} : { extraBootArgs: body.extraBootArgs }),
            ...(body.attachedDrives === undefined
              ? {}
              : { attachedDrives: body.attachedDrives.map(driveRequest) }),
          })
          .catch(asBadRequest),
    }),
    route({
      method: "GET",
      path: "/sandboxes",
      summary: "List running sandboxes",
      tag: "sandboxes",
      authenticated: true,
      query: schema.ListSandboxesQuery,
      success: [{ status: 200, schema: schema.ListedSandbox.array(), description: "Running sandboxes" }],
      errors: [400],
      run: async ({ request }) => {
        const filter = parseMetadataFilter(rawQueryValue(request.url, "metadata"));
        const running = sandboxOrder
          .of(orchestrator.list(), false)
          .filter((record) => publicState(record) === "running" && matchesMetadata(record.metadata, filter));
        return { status: 200, json: running.map(listedSandbox) };
      },
    }),
    route({
      method: "GET",
      path: "/v2/sandboxes",
      summary: "List sandboxes, page by page",
      tag: "sandboxes",
      authenticated: true,
      query: schema.ListSandboxesV2Query,
      success: [
        {
          status: 200,
          schema: schema.ListedSandbox.array(),
          description: "One page; X-Next-Token is present when there is another",
        },
      ],
      errors: [400],
      run: async ({ request, query }) => {
        const filter = parseMetadataFilter(rawQueryValue(request.url, "metadata"));
        const states = (query.state ?? "running,paused").split(",").filter((state) => state !== "");
        const wrong = states.find((state) => state !== "running" && state !== "paused");
        if (wrong !== undefined) throw badRequest(`state: "${wrong}" is neither running nor paused`);
        const startedAfter =
          query.startedAfter === undefined ? undefined : new Date(query.startedAfter).toISOString();
        const ascending = query.order === "asc";
        const { template } = query;
        const all = sandboxOrder.of(orchestrator.list(), ascending);
        const unfiltered = filter.size === 0 && startedAfter === undefined && template === undefined;
        const candidates = unfiltered
          ? all
          : all.filter(
              (record) =>
                matchesMetadata(record.metadata, filter) &&
                (startedAfter === undefined || record.startedAt >= startedAfter) &&
                (template === undefined || record.templateId === template || record.alias === template),
            );
        let running = 0;
        for (const record of candidates) if (publicState(record) === "running") running++;
        const wanted = new Set(states.length === 0 ? ["running", "paused"] : states);
        const matching =
          wanted.size === 2 ? candidates : candidates.filter((record) => wanted.has(publicState(record)));
        const page = pageOf(matching, recordKey, {
          limit: query.limit,
          nextToken: query.nextToken,
          ascending,
        });
        return {
          status: 200,
          json: page.items.map(listedSandbox),
          headers: {
            "x-total-running": String(running),
            ...(page.nextToken === undefined ? {} : { "x-next-token": page.nextToken }),
          },
        };
      },
    }),
    route({
      method: "GET",
      path: "/sandboxes/:id",
      summary: "One sandbox",
      tag: "sandboxes",
      authenticated: true,
      success: [{ status: 200, schema: schema.SandboxDetail, description: "The sandbox" }],
      errors: [404],
      run: async ({ params }) => {
        const record = orchestrator.get(sandboxId(params));
        return {
          status: 200,
          json: {
            ...listedSandbox(record),
            ...(record.secure ? { envdAccessToken: orchestrator.accessToken(record.id) } : {}),
            domain,
            allowInternetAccess: record.allowInternetAccess ?? null,
            ...(record.network === undefined ? {} : { network: record.network }),
            lifecycle: { autoResume: record.autoResume, onTimeout: record.onTimeout },
            ...(record.unresponsiveSince === undefined
              ? {}
              : { unresponsiveSince: record.unresponsiveSince }),
          },
        };
      },
    }),
    route({
      method: "GET",
      path: "/sandboxes/:id/custom-extension-params",
      summary: "Parameters the configured extension knows the sandbox by; none without an extension",
      tag: "sandboxes",
      authenticated: true,
      success: [{ status: 200, schema: schema.FreeObject, description: "The parameters" }],
      errors: [404],
      run: async ({ params }) => {
        orchestrator.get(sandboxId(params));
        return { status: 200, json: {} };
      },
    }),
    route({
      method: "PATCH",
      path: "/sandboxes/:id/custom-extension-params",
      summary: "Hand a change of the parameters to the extension; 400 without one",
      tag: "sandboxes",
      authenticated: true,
      body: schema.FreeObject,
      success: [{ status: 200, schema: schema.FreeObject, description: "The new parameters" }],
      errors: [400, 404, 409],
      run: async ({ params }) => {
        const record = orchestrator.get(sandboxId(params));
        if (record.state !== "running") {
          throw new AenvError({
            code: "sandbox_state_conflict",
            status: 409,
            message: `sandbox ${record.id} is ${record.state}: parameters are changed while it runs`,
          });
        }
        throw badRequest(
          "this server has no custom extension that could take parameters",
          "custom_extension_not_configured",
          "set custom_extension.url in the server's configuration",
        );
      },
    }),
    route({
      method: "DELETE",
      path: "/sandboxes/:id",
      summary: "Kill a sandbox, running or paused",
      tag: "sandboxes",
      authenticated: true,
      success: [{ status: 204, description: "Gone" }],
      errors: [404],
      run: async ({ params }) => {
        await orchestrator.kill(sandboxId(params));
        return { status: 204 };
      },
    }),
    route({
      method: "POST",
      path: "/sandboxes/:id/pause",
      summary: "Pause a sandbox, with its memory or (memory: false) its disks alone",
      tag: "sandboxes",
      authenticated: true,
      body: schema.PauseRequest,
      success: [{ status: 204, description: "Paused and stored" }],
      errors: [400, 404, 409],
      run: async ({ params, body }) => {
        const id = sandboxId(params);
        await orchestrator.pause(id, { memory: body.memory ?? true });
        return { status: 204, headers: serverTiming(orchestrator.timings(id).pause) };
      },
    }),
    route({
      method: "POST",
      path: "/sandboxes/:id/resume",
      summary: "Resume a paused sandbox and set its deadline",
      tag: "sandboxes",
      authenticated: true,
      body: schema.ResumeRequest,
      success: [{ status: 201, schema: schema.Sandbox, description: "The sandbox runs" }],
      errors: [400, 404, 409],
      run: async ({ params, body }) => {
        const record = await orchestrator.resume(sandboxId(params), body.timeout ?? defaultTimeoutSeconds, {
          memory: body.memory ?? true,
        });
        return {
          status: 201,
          json: started(record),
          headers: serverTiming(orchestrator.timings(record.id).resume),
        };
      },
    }),
    ...(
      [
        ["/sandboxes/:id/connect", schema.ConnectRequest],
        ["/v2/sandboxes/:id/connect", schema.ConnectRequestV2],
      ] as const
    ).map(([path, body]) =>
      route<z.ZodObject<Record<never, never>>, z.ZodType<{ timeout: number; memory?: boolean }>>({
        method: "POST",
        path,
        summary: "Make sure the sandbox runs for at least the timeout, resuming it when paused",
        tag: "sandboxes",
        authenticated: true,
        body,
        success: [
          { status: 200, schema: schema.Sandbox, description: "It was running" },
          { status: 201, schema: schema.Sandbox, description: "It was resumed" },
        ],
        errors: [400, 404, 409],
        run: async ({ params, body: given }) => {
          const { record, resumed } = await orchestrator.connect(sandboxId(params), given.timeout, {
            memory: given.memory ?? true,
          });
          return {
            status: resumed ? 201 : 200,
            json: started(record),
            ...(resumed ? { headers: serverTiming(orchestrator.timings(record.id).resume) } : {}),
          };
        },
      }),
    ),
    route({
      method: "POST",
      path: "/sandboxes/:id/timeout",
      summary: "Set the deadline to now + timeout; may shorten it",
      tag: "sandboxes",
      authenticated: true,
      body: schema.TimeoutRequest,
      success: [{ status: 204, description: "Set" }],
      errors: [400, 404, 409],
      run: async ({ params, body }) => {
        await orchestrator.setTimeout(sandboxId(params), body.timeout ?? defaultTimeoutSeconds);
        return { status: 204 };
      },
    }),
    route({
      method: "POST",
      path: "/sandboxes/:id/refreshes",
      summary: "Extend the deadline; never shortens it",
      tag: "sandboxes",
      authenticated: true,
      body: schema.RefreshRequest,
      success: [{ status: 204, description: "Extended" }],
      errors: [400, 404, 409],
      run: async ({ params, body }) => {
        await orchestrator.refresh(sandboxId(params), body.duration);
        return { status: 204 };
      },
    }),
    route({
      method: "PUT",
      path: "/sandboxes/:id/network",
      summary: "Replace what a running sandbox may reach; what is left out is cleared",
      tag: "sandboxes",
      authenticated: true,
      body: schema.NetworkUpdate,
      success: [{ status: 204, description: "In force" }],
      errors: [400, 404, 409],
      run: async ({ params, body }) => {
        const id = sandboxId(params);
        const refused = Object.entries(body)
          .filter(([key, value]) => !(key in schema.NetworkUpdate.shape) && !isEmptyValue(value))
          .map(([key]) => key);
        if (refused.length > 0) {
          throw badRequest(`not supported by this server: ${refused.join(", ")}`, "unsupported_field");
        }
        await orchestrator.updateNetwork(id, {
          ...(body.allowOut === undefined ? {} : { allowOut: body.allowOut }),
          ...(body.denyOut === undefined ? {} : { denyOut: body.denyOut }),
          ...(body.allow_internet_access === undefined
            ? {}
            : { allowInternetAccess: body.allow_internet_access }),
        });
        return { status: 204 };
      },
    }),
  ];
}
