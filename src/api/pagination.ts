import { badRequest } from "./errors.ts";

export interface PageKey {
  /** ISO 8601 time the list is ordered by. */
  readonly createdAt: string;
  readonly id: string;
}

export interface Page<Item> {
  readonly items: Item[];
  /** Present only when another page exists. */
  readonly nextToken?: string;
}

const TOKEN = /^(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d{1,9})?Z)__([^_].*?)(__asc)?$/;

function encode(key: PageKey, ascending: boolean): string {
  const nanoseconds = key.createdAt.replace(/\.(\d+)Z$/, (_, digits: string) => `.${digits.padEnd(9, "0")}Z`);
  return Buffer.from(`${nanoseconds}__${key.id}${ascending ? "__asc" : ""}`).toString("base64url");
}

function decode(token: string, ascending: boolean): PageKey {
  const match = TOKEN.exec(Buffer.from(token, "base64url").toString("utf8"));
  if (match === null)
    throw badRequest("invalid next token: it was not made by this API", "invalid_next_token");
  if ((match[3] !== undefined) !== ascending) {
    throw badRequest("invalid next token: it belongs to a list of the other order", "invalid_next_token");
  }
  return { createdAt: new Date(match[1]!.replace(/(\.\d{3})\d*Z$/, "$1Z")).toISOString(), id: match[2]! };
}

/** Newest first (or oldest first when ascending), equal times by id ascending. */
function compare(a: PageKey, b: PageKey, ascending: boolean): number {
  if (a.createdAt !== b.createdAt) return a.createdAt < b.createdAt === ascending ? -1 : 1;
  return a.id < b.id ? -1 : a.id > b.id ? 1 : 0;
}

/**
 * Cuts one page out of all items. A token names a place in the order, not an item, so it stays valid
 * when the item it was made from is gone.
 */
export function paginate<Item>(
  items: readonly Item[],
  key: (item: Item) => PageKey,
  query: { readonly limit: number; readonly nextToken?: string | undefined; readonly ascending?: boolean },
): Page<Item> {
  const ascending = query.ascending ?? false;
  const after = query.nextToken === undefined ? undefined : decode(query.nextToken, ascending);
  const rest = items
    .map((item) => ({ item, key: key(item) }))
    .filter((entry) => after === undefined || compare(entry.key, after, ascending) > 0)
    .sort((a, b) => compare(a.key, b.key, ascending));
  const page = rest.slice(0, query.limit);
  const last = page.at(-1);
  return {
    items: page.map((entry) => entry.item),
    ...(rest.length > page.length && last !== undefined ? { nextToken: encode(last.key, ascending) } : {}),
  };
}
