import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { z } from "zod";
import type { Logger } from "../lib/log.ts";

/** What a registry accepts: a user's password, or an identity token to be traded for access tokens. */
export type RegistryLogin =
  | { readonly kind: "basic"; readonly username: string; readonly password: string }
  | { readonly kind: "identityToken"; readonly token: string };

const DockerConfig = z.object({
  auths: z
    .record(
      z.string(),
      z.object({
        auth: z.string().optional(),
        username: z.string().optional(),
        password: z.string().optional(),
        identitytoken: z.string().optional(),
      }),
    )
    .nullish(),
});

/** `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`; undefined without a home. */
export function defaultDockerConfigPath(
  env: Readonly<Record<string, string | undefined>>,
): string | undefined {
  if (env.DOCKER_CONFIG) return join(env.DOCKER_CONFIG, "config.json");
  return env.HOME ? join(env.HOME, ".docker", "config.json") : undefined;
}

/** Keys are hosts, in old files URLs such as `https://index.docker.io/v1/`. */
function hostOfKey(key: string): string {
  const host = key.replace(/^https?:\/\//, "").split("/")[0] ?? "";
  return host === "index.docker.io" || host === "registry-1.docker.io" ? "docker.io" : host;
}

/**
 * The login a docker credential file holds for a registry. A missing file means none; an unreadable or
 * malformed one is logged and means none, since public images must not depend on it.
 */
export async function loginFromDockerConfig(
  path: string | undefined,
  registry: string,
  log: Logger,
): Promise<RegistryLogin | undefined> {
  if (path === undefined) return undefined;
  let parsed: z.infer<typeof DockerConfig>;
  try {
    parsed = DockerConfig.parse(JSON.parse(await readFile(path, "utf8")));
  } catch (error) {
    if (error instanceof Error && "code" in error && error.code === "ENOENT") return undefined;
    log.warn({ path, err: error }, "docker credential file not used");
    return undefined;
  }
  for (const [key, entry] of Object.entries(parsed.auths ?? {})) {
    if (hostOfKey(key) !== registry) continue;
    if (entry.identitytoken) return { kind: "identityToken", token: entry.identitytoken };
    if (entry.username !== undefined && entry.password !== undefined) {
      return { kind: "basic", username: entry.username, password: entry.password };
    }
    if (entry.auth) {
      const text = Buffer.from(entry.auth, "base64").toString("utf8").replace(/\0+$/, "");
      const colon = text.indexOf(":");
      if (colon > 0)
        return { kind: "basic", username: text.slice(0, colon), password: text.slice(colon + 1) };
    }
  }
  return undefined;
}
