import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { z } from "zod";
import { tryCommand } from "../lib/command.ts";
import { AenvError } from "../lib/errors.ts";
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
  credsStore: z.string().nullish(),
  credHelpers: z.record(z.string(), z.string()).nullish(),
});

/** What a helper prints for `get`: protocol of docker-credential-helpers. */
const HelperAnswer = z.object({ Username: z.string(), Secret: z.string() });
const HELPER_TIMEOUT_MS = 30_000;
/** User name that marks the secret as an identity token. */
const TOKEN_USER = "<token>";
/** Docker Hub's name in credential stores. */
const DOCKER_HUB_KEY = "https://index.docker.io/v1/";

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

/** Asks `docker-credential-NAME`. No login, or a helper that fails (logged), means none. */
async function loginFromHelper(
  name: string,
  registry: string,
  log: Logger,
): Promise<RegistryLogin | undefined> {
  if (!/^[A-Za-z0-9._-]+$/.test(name)) {
    log.warn({ helper: name }, "credential helper not used: its name is not one");
    return undefined;
  }
  const program = `docker-credential-${name}`;
  try {
    const answer = await tryCommand([program, "get"], {
      stdin: registry === "docker.io" ? DOCKER_HUB_KEY : registry,
      timeoutMs: HELPER_TIMEOUT_MS,
    });
    const said = answer.stdout.trim();
    if (answer.exitCode !== 0) {
      // The one answer that is no failure; the helpers print it to standard output.
      if (!/credentials not found/i.test(said + answer.stderr))
        log.warn({ helper: program, exitCode: answer.exitCode }, "credential helper failed");
      return undefined;
    }
    const { Username, Secret } = HelperAnswer.parse(JSON.parse(said));
    if (Username === TOKEN_USER) return { kind: "identityToken", token: Secret };
    return { kind: "basic", username: Username, password: Secret };
  } catch (error) {
    // Its output may hold a secret: only what went wrong is told.
    const reason = error instanceof AenvError ? error.message : "its answer is not understood";
    log.warn({ helper: program, reason }, "credential helper not used");
    return undefined;
  }
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
  const own = Object.entries(parsed.credHelpers ?? {}).find(([key]) => hostOfKey(key) === registry)?.[1];
  const helper = own ?? (parsed.credsStore || undefined);
  if (helper !== undefined) {
    const login = await loginFromHelper(helper, registry, log);
    if (login !== undefined) return login;
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
