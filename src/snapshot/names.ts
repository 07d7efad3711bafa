import { AenvError } from "../lib/errors.ts";
import { isUuid } from "../lib/ids.ts";

const ALIAS = /^[A-Za-z0-9_-]{1,128}$/;
const TAG = /^[A-Za-z0-9_.-]{1,128}$/;

export const DEFAULT_TAG = "default";

/** `[namespace/]alias[:tag]`, or an id in place of the alias. The namespace is accepted and ignored. */
export interface SnapshotName {
  /** Alias, or id in lower case. */
  readonly base: string;
  readonly isId: boolean;
  readonly tag: string;
}

/** Undefined when the text is not a name at all. */
export function parseName(text: string): SnapshotName | undefined {
  const slash = text.lastIndexOf("/");
  if (slash >= 0 && !ALIAS.test(text.slice(0, slash))) return undefined;
  const name = text.slice(slash + 1);
  const colon = name.indexOf(":");
  const base = colon < 0 ? name : name.slice(0, colon);
  const tag = colon < 0 ? DEFAULT_TAG : name.slice(colon + 1);
  if (!ALIAS.test(base) || !TAG.test(tag) || isUuid(tag)) return undefined;
  return isUuid(base) ? { base: base.toLowerCase(), isId: true, tag } : { base, isId: false, tag };
}

/** An alias that may be given to something; error `invalid_alias` 400. */
export function parseAlias(text: string): SnapshotName {
  const name = parseName(text);
  if (name === undefined || name.isId) {
    throw new AenvError({
      code: "invalid_alias",
      status: 400,
      message: `${JSON.stringify(text)} is not a valid name`,
      remediation: "use letters, digits, - and _ (not in the form of a UUID), optionally followed by :tag",
    });
  }
  return name;
}

/** The form shown in lists: the tag `default` is left out. */
export function formatName(alias: string, tag: string): string {
  return tag === DEFAULT_TAG ? alias : `${alias}:${tag}`;
}
