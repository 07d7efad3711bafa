import { AenvError } from "../lib/errors.ts";

/** A reference with everything filled in. Exactly one of `tag` and `digest` is used to fetch: the digest wins. */
export interface RegistryReference {
  /** As in the reference, e.g. `docker.io` or `127.0.0.1:5000`. */
  readonly registry: string;
  /** e.g. `library/debian`. */
  readonly repository: string;
  readonly tag?: string;
  readonly digest?: string;
}

export interface LayoutReference {
  /** Absolute path of an OCI image layout directory. */
  readonly layoutPath: string;
  readonly tag?: string;
  readonly digest?: string;
}

export interface ArchiveReference {
  /** Absolute path of a tar that `docker save` wrote. */
  readonly archivePath: string;
  /** As in the archive's RepoTags; absent: its only image. */
  readonly image?: string;
  readonly digest?: string;
}

export interface ReferenceRules {
  readonly searchRegistries: readonly string[];
  /** Absent: any; empty: none. Exact `host[:port]`. */
  readonly allowedRegistries?: readonly string[];
  readonly allowLocalPaths: boolean;
}

export type ParsedReference =
  | {
      readonly kind: "registry";
      readonly candidates: readonly RegistryReference[];
      readonly qualified: boolean;
    }
  | { readonly kind: "layout"; readonly layout: LayoutReference }
  | { readonly kind: "archive"; readonly archive: ArchiveReference };

const LAYOUT_PREFIX = "oci-layout:";
const ARCHIVE_PREFIX = "docker-archive:";
const DIGEST = /^sha256:[0-9a-f]{64}$/;
const TAG = /^\w[\w.-]{0,127}$/;
const PATH_COMPONENT = /^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*$/;
const HOST = /^(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::\d{1,5})?$/;
/** Limit of the distribution specification for registry and repository together. */
const MAX_NAME_LENGTH = 255;

function invalid(reference: string, reason: string, remediation?: string): AenvError {
  return new AenvError({
    code: "image_invalid_reference",
    status: 400,
    message: `invalid image reference ${JSON.stringify(reference.slice(0, 300))}: ${reason}`,
    remediation:
      remediation ?? "write it as [registry/]name[:tag][@sha256:digest], e.g. docker.io/library/debian:12",
  });
}

export function formatReference(reference: RegistryReference): string {
  const tag = reference.tag === undefined ? "" : `:${reference.tag}`;
  const digest = reference.digest === undefined ? "" : `@${reference.digest}`;
  return `${reference.registry}/${reference.repository}${tag}${digest}`;
}

export function formatLayout(layout: LayoutReference): string {
  const suffix =
    layout.digest === undefined ? (layout.tag === undefined ? "" : `:${layout.tag}`) : `@${layout.digest}`;
  return `${LAYOUT_PREFIX}${layout.layoutPath}${suffix}`;
}

export function formatArchive(archive: ArchiveReference): string {
  const image = archive.image === undefined ? "" : `:${archive.image}`;
  return `${ARCHIVE_PREFIX}${archive.archivePath}${image}${archive.digest === undefined ? "" : `@${archive.digest}`}`;
}

interface Split {
  readonly name: string;
  readonly tag?: string;
  readonly digest?: string;
}

function splitReference(reference: string): Split {
  let name = reference;
  let digest: string | undefined;
  const at = name.indexOf("@");
  if (at >= 0) {
    digest = name.slice(at + 1);
    name = name.slice(0, at);
    if (!DIGEST.test(digest))
      throw invalid(reference, "the digest must be sha256: and 64 lower-case hex digits");
  }
  let tag: string | undefined;
  const colon = name.lastIndexOf(":");
  if (colon > name.lastIndexOf("/")) {
    tag = name.slice(colon + 1);
    name = name.slice(0, colon);
    if (!TAG.test(tag)) throw invalid(reference, `${JSON.stringify(tag)} is not a tag`);
  }
  if (tag === undefined && digest === undefined) tag = "latest";
  return { name, ...(tag === undefined ? {} : { tag }), ...(digest === undefined ? {} : { digest }) };
}

function checkName(reference: string, registry: string, repository: string): void {
  if (!HOST.test(registry)) throw invalid(reference, `${JSON.stringify(registry)} is not a registry host`);
  for (const component of repository.split("/")) {
    if (PATH_COMPONENT.test(component)) continue;
    const upper = component !== component.toLowerCase() && PATH_COMPONENT.test(component.toLowerCase());
    throw invalid(
      reference,
      component === ""
        ? "the repository name is empty or has an empty part"
        : `${JSON.stringify(component)} is not a valid part of a repository name${upper ? " (only lower case is)" : ""}`,
    );
  }
  if (registry.length + 1 + repository.length > MAX_NAME_LENGTH) {
    throw invalid(reference, `the name is longer than ${MAX_NAME_LENGTH} characters`);
  }
}

/** `docker.io` has its single names under `library/`; `index.docker.io` is an old name of it. */
function place(registry: string, repository: string): { registry: string; repository: string } {
  const host = registry === "index.docker.io" ? "docker.io" : registry;
  return {
    registry: host,
    repository: host === "docker.io" && !repository.includes("/") ? `library/${repository}` : repository,
  };
}

function requireLocalPaths(reference: string, rules: ReferenceRules): void {
  if (rules.allowLocalPaths) return;
  throw invalid(
    reference,
    "images from local paths are not allowed on this server",
    "push the image to a registry, or set image.resolver.allow_local_paths = true in the server's configuration",
  );
}

/** `docker-archive:/path[:image[:tag]][@digest]`; the path ends at the first colon. */
function parseArchive(reference: string, rules: ReferenceRules): ArchiveReference {
  requireLocalPaths(reference, rules);
  let rest = reference.slice(ARCHIVE_PREFIX.length);
  const at = rest.lastIndexOf("@");
  const digest = at < 0 ? undefined : rest.slice(at + 1);
  if (digest !== undefined && !DIGEST.test(digest))
    throw invalid(reference, "the digest must be sha256: and 64 hex digits");
  if (at >= 0) rest = rest.slice(0, at);
  const colon = rest.indexOf(":");
  const archivePath = colon < 0 ? rest : rest.slice(0, colon);
  const image = colon < 0 ? undefined : rest.slice(colon + 1);
  if (!archivePath.startsWith("/") || archivePath.includes("\0")) {
    throw invalid(
      reference,
      "the path must be absolute",
      "write it as docker-archive:/absolute/path.tar[:image:tag]",
    );
  }
  if (image === "") throw invalid(reference, "the image after the path is empty");
  return {
    archivePath,
    ...(image === undefined ? {} : { image }),
    ...(digest === undefined ? {} : { digest }),
  };
}

function parseLayout(reference: string, rules: ReferenceRules): LayoutReference {
  requireLocalPaths(reference, rules);
  const rest = reference.slice(LAYOUT_PREFIX.length);
  const digestAt = rest.lastIndexOf("@");
  const slash = rest.lastIndexOf("/");
  let layoutPath = rest;
  let suffix: { tag?: string; digest?: string } = {};
  if (digestAt > slash) {
    layoutPath = rest.slice(0, digestAt);
    suffix = { digest: rest.slice(digestAt + 1) };
    if (!DIGEST.test(suffix.digest ?? ""))
      throw invalid(reference, "the digest must be sha256: and 64 hex digits");
  } else {
    const colon = rest.lastIndexOf(":");
    if (colon > slash) {
      layoutPath = rest.slice(0, colon);
      suffix = { tag: rest.slice(colon + 1) };
    }
  }
  if (!layoutPath.startsWith("/") || layoutPath.includes("\0")) {
    throw invalid(reference, "the path must be absolute", "write it as oci-layout:/absolute/path[:tag]");
  }
  return { layoutPath, ...suffix };
}

/**
 * Completes a reference: one candidate when it names its registry, else one per search registry. The part
 * before the first `/` is a registry when it contains `.` or `:` or is `localhost`.
 * Errors: `image_invalid_reference`, also when no candidate's registry is allowed.
 */
export function parseReference(reference: string, rules: ReferenceRules): ParsedReference {
  const text = reference.trim();
  if (text === "") throw invalid(reference, "it is empty");
  if (text.startsWith(LAYOUT_PREFIX)) return { kind: "layout", layout: parseLayout(text, rules) };
  if (text.startsWith(ARCHIVE_PREFIX)) return { kind: "archive", archive: parseArchive(text, rules) };
  const scheme = /^([a-z][a-z0-9-]*):(?:\/|$)/.exec(text);
  if (scheme !== null && text[scheme[0].length - 1] === "/") {
    throw invalid(reference, `${JSON.stringify(`${scheme[1]}:`)} is not a supported transport`);
  }

  const { name, ...version } = splitReference(text);
  const slash = name.indexOf("/");
  const first = slash < 0 ? "" : name.slice(0, slash);
  const qualified = first.includes(".") || first.includes(":") || first === "localhost";
  let candidates: RegistryReference[];
  if (qualified) {
    candidates = [{ ...place(first, name.slice(slash + 1)), ...version }];
  } else {
    candidates = rules.searchRegistries.map((entry) => {
      const [host = "", ...namespace] = entry.split("/");
      return { ...place(host, [...namespace, name].join("/")), ...version };
    });
    if (candidates.length === 0) {
      throw invalid(reference, "it names no registry and no search registries are configured");
    }
  }
  const unique = new Map<string, RegistryReference>();
  for (const candidate of candidates) {
    checkName(reference, candidate.registry, candidate.repository);
    unique.set(formatReference(candidate), candidate);
  }
  const allowed = [...unique.values()].filter(
    ({ registry }) => rules.allowedRegistries === undefined || rules.allowedRegistries.includes(registry),
  );
  if (allowed.length === 0) {
    const names = [...new Set([...unique.values()].map(({ registry }) => registry))].join(", ");
    throw invalid(
      reference,
      `registry ${names} is not allowed`,
      `allowed_registries of this server: ${rules.allowedRegistries?.join(", ") || "none"}`,
    );
  }
  return { kind: "registry", candidates: allowed, qualified };
}
