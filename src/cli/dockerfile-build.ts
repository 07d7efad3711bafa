import { readFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { Api, ApiError } from "./api.ts";
import { followBuild, readinessOf } from "./build.ts";
import { BuildContext, type ContextArchive, compressed } from "./build-context.ts";
import { CliError, type Invocation } from "./command.ts";
import { type BuildPlan, type PlannedStep, parseDockerfile } from "./dockerfile.ts";
import { print, StatusLine } from "./output.ts";
import { formatBytes } from "./progress.ts";

const MAX_SECONDS = 2_147_483_647;
const BUSY_RETRY_MS = 5_000;

interface RequestStep {
  readonly type: string;
  readonly args: readonly string[];
  readonly exec?: true;
  readonly from?: number;
  readonly filesHash?: string;
}

/** `KEY=VALUE`, or `KEY` for the value of this environment. */
function buildArguments(list: readonly string[]): Map<string, string> {
  const given = new Map<string, string>();
  for (const text of list) {
    const equals = text.indexOf("=");
    const name = equals < 0 ? text : text.slice(0, equals);
    if (!/^[A-Za-z_][A-Za-z0-9_]*$/.test(name))
      throw new CliError(`--build-arg ${text}: ${JSON.stringify(name)} is not a name of a variable`, {
        exitCode: 2,
      });
    const value = equals < 0 ? process.env[name] : text.slice(equals + 1);
    if (value !== undefined) given.set(name, value);
  }
  return given;
}

async function readDockerfile(path: string): Promise<string> {
  try {
    return await readFile(path, "utf8");
  } catch (cause) {
    throw new CliError(`cannot read the Dockerfile ${path}`, {
      hint: "name another one with -f",
      cause,
    });
  }
}

/** The plan's steps as the API takes them, and the archives they need. */
export async function requestOf(
  plan: BuildPlan,
  context: BuildContext,
  file: string,
): Promise<{
  readonly stages: { readonly name: string; readonly image: string; readonly steps: RequestStep[] }[];
  readonly archives: ReadonlyMap<string, ContextArchive>;
}> {
  const archives = new Map<string, ContextArchive>();
  const copy = async (step: PlannedStep): Promise<RequestStep[]> => {
    const { files, type, args, line } = step;
    if (files === undefined) return [];
    const where = `${file}:${line}`;
    const made =
      type === "ADD" ? await context.addArchives(files, where) : [await context.archive(files, where)];
    const [target = "", ...rest] = args;
    // Several go into a directory, also where each is a step of its own.
    const into = made.length > 1 && !target.endsWith("/") ? `${target}/` : target;
    const steps: RequestStep[] = [];
    for (const archive of made) {
      archives.set(archive.hash, archive);
      steps.push({ type, args: [archive.source, into, ...rest], filesHash: archive.hash });
    }
    return steps;
  };
  const stages = [];
  for (const { name, image, steps } of plan.stages) {
    const request: RequestStep[] = [];
    for (const step of steps) {
      if (step.files !== undefined) request.push(...(await copy(step)));
      else {
        const { type, args, exec, from } = step;
        request.push({
          type,
          args,
          ...(exec === undefined ? {} : { exec }),
          ...(from === undefined ? {} : { from }),
        });
      }
    }
    stages.push({ name, image, steps: request });
  }
  return { stages, archives };
}

async function upload(
  api: Api,
  templateId: string,
  archive: ContextArchive,
  status: StatusLine,
): Promise<void> {
  const { hash, entries, bytes } = archive;
  const { body } = await api.request<{ present: boolean; url: string }>(
    "GET",
    `/templates/${encodeURIComponent(templateId)}/files/${hash}`,
  );
  if (body.present) return;
  const files = entries.filter((entry) => entry.type !== "directory").length;
  status.set(`Uploading ${files} ${files === 1 ? "file" : "files"}, ${formatBytes(bytes)}`);
  // The link carries its own authorisation, and is for this moment.
  let response: Response;
  try {
    response = await fetch(body.url, {
      method: "PUT",
      body: compressed(archive) as unknown as ReadableStream<Uint8Array>,
      headers: { "content-type": "application/gzip" },
      redirect: "manual",
    });
  } catch (error) {
    if (error instanceof CliError) throw error;
    throw new CliError(`the files could not be uploaded to ${new URL(body.url).origin}`, { cause: error });
  }
  if (response.ok) return;
  const text = (await response.text()).trim();
  const { message, remediation } = errorOf(text);
  throw new CliError(`the files were refused: HTTP ${response.status}: ${message}`, {
    ...(remediation === undefined ? {} : { hint: remediation }),
  });
}

function errorOf(text: string): { readonly message: string; readonly remediation?: string } {
  try {
    const body = JSON.parse(text) as { message?: unknown; remediation?: unknown };
    return {
      message: typeof body.message === "string" ? body.message : text,
      ...(typeof body.remediation === "string" ? { remediation: body.remediation } : {}),
    };
  } catch {
    return { message: text === "" ? "no message" : text };
  }
}

/** A full node is asked again until the deadline. */
async function start(
  api: Api,
  path: string,
  body: unknown,
  deadline: number,
  status: StatusLine,
): Promise<void> {
  for (;;) {
    try {
      await api.request("POST", path, { body });
      return;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 429 || performance.now() > deadline) throw error;
      status.set(`${error.message}; trying again`);
      await Bun.sleep(Math.min(BUSY_RETRY_MS, Math.max(1, deadline - performance.now())));
    }
  }
}

/** `aenv build`: a template from a Dockerfile and its context, built by the server step by step. */
export async function build(invocation: Invocation): Promise<number> {
  const { args, flags } = invocation;
  const readyCmd = readinessOf(invocation);
  const directory = args[0]!;
  const file = flags.text("file") ?? join(directory, "Dockerfile");
  const name = flags.text("name");
  if (name === undefined || name === "")
    throw new CliError("the template needs a name", { exitCode: 2, hint: "give one with --name" });
  const cpuCount = flags.integer("cpu", 1, 1024);
  const memoryMB = flags.integer("memory", 128, 4_194_304);
  const timeoutSeconds = flags.integer("timeout", 1, MAX_SECONDS);
  const began = performance.now();
  const deadline = timeoutSeconds === undefined ? Number.POSITIVE_INFINITY : began + timeoutSeconds * 1000;

  const context = await BuildContext.open(directory, resolve(file));
  const plan = parseDockerfile(await readDockerfile(file), {
    file,
    buildArgs: buildArguments(flags.list("build-arg")),
    architecture: process.arch === "arm64" ? "arm64" : "amd64",
  });
  const plain = flags.text("progress") === "plain";
  const { stages, archives } = await requestOf(plan, context, file);
  const api = await Api.open();
  const last = stages.at(-1)!;
  let created: { templateID: string; buildID: string };
  {
    using status = new StatusLine(process.stderr, { plain });
    for (const note of plan.notes) status.note(`note: ${note}`);
    const reply = await api.request<{ templateID: string; buildID: string }>("POST", "/v3/templates", {
      body: {
        name,
        ...(cpuCount === undefined ? {} : { cpuCount }),
        ...(memoryMB === undefined ? {} : { memoryMB }),
      },
    });
    created = reply.body;
    for (const archive of archives.values()) await upload(api, created.templateID, archive, status);
    const startCmd = flags.text("start-cmd");
    const body = {
      fromImage: last.image,
      steps: last.steps,
      stages: stages
        .slice(0, -1)
        .map(({ name: stage, image, steps }) => ({ name: stage, fromImage: image, steps })),
      dockerfile: { escape: plan.escape },
      ...(startCmd === undefined ? {} : { startCmd }),
      ...(readyCmd === undefined ? {} : { readyCmd }),
    };
    await start(api, `/v2/templates/${created.templateID}/builds/${created.buildID}`, body, deadline, status);
  }
  print(`Created template ${created.templateID} (build ${created.buildID})`);
  return followBuild(api, created.templateID, created.buildID, {
    cancel: true,
    showLog: true,
    plain,
    ...(timeoutSeconds === undefined
      ? {}
      : { timeoutSeconds, leftMs: Math.max(0, deadline - performance.now()) }),
  });
}
