import { randomBytes } from "node:crypto";
import { mkdir, open, readFile, rename, rm } from "node:fs/promises";
import { homedir } from "node:os";
import { dirname, join } from "node:path";
import { parse, stringify } from "smol-toml";
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

export async function loadCredentials(): Promise<Credentials> {
  const path = credentialsPath();
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (cause) {
    throw new CliError(`there are no credentials at ${path}`, { hint: "run: aenv auth", cause });
  }
  let table: Record<string, unknown>;
  try {
    table = parse(text);
  } catch (cause) {
    throw new CliError(`the credentials file ${path} is not valid TOML`, { hint: "run: aenv auth", cause });
  }
  const { url, api_key: apiKey } = table;
  if (typeof url !== "string" || typeof apiKey !== "string" || !URL.canParse(url) || apiKey === "") {
    throw new CliError(`the credentials file ${path} needs the texts url and api_key`, {
      hint: "run: aenv auth",
    });
  }
  return { url: url.replace(/\/+$/, ""), apiKey };
}

/** Written through a temporary file that is private from its first byte. */
export async function saveCredentials(credentials: Credentials): Promise<string> {
  const path = credentialsPath();
  await mkdir(dirname(path), { recursive: true, mode: 0o700 });
  const temporary = `${path}.${randomBytes(6).toString("hex")}.tmp`;
  const file = await open(temporary, "wx", 0o600);
  try {
    await file.writeFile(`${stringify({ url: credentials.url, api_key: credentials.apiKey })}\n`);
    await file.sync();
    await file.close();
    await rename(temporary, path);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
  return path;
}
