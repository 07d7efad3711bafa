import { Api, ApiError, isPassing, type LogJson, type MetricJson, type SandboxJson } from "./api.ts";
import type { Invocation } from "./command.ts";
import { formatTable, formatTime, plainText, print, printJson, wantsTable } from "./output.ts";
import { fit, formatBytes } from "./progress.ts";
import { signalStatus } from "./signals.ts";
import { RawMode, ScreenModes } from "./terminal.ts";

const LOG_POLL_MS = 1_000;
const METRIC_POLL_MS = 5_000;
const RETRY_MS = 1_000;
const PAGE = 1_000;
/** Sandboxes one call tells figures of. */
const FIGURES = 100;

const path = (id: string) => `/sandboxes/${encodeURIComponent(id)}`;

const isGone = (error: unknown) => error instanceof ApiError && error.status === 404;

/** So often in a row a server may fail to answer before it is given up. */
const TRIES = 30;

/**
 * Looks again and again for what is new, across restarts of the server. Ends, with status 0, when the
 * sandbox is gone.
 */
async function follow(id: string, pollMs: number, look: () => Promise<void>): Promise<number> {
  let failures = 0;
  for (;;) {
    await Bun.sleep(failures > 0 ? RETRY_MS : pollMs);
    try {
      await look();
      if (failures > 0) process.stderr.write("The server answers again.\n");
      failures = 0;
    } catch (error) {
      if (isGone(error)) {
        process.stderr.write(`The sandbox ${id} is gone.\n`);
        return 0;
      }
      if (!isPassing(error) || ++failures > TRIES) throw error;
      if (failures === 1) process.stderr.write(`${plainText(error.message)}; trying again\n`);
    }
  }
}

// ---- logs ----

/** Reads a log from a place on, entry by entry, each once. */
class LogReader {
  readonly #api: Api;
  readonly #id: string;
  readonly #level: string;
  /** Milliseconds: what is later, or as late and not in `#seen`, is new. */
  #cursor = 0;
  #seen = new Map<string, number>();

  constructor(api: Api, id: string, level: string | undefined) {
    this.#api = api;
    this.#id = id;
    this.#level = level === undefined ? "" : `&level=${level}`;
  }

  async #page(query: string): Promise<readonly LogJson[]> {
    const url = `/v2${path(this.#id)}/logs?limit=${PAGE}${this.#level}&${query}`;
    return (await this.#api.request<{ readonly logs: readonly LogJson[] }>("GET", url)).body.logs;
  }

  /** The last entries, oldest first. */
  async last(count: number): Promise<LogJson[]> {
    const page = (await this.#page("direction=backward")).toReversed();
    this.#take(page);
    return page.slice(Math.max(0, page.length - count));
  }

  /** What has come since, oldest first. */
  async more(): Promise<LogJson[]> {
    const fresh: LogJson[] = [];
    for (;;) {
      const page = await this.#page(`direction=forward&cursor=${this.#cursor}`);
      const before = this.#cursor;
      fresh.push(...this.#take(page));
      if (page.length < PAGE) return fresh;
      // A page full of one and the same millisecond: the rest of that one is out of reach.
      if (this.#cursor === before) this.#cursor++;
    }
  }

  #take(page: readonly LogJson[]): LogJson[] {
    const fresh: LogJson[] = [];
    const counts = new Map<string, number>();
    for (const entry of page) {
      const at = Date.parse(entry.timestamp);
      const key = `${entry.timestamp}\0${entry.level}\0${entry.message}`;
      const count = (counts.get(key) ?? 0) + 1;
      counts.set(key, count);
      if (at === this.#cursor && count <= (this.#seen.get(key) ?? 0)) continue;
      if (at > this.#cursor) {
        this.#cursor = at;
        this.#seen = new Map();
      }
      this.#seen.set(key, Math.max(count, this.#seen.get(key) ?? 0));
      fresh.push(entry);
    }
    return fresh;
  }
}

/** `aenv logs`. */
export async function logs({ args, flags }: Invocation): Promise<number> {
  const tail = flags.integer("tail", 1, PAGE);
  const table = flags.text("output") !== "json";
  const api = await Api.open();
  const reader = new LogReader(api, args[0]!, flags.text("level"));
  const show = (entries: readonly LogJson[]) => {
    for (const entry of entries) {
      if (!table) print(JSON.stringify(entry));
      else print(`${formatTime(entry.timestamp)}  ${entry.level.padEnd(5)}  ${plainText(entry.message)}`);
    }
  };
  show(tail === undefined ? await reader.more() : await reader.last(tail));
  if (!flags.has("follow")) return 0;
  return follow(args[0]!, LOG_POLL_MS, async () => show(await reader.more()));
}

// ---- metrics ----

const share = (part: number, whole: number) => (whole > 0 ? ((100 * part) / whole).toFixed(1) : "-");

const METRIC_HEADERS = ["TIME", "CPU %", "CPU", "MEM", "MEM %", "CACHE", "DISK", "DISK %"];

function metricRow(point: MetricJson): (string | number | undefined)[] {
  return [
    formatTime(point.timestamp),
    point.cpuUsedPct.toFixed(1),
    point.cpuCount,
    formatBytes(point.memUsed),
    share(point.memUsed, point.memTotal),
    formatBytes(point.memCache),
    formatBytes(point.diskUsed),
    share(point.diskUsed, point.diskTotal),
  ];
}

/** `aenv metrics`. */
export async function metrics({ args, flags }: Invocation): Promise<number> {
  const last = flags.integer("last", 1, 31_536_000) ?? 60;
  const table = wantsTable(flags.text("output"));
  const api = await Api.open();
  const url = `${path(args[0]!)}/metrics`;
  let start = Math.floor(Date.now() / 1000) - last;
  const points = (await api.request<readonly MetricJson[]>("GET", `${url}?start=${start}`)).body;
  if (!flags.has("follow")) {
    if (table) process.stdout.write(formatTable(METRIC_HEADERS, points.map(metricRow)));
    else printJson(points);
    return 0;
  }
  let header = table;
  const show = (fresh: readonly MetricJson[]) => {
    for (const point of fresh) {
      start = Math.max(start, point.timestampUnix + 1);
      if (!table) print(JSON.stringify(point));
      else {
        const [head, line] = formatTable(METRIC_HEADERS, [metricRow(point)]).split("\n");
        if (header) print(head!);
        header = false;
        print(line!);
      }
    }
  };
  show(points);
  return follow(args[0]!, METRIC_POLL_MS, async () =>
    show((await api.request<readonly MetricJson[]>("GET", `${url}?start=${start}`)).body),
  );
}

// ---- top ----

interface Usage {
  readonly sandbox: SandboxJson;
  readonly point: MetricJson | undefined;
}

const ORDERS: Readonly<Record<string, (usage: Usage) => number>> = {
  cpu: ({ point }) => (point === undefined ? -1 : point.cpuUsedPct * point.cpuCount),
  memory: ({ point }) => point?.memUsed ?? -1,
  disk: ({ point }) => point?.diskUsed ?? -1,
  started: ({ sandbox }) => Date.parse(sandbox.startedAt ?? "") || 0,
};

async function usages(api: Api, order: string): Promise<Usage[]> {
  const sandboxes = await api.list<SandboxJson>("/v2/sandboxes?state=running");
  const figures = new Map<string, MetricJson>();
  for (let i = 0; i < sandboxes.length; i += FIGURES) {
    const ids = sandboxes.slice(i, i + FIGURES).map((sandbox) => sandbox.sandboxID);
    const { body } = await api.request<{ readonly sandboxes: Readonly<Record<string, MetricJson>> }>(
      "GET",
      `/sandboxes/metrics?sandbox_ids=${ids.join(",")}`,
    );
    for (const [id, point] of Object.entries(body.sandboxes)) figures.set(id, point);
  }
  const key = ORDERS[order] ?? ORDERS.cpu!;
  return sandboxes
    .map((sandbox) => ({ sandbox, point: figures.get(sandbox.sandboxID) }))
    .sort((a, b) => key(b) - key(a) || (a.sandbox.sandboxID < b.sandbox.sandboxID ? -1 : 1));
}

function topTable(rows: readonly Usage[]): string {
  return formatTable(
    ["SANDBOX ID", "TEMPLATE", "CPU %", "CPU", "MEM", "MEM %", "DISK", "STARTED"],
    rows.map(({ sandbox, point }) => [
      sandbox.sandboxID,
      sandbox.alias ?? sandbox.templateID,
      point?.cpuUsedPct.toFixed(1),
      sandbox.cpuCount,
      point === undefined ? undefined : formatBytes(point.memUsed),
      point === undefined ? undefined : share(point.memUsed, point.memTotal),
      point === undefined ? undefined : formatBytes(point.diskUsed),
      formatTime(sandbox.startedAt),
    ]),
  );
}

/** `aenv top`. */
export async function top({ flags }: Invocation): Promise<number> {
  const seconds = flags.integer("interval", 1, 3_600) ?? 2;
  const order = flags.text("sort") ?? "cpu";
  const api = await Api.open();
  const output = flags.text("output");
  const rows = await usages(api, order);
  if (!wantsTable(output)) {
    printJson(rows.map(({ sandbox, point }) => ({ ...sandbox, metrics: point ?? null })));
    return 0;
  }
  const live = process.stdout.isTTY === true && process.stdin.isTTY === true && process.env.TERM !== "dumb";
  if (flags.has("once") || !live) {
    process.stdout.write(topTable(rows));
    return 0;
  }
  return watchTop(api, order, seconds, rows);
}

const ENTER = "\x1b[?1049h\x1b[?25l";

/** Redraws until a key or an error ends it; the terminal is as before then. */
async function watchTop(api: Api, order: string, seconds: number, first: readonly Usage[]): Promise<number> {
  const modes = new ScreenModes();
  using cleanup = new DisposableStack();
  cleanup.use(new RawMode(modes));
  modes.observe(Buffer.from(ENTER));
  process.stdout.write(ENTER);
  const { promise, resolve, reject } = Promise.withResolvers<number>();
  let rows = first;
  let trouble = "";
  const draw = () => {
    const [columns, height] = process.stdout.getWindowSize();
    const title =
      trouble !== ""
        ? trouble
        : `${rows.length} running at ${formatTime(new Date().toISOString())}, every ${seconds} s; q ends`;
    const lines = [title, "", ...topTable(rows).trimEnd().split("\n")];
    const shown = lines.slice(0, Math.max(1, height || 24)).map((line) => fit(line, columns || 80));
    process.stdout.write(`\x1b[H${shown.map((line) => `${line}\x1b[K`).join("\r\n")}\x1b[J`);
  };
  const onKeys = (keys: Buffer) => {
    for (const key of keys.toString("latin1")) {
      if (key === "q" || key === "Q") resolve(0);
      else if (key === "\x03") resolve(signalStatus("SIGINT"));
    }
  };
  process.stdin.on("data", onKeys);
  process.stdin.resume();
  process.stdout.on("resize", draw);
  cleanup.defer(() => {
    process.stdin.off("data", onKeys);
    process.stdin.pause();
    process.stdout.off("resize", draw);
  });
  draw();
  let looking = false;
  const timer = setInterval(() => {
    if (looking) return;
    looking = true;
    usages(api, order)
      .then((next) => {
        rows = next;
        trouble = "";
      })
      .catch((error: unknown) => {
        if (!isPassing(error)) throw error;
        trouble = `${plainText(error.message)}; trying again, q ends`;
      })
      .then(() => {
        looking = false;
        draw();
      }, reject);
  }, seconds * 1000);
  cleanup.defer(() => clearInterval(timer));
  return await promise;
}
