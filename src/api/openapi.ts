import { z } from "zod";
import type { Route } from "./route.ts";
import { ErrorBody, named } from "./schemas.ts";

type Json = Record<string, unknown>;

const reference = (id: string) => `#/components/schemas/${id}`;

/** JSON Schema for a place in the document; a named schema becomes a reference to its component. */
function schemaOf(schema: z.ZodType, io: "input" | "output"): Json {
  const name = named.get(schema)?.id;
  if (name !== undefined) return { $ref: reference(name) };
  if (schema instanceof z.ZodArray)
    return { type: "array", items: schemaOf(schema.element as z.ZodType, io) };
  const {
    $schema: _dialect,
    $id: _id,
    ...json
  } = z.toJSONSchema(schema, { io, unrepresentable: "any" }) as Json;
  return json;
}

function componentSchemas(): Json {
  const { schemas } = z.toJSONSchema(named, { uri: reference, io: "input", unrepresentable: "any" });
  return Object.fromEntries(
    Object.entries(schemas).map(([id, schema]) => {
      const { $schema: _dialect, $id: _id, ...json } = schema as unknown as Json;
      return [id, json];
    }),
  );
}

/** `/sandboxes/:id` as the document writes it: `/sandboxes/{id}`. */
export function documentPath(path: string): string {
  return path.replace(/:([A-Za-z]+)/g, "{$1}");
}

/** The OpenAPI 3.1 document, made from the same table that is served. */
export function openApiDocument(routes: readonly Route[], version: string): Json {
  const paths: Record<string, Record<string, unknown>> = {};
  for (const route of routes) {
    const parameters: Json[] = [...route.path.matchAll(/:([A-Za-z]+)/g)].map((match) => ({
      name: match[1],
      in: "path",
      required: true,
      schema: { type: "string" },
    }));
    for (const [name, field] of Object.entries(route.query?.shape ?? {})) {
      const { description, ...json } = schemaOf(field as z.ZodType, "input");
      parameters.push({
        name,
        in: "query",
        required: false,
        ...(description === undefined ? {} : { description }),
        schema: json,
      });
    }
    const responses: Record<string, Json> = {};
    for (const success of route.success) {
      responses[success.status] = {
        description: success.description,
        ...(success.schema === undefined
          ? {}
          : { content: { "application/json": { schema: schemaOf(success.schema, "output") } } }),
      };
    }
    for (const status of [...route.errors, ...(route.authenticated ? [401, 500, 503] : [500])]) {
      responses[status] = {
        description: "Error",
        content: { "application/json": { schema: schemaOf(ErrorBody, "output") } },
      };
    }
    const path = documentPath(route.path);
    paths[path] ??= {};
    paths[path][route.method.toLowerCase()] = {
      summary: route.summary,
      tags: [route.tag],
      ...(route.authenticated ? {} : { security: [] }),
      ...(parameters.length > 0 ? { parameters } : {}),
      ...(route.body === undefined
        ? {}
        : {
            requestBody: {
              required: !route.body.safeParse({}).success,
              content: { "application/json": { schema: schemaOf(route.body, "input") } },
            },
          }),
      responses,
    };
  }
  return {
    openapi: "3.1.0",
    info: {
      title: "AgentENV",
      version,
      description: "Snapshot-capable microVM sandboxes behind an E2B-compatible API.",
    },
    security: [{ apiKey: [] }],
    paths,
    components: {
      schemas: componentSchemas(),
      securitySchemes: { apiKey: { type: "apiKey", in: "header", name: "X-API-Key" } },
    },
  };
}

const escapeHtml = (text: string) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);

/** The document as one page that loads nothing from anywhere. */
export function openApiPage(document: Json): string {
  const info = document.info as { title: string; version: string; description: string };
  const operations = Object.entries(document.paths as Record<string, Record<string, Json>>).flatMap(
    ([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => {
        const detail = JSON.stringify(
          {
            parameters: operation.parameters,
            requestBody: operation.requestBody,
            responses: operation.responses,
          },
          null,
          2,
        );
        return `<details><summary><b class="${method}">${method.toUpperCase()}</b> <code>${escapeHtml(path)}</code> ${escapeHtml(String(operation.summary))}</summary><pre>${escapeHtml(detail)}</pre></details>`;
      }),
  );
  const schemas = Object.entries((document.components as { schemas: Json }).schemas).map(
    ([name, schema]) =>
      `<details id="${escapeHtml(name)}"><summary><code>${escapeHtml(name)}</code></summary><pre>${escapeHtml(JSON.stringify(schema, null, 2))}</pre></details>`,
  );
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>${escapeHtml(info.title)} API</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;width:4.5rem}
.get{color:#06c}.post{color:#080}.delete{color:#b00}.put,.patch{color:#a60}
pre{background:#8881;padding:1rem;overflow:auto}
</style></head><body>
<h1>${escapeHtml(info.title)} API <small>${escapeHtml(info.version)}</small></h1>
<p>${escapeHtml(info.description)} Authenticate with the header <code>X-API-Key</code>. The document:
<a href="/openapi.json">/openapi.json</a>.</p>
<h2>Operations</h2>${operations.join("\n")}
<h2>Schemas</h2>${schemas.join("\n")}
</body></html>
`;
}
