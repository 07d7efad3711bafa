import { type Route, route } from "./route.ts";
import * as schema from "./schemas.ts";
import type { ApiTemplates } from "./types.ts";

/** Tags: names of single builds of a template, `alias:tag`. The tag `default` is the bare alias. */
export function tagRoutes(templates: ApiTemplates): Route[] {
  return [
    route({
      method: "POST",
      path: "/templates/tags",
      summary: "Give tags to a build; a tag that another build has moves",
      tag: "templates",
      authenticated: true,
      body: schema.AssignTags,
      success: [{ status: 201, schema: schema.AssignedTags, description: "Assigned" }],
      errors: [400, 404],
      run: async ({ body }) => {
        const { buildId, tags } = await templates.assignTags(body.target, body.tags);
        return { status: 201, json: { buildID: buildId, tags } };
      },
    }),
    route({
      method: "DELETE",
      path: "/templates/tags",
      summary: "Take tags away; unknown ones are ignored",
      tag: "templates",
      authenticated: true,
      body: schema.RemoveTags,
      success: [{ status: 204, description: "Removed" }],
      errors: [400, 404],
      run: async ({ body }) => {
        await templates.removeTags(body.name, body.tags);
        return { status: 204 };
      },
    }),
    route({
      method: "GET",
      path: "/templates/:id/tags",
      summary: "Tags of a template, the newest build's first",
      tag: "templates",
      authenticated: true,
      success: [{ status: 200, schema: schema.TemplateTag.array(), description: "One entry per tag" }],
      errors: [404],
      run: async ({ params }) => {
        const tags = await templates.tags(params.id!);
        return {
          status: 200,
          json: tags.map(({ tag, buildId, createdAt }) => ({ tag, buildID: buildId, createdAt })),
        };
      },
    }),
    route({
      method: "PATCH",
      path: "/templates/:id",
      summary: "Publish or unpublish a template (older clients)",
      tag: "templates",
      authenticated: true,
      body: schema.UpdateTemplate,
      success: [{ status: 200, schema: schema.Nothing, description: "Changed" }],
      errors: [400, 404],
      run: async ({ params, body }) => {
        await templates.setPublic(params.id!, body.public);
        return { status: 200, json: {} };
      },
    }),
    route({
      method: "PATCH",
      path: "/v2/templates/:id",
      summary: "Publish or unpublish a template",
      tag: "templates",
      authenticated: true,
      body: schema.UpdateTemplate,
      success: [{ status: 200, schema: schema.TemplateNames, description: "Changed" }],
      errors: [400, 404],
      run: async ({ params, body }) => {
        return { status: 200, json: { names: await templates.setPublic(params.id!, body.public) } };
      },
    }),
  ];
}
