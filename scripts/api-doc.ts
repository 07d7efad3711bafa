/** The OpenAPI document as a page of Markdown, for docs/api.md. */

type Json = Record<string, unknown>;

interface Operation {
  readonly summary: string;
  readonly tags?: readonly string[];
  readonly security?: readonly unknown[];
  readonly parameters?: readonly {
    readonly name: string;
    readonly in: string;
    readonly description?: string;
    readonly schema: Json;
  }[];
  readonly requestBody?: { readonly content: Readonly<Record<string, { readonly schema: Json }>> };
  readonly responses: Readonly<
    Record<
      string,
      { readonly description: string; readonly content?: Readonly<Record<string, { schema: Json }>> }
    >
  >;
}

/** Errors that any call may answer with. */
const EVERYWHERE = new Set(["401", "500", "503"]);

const cell = (text: string) => text.replaceAll("|", "\\|").replaceAll("\n", " ");
const anchor = (name: string) => `[${name}](#${name.toLowerCase()})`;

/** A schema in a few words: `string`, `Sandbox[]`, `"kill" or "pause"`. */
function typeOf(schema: Json): string {
  if (typeof schema.$ref === "string") return anchor(schema.$ref.split("/").at(-1)!);
  if (schema.const !== undefined) return `\`${JSON.stringify(schema.const)}\``;
  if (Array.isArray(schema.enum))
    return schema.enum.map((value) => `\`${JSON.stringify(value)}\``).join(" or ");
  const union = (schema.anyOf ?? schema.oneOf) as readonly Json[] | undefined;
  if (union !== undefined) return union.map(typeOf).join(" or ");
  if (schema.type === "array") return `${typeOf((schema.items ?? {}) as Json)}[]`;
  if (schema.type === "object" || schema.properties !== undefined) {
    const { properties, additionalProperties } = schema as {
      properties?: Json;
      additionalProperties?: unknown;
    };
    if (properties !== undefined && Object.keys(properties).length > 0) {
      const fields = Object.entries(properties).map(([name, field]) => `${name}: ${typeOf(field as Json)}`);
      return `{ ${fields.join(", ")} }`;
    }
    const values = typeof additionalProperties === "object" ? typeOf(additionalProperties as Json) : "";
    return values === "" || values === "any" ? "object" : `map of ${values}`;
  }
  if (schema.type === undefined) return "any";
  const format = schema.format === "date-time" ? " (date-time)" : "";
  return `${String(schema.type)}${format}`;
}

function limits(schema: Json): string {
  const notes: string[] = [];
  if (typeof schema.description === "string") notes.push(schema.description);
  if (schema.default !== undefined) notes.push(`default \`${JSON.stringify(schema.default)}\``);
  const bound = (name: string, words: string) => {
    const value = schema[name];
    // The bounds of the number type itself say nothing.
    if (typeof value === "number" && Math.abs(value) < Number.MAX_SAFE_INTEGER)
      notes.push(`${words} ${value}`);
  };
  bound("minimum", "at least");
  bound("maximum", "at most");
  bound("minLength", "length at least");
  bound("maxLength", "length at most");
  bound("minItems", "items at least");
  bound("maxItems", "items at most");
  return notes.join("; ");
}

function fields(schema: Json): string[] {
  const properties = schema.properties as Readonly<Record<string, Json>> | undefined;
  if (properties === undefined || Object.keys(properties).length === 0) return [`${typeOf(schema)}.`, ""];
  const required = new Set((schema.required as readonly string[] | undefined) ?? []);
  return [
    "| Field | Type | | |",
    "| --- | --- | --- | --- |",
    ...Object.entries(properties).map(
      ([name, field]) =>
        `| \`${name}\` | ${cell(typeOf(field))} | ${required.has(name) && field.default === undefined ? "required" : ""} | ${cell(limits(field))} |`,
    ),
    "",
  ];
}

function operation(method: string, path: string, op: Operation): string[] {
  const lines = [`### ${method.toUpperCase()} ${path}`, "", `${op.summary}.`];
  if (op.security !== undefined && op.security.length === 0) lines.push("No API key needed.");
  lines.push("");
  const query = (op.parameters ?? []).filter((parameter) => parameter.in === "query");
  if (query.length > 0) {
    lines.push("| Query | Type | |", "| --- | --- | --- |");
    for (const { name, schema, description } of query) {
      const notes = limits(description === undefined ? schema : { ...schema, description });
      lines.push(`| \`${name}\` | ${cell(typeOf(schema))} | ${cell(notes)} |`);
    }
    lines.push("");
  }
  for (const [type, { schema }] of Object.entries(op.requestBody?.content ?? {})) {
    lines.push(`Body (${type}): ${typeOf(schema)}`, "");
  }
  const errors = Object.keys(op.responses).filter((status) => Number(status) >= 400);
  for (const [status, response] of Object.entries(op.responses)) {
    if (errors.includes(status)) continue;
    const content = Object.values(response.content ?? {})[0];
    const type = content === undefined ? "" : ` ${typeOf(content.schema)}`;
    lines.push(`- **${status}**${type}: ${response.description}`);
  }
  const own = errors.filter((status) => !EVERYWHERE.has(status));
  if (own.length > 0) lines.push(`- Errors: ${own.join(", ")}`);
  lines.push("");
  return lines;
}

const TITLES: Readonly<Record<string, string>> = {
  sandboxes: "Sandboxes",
  templates: "Templates",
  node: "Node",
};

export function renderApiPage(document: Json): string {
  const paths = document.paths as Readonly<Record<string, Readonly<Record<string, Operation>>>>;
  const byTag = new Map<string, string[]>();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, op] of Object.entries(methods)) {
      const tag = op.tags?.[0] ?? "";
      byTag.set(tag, [...(byTag.get(tag) ?? []), ...operation(method, path, op)]);
    }
  }
  const { schemas } = document.components as { schemas: Readonly<Record<string, Json>> };
  return `${[
    "# API",
    "",
    "Made from the server's own OpenAPI document (`GET /openapi.json`; `GET /docs` is the same as a page) by",
    "`AENV_UPDATE_DOCS=1 bun test src/api`, and checked by every run of that test.",
    "",
    "Requests carry the key in `X-API-Key`. Errors are `{code, message, error_code?, cause?, remediation?}`; `code`",
    "is the HTTP status. Every answer has `X-Request-Id`, which is in the server's log lines, too. Besides the",
    "statuses named below: 401 without the key, 500 for the server's own faults, 503 while it stops.",
    "",
    "Calls that create a sandbox refuse fields they do not know by name (400). The others ignore such fields and",
    "name them in `X-Agentenv-Ignored-Fields`. A field of the contract whose part is not built is refused when it",
    "asks for something (`unsupported_field`). 429 comes with `Retry-After` in seconds.",
    "",
    ...[...byTag].flatMap(([tag, lines]) => [`## ${TITLES[tag] ?? tag}`, "", ...lines]),
    "## Schemas",
    "",
    ...Object.entries(schemas).flatMap(([name, schema]) => [`### ${name}`, "", ...fields(schema)]),
  ]
    .join("\n")
    .trimEnd()}\n`;
}
