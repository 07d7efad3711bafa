import { randomBytes } from "node:crypto";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { createManagedSecret, readManagedSecret, readSecretFile } from "./managed-secret.ts";

export { deriveEnvdToken, deriveTrafficToken } from "../lib/tokens.ts";

const API_KEY = /^[A-Za-z0-9._~-]{32,256}$/;
/** 256 characters and CRLF. */
const API_KEY_FILE_BYTES = 258;
const MOUNTED_API_KEY = "/run/secrets/api-key";
const SEED = /^[0-9a-f]{64}$/;
const SEED_FILE_BYTES = 65;

export interface ApiKey {
  readonly value: string;
  readonly source: "environment" | "mounted_file" | "managed_file";
  /** File it came from. */
  readonly path?: string;
  /** Made by this call. */
  readonly generated: boolean;
}

export interface ApiKeyOptions {
  /** Resolved `home_path`. */
  readonly homePath: string;
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Make a key when there is none: a server's normal start only. */
  readonly generate: boolean;
  /** Where orchestrators mount secrets; default `/run/secrets/api-key`. */
  readonly mountedPath?: string;
}

export function managedApiKeyPath(homePath: string): string {
  return join(homePath, "secrets", "api-key");
}

export function managedSeedPath(homePath: string): string {
  return join(homePath, "secrets", "sandbox-access-token-hash-seed");
}

function checkedApiKey(value: string, origin: string): string {
  if (API_KEY.test(value)) return value;
  throw new AenvError({
    code: "invalid_api_key_setting",
    message: `the API key in ${origin} is not 32 to 256 characters of A-Z a-z 0-9 . _ ~ - (it has ${value.length})`,
    remediation: `correct ${origin}, or remove it to use the next source`,
  });
}

/** A file may end in one LF or CRLF. */
function withoutLineEnd(text: string): string {
  return text.replace(/\r?\n$/, "");
}

/**
 * The deployment's API key: `AENV_API_KEY`, else the mounted file, else the managed file (made when
 * `generate`). A source that is there but invalid is an error, never skipped. Undefined: there is none and
 * none was to be made.
 */
export function loadApiKey(options: ApiKeyOptions): ApiKey | undefined {
  const fromEnv = options.env.AENV_API_KEY;
  if (fromEnv !== undefined) {
    return { value: checkedApiKey(fromEnv, "AENV_API_KEY"), source: "environment", generated: false };
  }
  const mountedPath = options.mountedPath ?? MOUNTED_API_KEY;
  const mounted = readSecretFile(mountedPath, API_KEY_FILE_BYTES);
  if (mounted !== undefined) {
    const value = checkedApiKey(withoutLineEnd(mounted), mountedPath);
    return { value, source: "mounted_file", path: mountedPath, generated: false };
  }
  const path = managedApiKeyPath(options.homePath);
  const present = readManagedSecret(path, API_KEY_FILE_BYTES);
  if (present === undefined && !options.generate) return undefined;
  const made = `e2b_${randomBytes(32).toString("hex")}\n`;
  const text = present ?? createManagedSecret(path, made, API_KEY_FILE_BYTES);
  const value = checkedApiKey(withoutLineEnd(text), path);
  return { value, source: "managed_file", path, generated: present === undefined && text === made };
}

/**
 * The key before the present one, for the time of a change in which clients have either:
 * `AENV_API_KEY_PREVIOUS`, else `api-key-previous` beside the mounted or the managed file. Never made.
 * Undefined: there is none. Errors as for the key itself.
 */
export function loadPreviousApiKey(options: Omit<ApiKeyOptions, "generate">): ApiKey | undefined {
  const fromEnv = options.env.AENV_API_KEY_PREVIOUS;
  if (fromEnv !== undefined && fromEnv !== "") {
    const value = checkedApiKey(fromEnv, "AENV_API_KEY_PREVIOUS");
    return { value, source: "environment", generated: false };
  }
  const mountedPath = `${options.mountedPath ?? MOUNTED_API_KEY}-previous`;
  const mounted = readSecretFile(mountedPath, API_KEY_FILE_BYTES);
  if (mounted !== undefined) {
    const value = checkedApiKey(withoutLineEnd(mounted), mountedPath);
    return { value, source: "mounted_file", path: mountedPath, generated: false };
  }
  const path = `${managedApiKeyPath(options.homePath)}-previous`;
  const text = readManagedSecret(path, API_KEY_FILE_BYTES);
  if (text === undefined) return undefined;
  return { value: checkedApiKey(withoutLineEnd(text), path), source: "managed_file", path, generated: false };
}

export interface TokenSeed {
  readonly value: string;
  readonly source: "configured" | "managed_file";
  readonly path?: string;
  readonly generated: boolean;
  readonly warnings: readonly string[];
}

export interface TokenSeedOptions {
  readonly homePath: string;
  /** `sandbox.access_token_hash_seed`, environment applied. */
  readonly configured?: string | undefined;
  /**
   * Whether a persisted sandbox needs the seed that was used when it was made (`secure`, or private
   * ingress): a lost seed is then an error, because a new one would lock its owner out.
   */
  readonly neededByPersisted: boolean;
  /** A scheduler endpoint is configured: the node is part of a cluster. */
  readonly clustered?: boolean;
}

/** Seed of the sandbox tokens. Call it after persisted sandboxes were loaded. */
export function loadTokenSeed(options: TokenSeedOptions): TokenSeed {
  const configured = options.configured?.trim();
  if (configured !== undefined && configured !== "") {
    return { value: configured, source: "configured", generated: false, warnings: [] };
  }
  const path = managedSeedPath(options.homePath);
  const present = readManagedSecret(path, SEED_FILE_BYTES);
  if (present === undefined && options.neededByPersisted) {
    throw new AenvError({
      code: "token_seed_missing",
      message: `${path} is missing, but paused sandboxes have access tokens made from it`,
      remediation:
        "restore the file from a backup, or set AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED to what it held; " +
        "with another seed their tokens are not accepted any more",
    });
  }
  const made = `${randomBytes(32).toString("hex")}\n`;
  const text = present ?? createManagedSecret(path, made, SEED_FILE_BYTES);
  const value = text.replace(/\n$/, "");
  if (!SEED.test(value)) {
    throw new AenvError({
      code: "invalid_token_seed",
      message: `${path} does not hold 64 lower-case hex digits`,
      remediation:
        "restore the file from a backup; removing it makes a new seed and voids all sandbox tokens",
    });
  }
  const warnings =
    options.clustered === true
      ? [
          "sandbox tokens are made from this node's own seed, but a cluster's nodes need one in common: set sandbox.access_token_hash_seed",
        ]
      : [];
  return { value, source: "managed_file", path, generated: present === undefined && text === made, warnings };
}
