import { badRequest } from "./errors.ts";

function decodeOr(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    // By contract a decode that fails leaves the text as it is.
    return text;
  }
}

/** The undecoded value of one query parameter: frameworks split and coerce, this must not. */
export function rawQueryValue(url: string, name: string): string | undefined {
  const start = url.indexOf("?");
  if (start < 0) return undefined;
  for (const pair of url
    .slice(start + 1)
    .split("#", 1)[0]!
    .split("&")) {
    const [key, ...value] = pair.split("=");
    if (key === name) return value.join("=");
  }
  return undefined;
}

/**
 * `metadata=k%3Dv%26k2%3Dv2`: clients encode each key and value, then the list, then the query. After
 * the query's own decoding every part may be encoded twice more; once-encoded queries work, too.
 */
export function parseMetadataFilter(raw: string | undefined): ReadonlyMap<string, string> {
  const filter = new Map<string, string>();
  if (raw === undefined || raw === "") return filter;
  for (const pair of decodeOr(raw.replaceAll("+", " ")).split("&")) {
    if (pair === "") continue;
    const separator = pair.indexOf("=");
    if (separator < 0) throw badRequest(`metadata filter: "${pair}" is not of the form key=value`);
    const key = decodeOr(decodeOr(pair.slice(0, separator)));
    if (key !== "") filter.set(key, decodeOr(decodeOr(pair.slice(separator + 1))));
  }
  return filter;
}

export function matchesMetadata(
  metadata: Readonly<Record<string, string>>,
  filter: ReadonlyMap<string, string>,
): boolean {
  if (filter.size === 0) return true;
  for (const [key, value] of filter) if (metadata[key] !== value) return false;
  return true;
}
