import { Api, ApiError, type BuildInfoJson, UnreachableError } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { print, StatusLine } from "./output.ts";
import { SignalHandler, signalStatus } from "./signals.ts";

const MAX_SECONDS = 2_147_483_647;
const LOG_PAGE = 100;

export interface WatchPace {
  readonly pollMs: number;
  /** Pauses between attempts to reach a server that does not answer; after the last one it is given up. */
  readonly retryDelaysMs: readonly number[];
}

const PACE: WatchPace = { pollMs: 1_000, retryDelaysMs: [500, 1_000, 2_000, 4_000, 5_000, 5_000, 5_000] };

/** True for what may be over in a moment: a restart of the server, a busy gateway. */
function isPassing(error: unknown): error is CliError {
  if (error instanceof UnreachableError) return true;
  return error instanceof ApiError && [429, 500, 502, 503, 504].includes(error.status);
}

/** Sleeps, less when the signal comes first. */
async function pause(ms: number, signal: AbortSignal): Promise<void> {
  if (signal.aborted) return;
  const { promise, resolve } = Promise.withResolvers<void>();
  const timer = setTimeout(resolve, ms);
  const wake = () => resolve();
  signal.addEventListener("abort", wake, { once: true });
  await promise;
  clearTimeout(timer);
  signal.removeEventListener("abort", wake);
}

export interface FollowOptions {
  readonly timeoutSeconds?: number;
  /** What is left of that time. */
  readonly leftMs?: number;
  readonly pace?: WatchPace;
  /** Ctrl-C and the deadline cancel the build. */
  readonly cancel?: boolean;
  /** All of the log above the status, also on a terminal. */
  readonly showLog?: boolean;
  /** No line that is rewritten. */
  readonly plain?: boolean;
}

/** Ends the build, unless it has ended already. */
async function cancelBuild(api: Api, templateId: string, buildId: string): Promise<void> {
  const path = `/templates/${encodeURIComponent(templateId)}/builds/${encodeURIComponent(buildId)}`;
  try {
    await api.request("DELETE", path);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 409) throw error;
  }
}

/**
 * Follows a build to its end: its log above, its state and the elapsed time on one line. Without `cancel` the
 * build is the server's and goes on whatever happens here: Ctrl-C (status 130) and the deadline end only the
 * watching.
 */
export async function followBuild(
  api: Api,
  templateId: string,
  buildId: string,
  options: FollowOptions = {},
): Promise<number> {
  const { pollMs, retryDelaysMs } = options.pace ?? PACE;
  const hint = `watch it with: aenv template watch ${templateId}`;
  const { cancel = false, showLog = false, plain = false, timeoutSeconds } = options;
  const deadline =
    timeoutSeconds === undefined
      ? Number.POSITIVE_INFINITY
      : performance.now() + (options.leftMs ?? timeoutSeconds * 1000);
  const stopped = new AbortController();
  using _interrupt = new SignalHandler(["SIGINT"], () => stopped.abort());
  using status = new StatusLine(process.stderr, { plain });
  const url = `/templates/${encodeURIComponent(templateId)}/builds/${encodeURIComponent(buildId)}/status`;
  let offset = 0;
  let failures = 0;
  let doing = "";
  let noted = "";
  let held: string | undefined;
  const tellHeld = () => {
    if (held !== undefined) status.note(`error: ${held}`);
    held = undefined;
  };
  for (;;) {
    if (stopped.signal.aborted) {
      if (cancel) await cancelBuild(api, templateId, buildId);
      status[Symbol.dispose]();
      process.stderr.write(
        cancel
          ? "Build cancelled.\n"
          : `Stopped watching; the build goes on. ${hint[0]!.toUpperCase()}${hint.slice(1)}\n`,
      );
      return signalStatus("SIGINT");
    }
    const leftMs = deadline - performance.now();
    if (leftMs <= 0) {
      if (cancel) {
        await cancelBuild(api, templateId, buildId);
        throw new CliError(`the build did not end within ${timeoutSeconds} s and was cancelled`);
      }
      throw new CliError(`the build did not end within ${timeoutSeconds} s; it goes on`, { hint });
    }
    let info: BuildInfoJson;
    try {
      const reply = await api.request<BuildInfoJson>("GET", `${url}?logsOffset=${offset}&limit=${LOG_PAGE}`, {
        signal: stopped.signal,
        timeoutMs: 30_000,
      });
      info = reply.body;
      failures = 0;
    } catch (error) {
      if (stopped.signal.aborted) continue;
      if (!isPassing(error)) throw error;
      const delay = retryDelaysMs[failures++];
      if (delay === undefined) {
        throw new CliError("lost the server while watching the build, which may go on without it", {
          hint,
          cause: error,
        });
      }
      status.set(`${error.message}; trying again`);
      await pause(Math.min(delay, leftMs), stopped.signal);
      continue;
    }
    if (info.templateID !== templateId || info.buildID !== buildId) {
      throw new CliError(`the server answered for build ${info.buildID} of template ${info.templateID}`);
    }
    const entries = info.logEntries ?? [];
    offset += entries.length;
    for (const entry of entries) {
      if (entry.level === "debug") continue;
      // What ends a build is its log's last word, and is told as the outcome: kept until that is known.
      if (entry.level === "error") {
        tellHeld();
        held = entry.message;
        continue;
      }
      const problem = entry.level !== "info";
      // One phase, announced by the build and begun by the image's room: one line.
      const again = noted.startsWith("resolving image ") && entry.message.startsWith("resolve image ");
      noted = entry.message;
      if (!problem) doing = entry.message;
      if (again) continue;
      if (showLog) status.note(entry.message);
      else if (problem || !status.live)
        status.note(problem ? `${entry.level}: ${entry.message}` : entry.message);
    }
    if (held !== info.reason?.message && (info.status === "error" || info.status === "ready")) tellHeld();
    status.set(`Build status: ${info.status}${status.live && doing !== "" ? ` - ${doing}` : ""}`);
    // The log may have more than one page: read on before believing the end.
    if (entries.length >= LOG_PAGE) continue;
    if (info.status === "ready") {
      status[Symbol.dispose]();
      print(`Template ${templateId} is ready.`);
      return 0;
    }
    if (info.status === "error") {
      const step = info.reason?.step === undefined ? "" : ` (step: ${info.reason.step})`;
      throw new CliError(`Build failed: ${info.reason?.message ?? "no reason given"}${step}`, {
        hint: `the template keeps its name: build it again, or remove it with: aenv template delete ${templateId}`,
      });
    }
    await pause(Math.min(pollMs, Math.max(0, deadline - performance.now())), stopped.signal);
  }
}

/** `registry:5000/org/app:1.2@sha256:…` is named `app`. */
export function templateNameOf(image: string): string {
  const last = image.split("@")[0]!.split("/").at(-1)!;
  return last.split(":")[0]!;
}

/** What keeps a text from being an image reference, of what can be told without the server's configuration. */
function imageProblem(image: string): string | undefined {
  // The place of a layout or an archive on the server is a path.
  if (/^[a-z][a-z0-9-]*:\//.test(image)) return undefined;
  if (/[\s\p{Cc}]/u.test(image)) return "it has blanks or control characters";
  const name = image.split("@")[0]!.replace(/:[^/:]*$/, "");
  const parts = name.split("/");
  if (parts.includes("")) return "a part of its name is empty";
  const repository = parts.length > 1 && /[.:]|^localhost$/.test(parts[0]!) ? parts.slice(1) : parts;
  if (repository.some((part) => /[A-Z]/.test(part))) return "names of images are in lower case";
  const wrong = repository.find((part) => !/^[a-z0-9]+(?:[._-]+[a-z0-9]+)*$/.test(part));
  return wrong === undefined
    ? undefined
    : "letters, digits and, between them, . _ - make the parts of its name";
}

/** The ready command of `--probe PORT` or `--ready-cmd`: one or the other, or none. */
export function readinessOf({ flags, usageError }: Invocation): string | undefined {
  const probe = flags.integer("probe", 1, 65_535);
  if (probe === undefined) return flags.text("ready-cmd");
  if (flags.has("ready-cmd")) throw usageError("--probe and --ready-cmd exclude each other");
  return `bash -c 'exec 3<>/dev/tcp/127.0.0.1/${probe}'`;
}

/** `aenv pull`. */
export async function pull(invocation: Invocation): Promise<number> {
  const { args, flags } = invocation;
  const image = args[0]!;
  const usage = (message: string) =>
    new CliError(message, { exitCode: 2, hint: "aenv pull --help tells more" });
  const wrong = imageProblem(image);
  if (wrong !== undefined) {
    const shown = image.length > 100 ? `${image.slice(0, 100)}…` : image;
    throw usage(`"${shown}" is no image reference such as debian:12: ${wrong}`);
  }
  const readyCmd = readinessOf(invocation);
  if (flags.has("detach") && flags.has("timeout")) throw usage("--detach and --timeout exclude each other");
  const name = flags.text("name") ?? templateNameOf(image);
  if (name === "")
    throw usage(`no template name can be made from the image "${image}": give one with --name`);
  const cpuCount = flags.integer("cpu", 1, 1024);
  const memoryMB = flags.integer("memory", 128, 4_194_304);
  const startCmd = flags.text("start-cmd");
  const timeoutSeconds = flags.integer("timeout", 1, MAX_SECONDS);
  const api = await Api.open();
  const { body } = await api.request<{ templateID: string; buildID: string }>("POST", "/v3/templates", {
    body: {
      name,
      ...(cpuCount === undefined ? {} : { cpuCount }),
      ...(memoryMB === undefined ? {} : { memoryMB }),
    },
  });
  const { templateID, buildID } = body;
  await api.request("POST", `/v2/templates/${templateID}/builds/${buildID}`, {
    body: {
      fromImage: image,
      ...(startCmd === undefined ? {} : { startCmd }),
      ...(readyCmd === undefined ? {} : { readyCmd }),
    },
  });
  print(`Created template ${templateID} (build ${buildID})`);
  if (flags.has("detach")) {
    print("Build started.");
    print(`Watch it with: aenv template watch ${templateID}`);
    return 0;
  }
  return followBuild(api, templateID, buildID, timeoutSeconds === undefined ? {} : { timeoutSeconds });
}

async function newestBuild(api: Api, templateId: string): Promise<string> {
  const { body } = await api.request<{ builds: { buildID: string }[] }>(
    "GET",
    `/templates/${encodeURIComponent(templateId)}`,
  );
  const newest = body.builds[0];
  if (newest === undefined) throw new CliError(`template ${templateId} has no build`);
  return newest.buildID;
}

/** `aenv template cancel`: ends the newest build of a template. */
export async function cancelTemplate({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  const templateId = await api.templateId(args[0]!);
  const buildId = await newestBuild(api, templateId);
  await api.request("DELETE", `/templates/${encodeURIComponent(templateId)}/builds/${buildId}`);
  print(`Cancelled build ${buildId} of template ${templateId}`);
  return 0;
}

/** `aenv template watch`. */
export async function watchTemplate({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  const templateId = await api.templateId(args[0]!);
  const buildId = await newestBuild(api, templateId);
  return followBuild(api, templateId, buildId);
}
