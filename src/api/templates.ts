import { AenvError } from "../lib/errors.ts";
import type { Observer, SpawnCount } from "../observability/types.ts";
import type { SnapshotRecord } from "../snapshot/types.ts";
import { badRequest } from "./errors.ts";
import { paginate } from "./pagination.ts";
import { type Route, route } from "./route.ts";
import * as schema from "./schemas.ts";
import { tagRoutes } from "./tags.ts";
import type { ApiTemplates } from "./types.ts";

function templateNotFound(name: string): AenvError {
  return new AenvError({
    code: "template_not_found",
    status: 404,
    message: `template ${name} was not found`,
    remediation: "list the templates there are with GET /v2/templates or `aenv template list`",
  });
}

type Defined<T> = { [Key in keyof T]: Exclude<T[Key], undefined> };

/** Without the keys that are there and undefined. */
function defined<T extends object>(value: T): Defined<T> {
  return Object.fromEntries(Object.entries(value).filter(([, field]) => field !== undefined)) as Defined<T>;
}

interface TemplateView {
  readonly templateId: string;
  readonly builds: readonly SnapshotRecord[];
  /** What sandboxes start from: the newest ready build, else the newest one. */
  readonly current: SnapshotRecord;
}

function buildStatus(record: SnapshotRecord): "waiting" | "building" | "ready" | "error" {
  return record.source.kind === "template" ? record.source.build.status : "ready";
}

function groupByTemplate(records: readonly SnapshotRecord[]): TemplateView[] {
  const groups = new Map<string, SnapshotRecord[]>();
  for (const record of records) {
    if (record.source.kind !== "template") continue;
    const group = groups.get(record.templateId);
    if (group === undefined) groups.set(record.templateId, [record]);
    else group.push(record);
  }
  return [...groups].map(([templateId, builds]) => {
    builds.sort((a, b) =>
      a.createdAt < b.createdAt ? 1 : a.createdAt > b.createdAt ? -1 : a.id < b.id ? 1 : -1,
    );
    return {
      templateId,
      builds,
      current: builds.find((build) => buildStatus(build) === "ready") ?? builds[0]!,
    };
  });
}

function templateNames(view: TemplateView): string[] {
  return [...new Set(view.builds.flatMap((build) => build.aliases))];
}

function templateJson(view: TemplateView, spawns: SpawnCount) {
  const names = templateNames(view);
  return {
    templateID: view.templateId,
    buildID: view.current.id,
    cpuCount: view.current.resources.cpuCount,
    memoryMB: view.current.resources.memoryMiB,
    diskSizeMB: view.current.resources.diskSizeMiB,
    public: view.current.public,
    aliases: names,
    names,
    createdAt: view.builds.at(-1)!.createdAt,
    updatedAt: view.current.updatedAt,
    createdBy: null,
    ...spawnJson(spawns),
    buildCount: view.builds.length,
    envdVersion: view.current.committed?.state.envdVersion ?? "0.0.0",
    buildStatus: buildStatus(view.current),
  };
}

function spawnJson({ count, lastAtMs }: SpawnCount) {
  return {
    lastSpawnedAt: lastAtMs === undefined ? null : new Date(lastAtMs).toISOString(),
    spawnCount: count,
  };
}

export function templateRoutes(templates: ApiTemplates, observer: Pick<Observer, "spawns">): Route[] {
  const listed = async () =>
    groupByTemplate(await templates.list()).map((entry) =>
      templateJson(entry, observer.spawns(entry.templateId)),
    );
  const view = async (name: string): Promise<TemplateView> => {
    const record = await templates.resolve(name);
    const all = groupByTemplate(await templates.list());
    const found = all.find((entry) => entry.templateId === (record?.templateId ?? name));
    if (found === undefined) throw templateNotFound(name);
    return found;
  };

  return [
    route({
      method: "POST",
      path: "/v3/templates",
      summary: "Create a template, or a new build of the one with that name",
      tag: "templates",
      authenticated: true,
      body: schema.NewTemplate,
      success: [
        { status: 202, schema: schema.TemplateCreated, description: "Waiting for its build to be started" },
      ],
      errors: [400],
      run: async ({ body }) => {
        const name = body.name ?? body.alias;
        if (name === undefined) throw badRequest("invalid request body: name: is required");
        const created = await templates.create({
          name,
          tags: body.tags ?? [],
          ...(body.cpuCount === undefined ? {} : { cpuCount: body.cpuCount }),
          ...(body.memoryMB === undefined ? {} : { memoryMiB: body.memoryMB }),
          ...(body.minFreeDiskMb === undefined ? {} : { minFreeDiskMiB: body.minFreeDiskMb }),
        });
        return {
          status: 202,
          json: {
            templateID: created.templateId,
            buildID: created.buildId,
            public: true,
            names: [created.alias],
            tags: created.tags,
            aliases: [created.alias],
          },
        };
      },
    }),
    route({
      method: "POST",
      path: "/v2/templates/:id/builds/:build",
      summary: "Start a build; poll its status for the outcome",
      tag: "templates",
      authenticated: true,
      body: schema.BuildStart,
      success: [{ status: 202, description: "The build runs" }],
      errors: [400, 404, 409, 429],
      run: async ({ params, body }) => {
        const registry = body.fromImageRegistry;
        if (registry !== undefined && registry.type !== "registry") {
          throw badRequest(
            `not supported by this server: fromImageRegistry of type "${registry.type}"`,
            "unsupported_field",
          );
        }
        if (registry !== undefined && (registry.username === undefined || registry.password === undefined)) {
          throw badRequest("invalid request body: fromImageRegistry needs username and password");
        }
        await templates.startBuild(params.id!, params.build!, {
          ...(body.fromImage === undefined ? {} : { fromImage: body.fromImage }),
          ...(body.fromTemplate === undefined ? {} : { fromTemplate: body.fromTemplate }),
          ...(registry === undefined
            ? {}
            : { credentials: { username: registry.username!, password: registry.password! } }),
          ...(body.force === undefined ? {} : { force: body.force }),
          steps: (body.steps ?? []).map(defined),
          ...(body.stages === undefined
            ? {}
            : { stages: body.stages.map((stage) => defined({ ...stage, steps: stage.steps.map(defined) })) }),
          ...(body.dockerfile === undefined ? {} : { dockerfile: body.dockerfile }),
          ...(body.startCmd === undefined ? {} : { startCmd: body.startCmd }),
          ...(body.readyCmd === undefined ? {} : { readyCmd: body.readyCmd }),
        });
        return { status: 202 };
      },
    }),
    route({
      method: "GET",
      path: "/templates/:id/builds/:build/status",
      summary: "State of a build and the log entries from logsOffset on",
      tag: "templates",
      authenticated: true,
      query: schema.BuildStatusQuery,
      success: [{ status: 200, schema: schema.BuildInfo, description: "The build" }],
      errors: [400, 404],
      run: async ({ params, query }) => {
        const { record, build, logs } = await templates.build(params.id!, params.build!);
        const entries = await logs.select({
          ...defined({ level: query.level }),
          offset: query.logsOffset,
          limit: query.limit,
        });
        return {
          status: 200,
          json: {
            templateID: record.templateId,
            buildID: record.id,
            status: build.status,
            logs: entries.map((entry) => entry.message),
            logEntries: entries,
            ...(build.status === "error"
              ? {
                  reason: {
                    message: build.reason?.message ?? "the build failed",
                    ...(build.reason?.step === undefined ? {} : { step: build.reason.step }),
                    logEntries: (await logs.select({ backward: true, limit: 50 })).toReversed(),
                  },
                }
              : {}),
          },
        };
      },
    }),
    route({
      method: "GET",
      path: "/templates/:id/builds/:build/logs",
      summary: "Log of a build",
      tag: "templates",
      authenticated: true,
      query: schema.BuildLogsQuery,
      success: [{ status: 200, description: "Log entries" }],
      errors: [400, 404],
      run: async ({ params, query }) => {
        const { logs } = await templates.build(params.id!, params.build!);
        const entries = await logs.select({
          ...defined({ level: query.level, cursorMs: query.cursor }),
          backward: query.direction === "backward",
          limit: query.limit,
        });
        return { status: 200, json: { logs: entries } };
      },
    }),
    route({
      method: "GET",
      path: "/templates",
      summary: "List templates",
      tag: "templates",
      authenticated: true,
      query: schema.ListTemplatesQuery,
      success: [{ status: 200, schema: schema.Template.array(), description: "All templates, newest first" }],
      errors: [],
      run: async () => {
        const all = await listed();
        return { status: 200, json: all.sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1)) };
      },
    }),
    route({
      method: "GET",
      path: "/v2/templates",
      summary: "List templates, page by page",
      tag: "templates",
      authenticated: true,
      query: schema.ListTemplatesV2Query,
      success: [
        {
          status: 200,
          schema: schema.Template.array(),
          description: "One page; X-Next-Token is present when there is another",
        },
      ],
      errors: [400],
      run: async ({ query }) => {
        const page = paginate(
          await listed(),
          (template) => ({ createdAt: template.createdAt, id: template.templateID }),
          { limit: query.limit, nextToken: query.nextToken },
        );
        return {
          status: 200,
          json: page.items,
          ...(page.nextToken === undefined ? {} : { headers: { "x-next-token": page.nextToken } }),
        };
      },
    }),
    route({
      method: "GET",
      path: "/templates/aliases/:alias",
      summary: "Template behind a name; 404 when the name is free",
      tag: "templates",
      authenticated: true,
      success: [{ status: 200, schema: schema.AliasInfo, description: "The name is taken" }],
      errors: [400, 404],
      run: async ({ params }) => {
        const alias = params.alias!;
        // A name whose builds all have other tags than the default one is taken as well.
        const record =
          (await templates.resolve(alias)) ??
          (alias.includes(":")
            ? undefined
            : (await templates.list()).find((build) =>
                build.aliases.some((name) => name.split(":")[0] === alias.toLowerCase()),
              ));
        if (record === undefined) throw templateNotFound(alias);
        return { status: 200, json: { templateID: record.templateId, public: record.public } };
      },
    }),
    route({
      method: "GET",
      path: "/templates/:id",
      summary: "One template with its builds",
      tag: "templates",
      authenticated: true,
      query: schema.ListTemplatesV2Query,
      success: [{ status: 200, schema: schema.TemplateWithBuilds, description: "The template" }],
      errors: [400, 404],
      run: async ({ params, query }) => {
        const found = await view(params.id!);
        const names = templateNames(found);
        const page = paginate(found.builds, (build) => ({ createdAt: build.createdAt, id: build.id }), {
          limit: query.limit,
          nextToken: query.nextToken,
        });
        return {
          status: 200,
          json: {
            templateID: found.templateId,
            public: found.current.public,
            aliases: names,
            names,
            createdAt: found.builds.at(-1)!.createdAt,
            updatedAt: found.current.updatedAt,
            ...spawnJson(observer.spawns(found.templateId)),
            builds: page.items.map((build) => ({
              buildID: build.id,
              status: buildStatus(build),
              createdAt: build.createdAt,
              updatedAt: build.updatedAt,
              ...(build.source.kind === "template" && build.source.build.finishedAt !== undefined
                ? { finishedAt: build.source.build.finishedAt }
                : {}),
              cpuCount: build.resources.cpuCount,
              memoryMB: build.resources.memoryMiB,
              diskSizeMB: build.resources.diskSizeMiB,
              ...(build.committed === undefined ? {} : { envdVersion: build.committed.state.envdVersion }),
            })),
          },
          ...(page.nextToken === undefined ? {} : { headers: { "x-next-token": page.nextToken } }),
        };
      },
    }),
    ...tagRoutes(templates),
    route({
      method: "DELETE",
      path: "/templates/:id",
      summary: "Delete a template or snapshot; running sandboxes keep working",
      tag: "templates",
      authenticated: true,
      success: [{ status: 204, description: "Gone" }],
      errors: [404, 409],
      run: async ({ params }) => {
        await templates.delete(params.id!);
        return { status: 204 };
      },
    }),
  ];
}
