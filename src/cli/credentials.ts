import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, open, readFile, rename, rm } from "node:fs/promises";
import { homedir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { parse, stringify, TomlError } from "smol-toml";
import { CliError } from "./command.ts";

export interface Credentials {
  /** Base URL without a trailing slash. */
  readonly url: string;
  readonly apiKey: string;
}

export function credentialsPath(): string {
  const xdg = process.env.XDG_CONFIG_HOME;
  const base = xdg !== undefined && xdg !== "" ? xdg : join(homedir(), ".config");
  return join(base, "aenv", "credentials");
}

/** Where the server of a checkout (`make start`) leaves credentials for the executable in its `dist/`. */
export function checkoutCredentialsPath(executable: string): string {
  return resolve(dirname(executable), "../.aenv/home/client/aenv/credentials");
}

/** From `E2B_API_URL` and `E2B_API_KEY`, when both are set: the variables the E2B SDKs go by. */
export function environmentCredentials(): Credentials | undefined {
  const { E2B_API_URL: url = "", E2B_API_KEY: apiKey = "" } = process.env;
  if (url === "" || apiKey === "") return undefined;
  for (const [variable, problem] of [
    ["E2B_API_URL", urlProblem(url)],
    ["E2B_API_KEY", keyProblem(apiKey)],
  ] as const) {
    if (problem !== undefined) {
      throw new CliError(`$${variable}: ${problem}`, {
        hint: "set it right, or unset it to use what `aenv auth` stored",
      });
    }
  }
  return { url: url.replace(/\/+$/, ""), apiKey };
}

/**
 * The server's address and key, and where they are from (a file's path; undefined: the environment): the
 * environment, else the file of `aenv auth`, else that of the checkout this executable was built in.
 */
export async function findCredentials(
  executable = process.execPath,
): Promise<{ readonly credentials: Credentials; readonly path?: string }> {
  const given = environmentCredentials();
  if (given !== undefined) return { credentials: given };
  const own = credentialsPath();
  const checkout = checkoutCredentialsPath(executable);
  const path = !existsSync(own) && existsSync(checkout) ? checkout : own;
  return { credentials: await readCredentials(path), path };
}

/** What is to be told when `E2B_API_URL` is set and another server is used: it counts only with a key. */
export function ignoredUrl({ url }: Credentials): string | undefined {
  const { E2B_API_URL: given = "", E2B_API_KEY: key = "" } = process.env;
  if (given === "" || key !== "" || given.replace(/\/+$/, "") === url) return undefined;
  return `E2B_API_URL (${given}) is ignored: there is no E2B_API_KEY with it`;
}

/** `findCredentials` without the place. */
export async function loadCredentials(): Promise<Credentials> {
  return (await findCredentials()).credentials;
}

async function readCredentials(path: string): Promise<Credentials> {
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === "ENOENT") {
      throw new CliError(`there are no credentials at ${path}`, {
        hint: "run: aenv auth (or set E2B_API_URL and E2B_API_KEY, both)",
      });
    }
    throw new CliError(`cannot read the credentials file ${path}`, { cause });
  }
  let table: Record<string, unknown>;
  try {
    table = parse(text);
  } catch (error) {
    // The parser's text quotes the line, and with it the key.
    const where = error instanceof TomlError ? ` (line ${error.line}, column ${error.column})` : "";
    throw new CliError(`the credentials file ${path} is not valid TOML${where}`, { hint: "run: aenv auth" });
  }
  const { url, api_key: apiKey } = table;
  if (typeof url !== "string" || typeof apiKey !== "string") {
    throw new CliError(`the credentials file ${path} needs the texts url and api_key`, {
      hint: "run: aenv auth",
    });
  }
  const problem = urlProblem(url) ?? keyProblem(apiKey);
  if (problem !== undefined) {
    throw new CliError(`the credentials file ${path}: ${problem}`, { hint: "run: aenv auth" });
  }
  return { url: url.replace(/\/+$/, ""), apiKey };
}

/** Why a text is no address of a server. */
export function urlProblem(url: string): string | undefined {
  const parsed = URL.canParse(url) ? new URL(url) : undefined;
  if (parsed === undefined || (parsed.protocol !== "http:" && parsed.protocol !== "https:")) {
    return `"${url}" is not an http or https URL such as http://localhost:8000`;
  }
  if (parsed.username !== "" || parsed.password !== "" || /[?#]/.test(url)) {
    return "the URL must have no user, query or fragment";
  }
  return undefined;
}

/** Why a text is no API key. The key itself is never part of the answer. */
export function keyProblem(apiKey: string): string | undefined {
  if (apiKey === "") return "the API key is empty";
  if (/^[\x21-\x7e]+$/.test(apiKey)) return undefined;
  return "the API key has characters that no key has (spaces, control characters or letters beyond ASCII)";
}

/** Written through a temporary file that is private from its first byte. */
export async function saveCredentials(credentials: Credentials): Promise<string> {
  const path = credentialsPath();
  try {
    await mkdir(dirname(path), { recursive: true, mode: 0o700 });
    const temporary = `${path}.${randomBytes(6).toString("hex")}.tmp`;
    const file = await open(temporary, "wx", 0o600);
    try {
      try {
        await file.writeFile(`${stringify({ url: credentials.url, api_key: credentials.apiKey })}\n`);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(temporary, path);
    } catch (error) {
      await rm(temporary, { force: true });
      throw error;
    }
  } catch (cause) {
    throw new CliError(`cannot write the credentials file ${path}`, { cause });
  }
  return path;
}
