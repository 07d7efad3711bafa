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
 * Puts lists in the order of their pages. The source hands its items out nearly in order of their
 * creation, so the last order is mostly still right and is only checked.
 */
export class Ordering<Item> {
  readonly #key: (item: Item) => PageKey;
  /** The last answer for each direction: lists are read far more often than they change. */
  readonly #last = new Map<boolean, { readonly items: readonly Item[]; readonly sorted: readonly Item[] }>();

  constructor(key: (item: Item) => PageKey) {
    this.#key = key;
  }

  of(items: readonly Item[], ascending: boolean): readonly Item[] {
    const last = this.#last.get(ascending);
    const same = last?.items.length === items.length && items.every((item, i) => item === last.items[i]);
    if (last !== undefined && same) return last.sorted;
    const sorted = this.#sort(items, ascending);
    this.#last.set(ascending, { items, sorted });
    return sorted;
  }

  #sort(items: readonly Item[], ascending: boolean): Item[] {
    const key = this.#key;
    const sorted = ascending ? items.slice() : items.toReversed();
    const order = (a: Item, b: Item) => compare(key(a), key(b), ascending);
    // Insertion sort: linear where nearly nothing has to move. A list in no order is sorted as a whole.
    let moves = sorted.length * 4;
    for (let i = 1; i < sorted.length; i++) {
      const item = sorted[i]!;
      if (order(sorted[i - 1]!, item) <= 0) continue;
      let at = i;
      while (at > 0 && order(sorted[at - 1]!, item) > 0) {
        sorted[at] = sorted[at - 1]!;
        at--;
      }
      sorted[at] = item;
      moves -= i - at;
      if (moves < 0) return sorted.sort(order);
    }
    return sorted;
  }
}

export interface PageQuery {
  readonly limit: number;
  readonly nextToken?: string | undefined;
  readonly ascending?: boolean;
}

/**
 * Cuts one page out of items that are in order. A token names a place in the order, not an item, so it
 * stays valid when the item it was made from is gone.
 */
export function pageOf<Item>(
  ordered: readonly Item[],
  key: (item: Item) => PageKey,
  query: PageQuery,
): Page<Item> {
  const ascending = query.ascending ?? false;
  const after = query.nextToken === undefined ? undefined : decode(query.nextToken, ascending);
  let from = 0;
  if (after !== undefined) {
    let end = ordered.length;
    while (from < end) {
      const middle = (from + end) >>> 1;
      if (compare(key(ordered[middle]!), after, ascending) > 0) end = middle;
      else from = middle + 1;
    }
  }
  const items = ordered.slice(from, from + query.limit);
  const last = items.at(-1);
  const more = last !== undefined && from + items.length < ordered.length;
  return { items, ...(more ? { nextToken: encode(key(last), ascending) } : {}) };
}

/** Orders the items and cuts one page out of them. */
export function paginate<Item>(
  items: readonly Item[],
  key: (item: Item) => PageKey,
  query: PageQuery,
): Page<Item> {
  return pageOf(new Ordering(key).of(items, query.ascending ?? false), key, query);
}
