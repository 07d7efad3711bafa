import { Api, ApiError } from "./api.ts";
import { CliError } from "./command.ts";
import {
  type Credentials,
  environmentCredentials,
  keyProblem,
  saveCredentials,
  urlProblem,
} from "./credentials.ts";
import { plainText, print } from "./output.ts";
import { RawMode } from "./terminal.ts";

const DEFAULT_URL = "http://localhost:8000";
const INTERRUPT = "\x03";
const END_OF_INPUT = "\x04";
const ERASE_LINE = "\x15";

/** Reads lines of standard input one by one, also when they all come at once. */
class LineReader implements Disposable {
  readonly #decoder = new TextDecoder();
  #buffer = "";
  #ended = false;
  #failed: Error | undefined;
  #wake: () => void = () => undefined;
  readonly #onData = (chunk: Buffer) => {
    this.#buffer += this.#decoder.decode(chunk, { stream: true });
    this.#wake();
  };
  readonly #onEnd = () => {
    this.#ended = true;
    this.#wake();
  };
  readonly #onError = (error: Error) => {
    this.#failed = error;
    this.#wake();
  };

  constructor() {
    process.stdin.on("data", this.#onData);
    process.stdin.on("end", this.#onEnd);
    process.stdin.on("error", this.#onError);
    process.stdin.resume();
  }

  /** The next line; undefined when the input has ended. A hidden one is not echoed on a terminal. */
  async read(prompt: string, hidden: boolean): Promise<string | undefined> {
    if (!hidden || process.stdin.isTTY !== true) {
      process.stdout.write(prompt);
      return this.#line();
    }
    try {
      using _raw = new RawMode();
      // Only now: whoever answers at once must not see the answer.
      process.stdout.write(prompt);
      return await this.#typedLine();
    } finally {
      process.stdout.write("\n");
    }
  }

  async #more(): Promise<boolean> {
    if (this.#failed !== undefined) {
      throw new CliError("cannot read standard input", { cause: this.#failed });
    }
    if (this.#ended) return false;
    await new Promise<void>((resolve) => {
      this.#wake = resolve;
    });
    return true;
  }

  async #line(): Promise<string | undefined> {
    for (;;) {
      const end = this.#buffer.indexOf("\n");
      if (end >= 0) return this.#take(end, end + 1);
      if (!(await this.#more())) {
        return this.#buffer === "" ? undefined : this.#take(this.#buffer.length, this.#buffer.length);
      }
    }
  }

  /** From a raw terminal, which leaves editing to us. */
  async #typedLine(): Promise<string | undefined> {
    const typed: string[] = [];
    for (;;) {
      for (const key of this.#take(this.#buffer.length, this.#buffer.length)) {
        if (key === INTERRUPT) throw new CliError("cancelled", { exitCode: 130 });
        if (key === "\r" || key === "\n") return typed.join("");
        if (key === END_OF_INPUT && typed.length === 0) return undefined;
        if (key === "\x7f" || key === "\b") typed.pop();
        else if (key === ERASE_LINE) typed.length = 0;
        else typed.push(key);
      }
      if (!(await this.#more())) return typed.length === 0 ? undefined : typed.join("");
    }
  }

  #take(end: number, next: number): string {
    const text = this.#buffer.slice(0, end);
    this.#buffer = this.#buffer.slice(next);
    return text;
  }

  [Symbol.dispose](): void {
    process.stdin.off("data", this.#onData);
    process.stdin.off("end", this.#onEnd);
    process.stdin.off("error", this.#onError);
    process.stdin.pause();
  }
}

function ended(what: string): CliError {
  return new CliError(`the input ended before ${what}; nothing was saved`);
}

const CHECK_TIMEOUT_MS = 5_000;

/** What a server says to its new credentials; undefined: it takes them. */
async function refusal(credentials: Credentials): Promise<string | undefined> {
  try {
    await new Api(credentials).request("GET", "/v2/sandboxes?limit=1", {
      timeoutMs: CHECK_TIMEOUT_MS,
      connectTimeoutMs: CHECK_TIMEOUT_MS,
    });
    return undefined;
  } catch (error) {
    if (!(error instanceof CliError)) throw error;
    if (error instanceof ApiError && error.status === 401) {
      return `the server at ${credentials.url} refuses this key; aenv auth asks again`;
    }
    const cause = error.cause instanceof Error ? `: ${error.cause.message}` : "";
    return `not checked: ${error.message}${cause}`;
  }
}

/**
 * `aenv auth`: asks for the server's address and key. Saving needs no network; the server is asked afterwards,
 * and what it does not like is told on standard error, with status 0.
 */
export async function auth(): Promise<number> {
  using input = new LineReader();
  const answer = await input.read(`AENV server URL [${DEFAULT_URL}]: `, false);
  if (answer === undefined) throw ended("the URL");
  const url = answer.trim() || DEFAULT_URL;
  const wrongUrl = urlProblem(url);
  if (wrongUrl !== undefined) throw new CliError(wrongUrl);
  const key = await input.read("API key: ", true);
  if (key === undefined) throw ended("the API key");
  const apiKey = key.trim();
  const wrongKey = keyProblem(apiKey);
  if (wrongKey !== undefined) {
    throw new CliError(wrongKey, {
      hint: "the server keeps its key in $AENV_HOME_PATH/secrets/api-key unless AENV_API_KEY is set",
    });
  }
  const credentials = { url: url.replace(/\/+$/, ""), apiKey };
  await saveCredentials(credentials);
  print("Credentials saved.");
  const refused = await refusal(credentials);
  if (refused !== undefined) process.stderr.write(`Warning: ${plainText(refused)}\n`);
  if (environmentCredentials() !== undefined) {
    process.stderr.write("E2B_API_URL and E2B_API_KEY are set: they win over what was saved.\n");
  }
  return 0;
}
