import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import { buildImage, writeLayout } from "../support/oci.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/*
 * Random lifecycle operations over up to eight sandboxes on the real executable, with faults, against a model
 * of what every caller was told. `make soak N=200 SEED=1`; N is the number of operations.
 */

const MAX_SANDBOXES = 8;
const MAX_SNAPSHOTS = 3;
const FAULT_RATE = 0.1;
/** A sandbox must do what it is told to again within this time after a fault. */
const RECOVERY_MS = 20_000;
const STATE_DIR_MIB = 512;
const APPLETS = "sh sleep echo cat mkdir mv rm dd sync id kill true head sha256sum wc test date ls".split(
  " ",
);

export interface SoakOptions {
  readonly operations: number;
  readonly seed: number;
  readonly log?: (line: string) => void;
}

export interface SoakReport {
  readonly seed: number;
  readonly operations: Readonly<Record<string, { ok: number; refused: number; disturbed: number }>>;
  readonly faults: Readonly<Record<string, number>>;
  readonly checks: number;
  readonly slowestMs: Readonly<Record<string, number>>;
  /** Every broken promise, in words. Empty: the run is good. */
  readonly violations: readonly string[];
  readonly leaks: readonly string[];
  readonly serverRssMiB: { readonly first: number; readonly last: number };
  readonly seconds: number;
}

/** What is known of a sandbox. After a disturbed call more than one state or content may be true. */
interface Model {
  readonly id: string;
  states: Set<"running" | "paused" | "gone">;
  /** What the disk file and the memory file may hold. */
  contents: Set<string>;
  busy: boolean;
}

interface Answer {
  readonly status: number;
  /** 0: the connection broke off before there was an answer. */
  readonly json: unknown;
  readonly text: string;
}

function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

class Soak {
  readonly #options: SoakOptions;
  readonly #server: TestServer;
  readonly #apiKey: string;
  readonly #stateDir: string;
  /** What cold ones boot from, and the template is made of. */
  readonly #image: string;
  readonly #random: () => number;
  readonly #models = new Map<string, Model>();
  readonly #snapshots: { readonly id: string; readonly content: ReadonlySet<string> }[] = [];
  readonly #operations: Record<string, { ok: number; refused: number; disturbed: number }> = {};
  readonly #faults: Record<string, number> = {};
  readonly #slowest: Record<string, number> = {};
  readonly violations: string[] = [];
  #checks = 0;
  #content = 0;
  /** Bumped by every fault: a call that saw one go by may have been disturbed by it. */
  #disturbances = 0;
  #ongoingFaults = 0;

  constructor(
    options: SoakOptions,
    server: TestServer,
    apiKey: string,
    parts: { readonly stateDir: string; readonly image: string },
  ) {
    const { stateDir, image } = parts;
    this.#options = options;
    this.#image = image;
    this.#server = server;
    this.#apiKey = apiKey;
    this.#stateDir = stateDir;
    this.#random = random(options.seed);
  }

  #say(text: string): void {
    this.#options.log?.(text);
  }

  #pick<T>(items: readonly T[]): T | undefined {
    return items[Math.floor(this.#random() * items.length)];
  }

  #violation(text: string): void {
    this.violations.push(text);
    this.#say(`VIOLATION ${text}`);
  }

  // ---- calls ------------------------------------------------------------------------------------

  async #call(method: string, path: string, body?: unknown): Promise<Answer> {
    return this.#fetch(path, {
      method,
      headers: { "x-api-key": this.#apiKey },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
  }

  async #fetch(path: string, init: RequestInit): Promise<Answer> {
    try {
      const response = await fetch(`${this.#server.url}${path}`, {
        ...init,
        signal: AbortSignal.timeout(60_000),
      });
      const text = await response.text();
      const isJson =
        response.headers.get("content-type")?.startsWith("application/json") === true && text !== "";
      return { status: response.status, json: isJson ? JSON.parse(text) : undefined, text };
    } catch (error) {
      return { status: 0, json: undefined, text: String(error) };
    }
  }

  /** Runs a shell command in the guest; undefined when it could not be reached. */
  async #exec(id: string, script: string): Promise<string | undefined> {
    const detail = await this.#call("GET", `/sandboxes/${id}`);
    const token = (detail.json as { envdAccessToken?: string } | undefined)?.envdAccessToken;
    if (detail.status !== 200 || token === undefined) return undefined;
    const message = Buffer.from(
      JSON.stringify({ process: { cmd: "/bin/sh", args: ["-c", script], envs: {} }, stdin: false }),
    );
    const frame = Buffer.alloc(5 + message.length);
    frame.writeUInt32BE(message.length, 1);
    message.copy(frame, 5);
    const answer = await this.#fetch("/process.Process/Start", {
      method: "POST",
      headers: {
        "e2b-sandbox-id": id,
        "e2b-sandbox-port": "49983",
        "x-access-token": token,
        authorization: `Basic ${Buffer.from("root:").toString("base64")}`,
        "content-type": "application/connect+json",
        "connect-protocol-version": "1",
      },
      body: frame,
    });
    if (process.env.SOAK_DEBUG)
      console.error("exec", answer.status, JSON.stringify(answer.text).slice(0, 600));
    if (answer.status !== 200) return undefined;
    let output = "";
    for (const [, data] of answer.text.matchAll(/"stdout":"([^"]*)"/g)) {
      output += Buffer.from(data!, "base64").toString();
    }
    return answer.text.includes('"end"') ? output.trim() : undefined;
  }

  // ---- checks -----------------------------------------------------------------------------------

  /** The listed state is one that may be true; afterwards it is known. */
  async #checkList(): Promise<void> {
    const listed = new Map<string, string>();
    for (let token = ""; ; ) {
      const page = token === "" ? "" : `&nextToken=${token}`;
      const response = await fetch(`${this.#server.url}/v2/sandboxes?limit=100${page}`, {
        headers: { "x-api-key": this.#apiKey },
      });
      if (response.status !== 200) return this.#violation(`the list answers ${response.status}`);
      for (const item of (await response.json()) as { sandboxID: string; state: string }[]) {
        listed.set(item.sandboxID, item.state);
      }
      token = response.headers.get("x-next-token") ?? "";
      if (token === "") break;
    }
    this.#checks += 1;
    for (const [id, model] of this.#models) {
      if (model.busy) continue;
      const state = (listed.get(id) ?? "gone") as "running" | "paused" | "gone";
      if (!model.states.has(state)) {
        this.#violation(`${id} is listed as ${state}, it was told to be ${[...model.states].join(" or ")}`);
      }
      model.states = new Set([state]);
      if (state === "gone") this.#models.delete(id);
    }
    for (const id of listed.keys()) {
      // Children whose birth nobody was told of: the call was cut off.
      if (!this.#models.has(id) && !this.#pendingBirths) {
        this.#violation(`${id} is listed and nobody made it`);
      }
    }
  }

  /** Calls that may have made sandboxes of which the answer got lost. */
  #pendingBirths = false;

  async #adoptStrangers(): Promise<void> {
    const { json } = await this.#call("GET", "/v2/sandboxes?limit=100");
    for (const { sandboxID } of (json as { sandboxID: string }[] | undefined) ?? []) {
      if (this.#models.has(sandboxID)) continue;
      await this.#call("DELETE", `/sandboxes/${sandboxID}`);
    }
    this.#pendingBirths = false;
  }

  /** A running sandbox answers, its process lives, its disk and memory hold what was put there. */
  async #checkContent(model: Model): Promise<void> {
    if (model.states.size !== 1 || !model.states.has("running")) return;
    const deadline = performance.now() + RECOVERY_MS;
    for (;;) {
      const before = this.#disturbances;
      const said = await this.#exec(
        model.id,
        // Those with an attached drive have it there, too.
        "cat /disk /dev/shm/memory; cat /drive/disk 2> /dev/null || cat /disk; kill -0 $(cat /dev/shm/pid) && echo alive",
      );
      if (said !== undefined) {
        const [disk, memory, drive, process_] = said.split("\n");
        this.#checks += 1;
        const same = disk === memory && disk === drive;
        const right = disk !== undefined && model.contents.has(disk) && same;
        if (!right || process_ !== "alive") {
          const expected = [...model.contents].join(" or ");
          this.#violation(
            `${model.id} holds ${JSON.stringify(said.split("\n"))}, expected ${expected} three times and alive`,
          );
        } else model.contents = new Set([disk]);
        return;
      }
      const state = await this.#call("GET", `/sandboxes/${model.id}`);
      if (state.status === 404 && (before !== this.#disturbances || this.#ongoingFaults > 0)) return;
      if (performance.now() > deadline) {
        return this.#violation(`${model.id} runs and does not answer within ${RECOVERY_MS / 1000} s`);
      }
      await Bun.sleep(100);
    }
  }

  // ---- operations -------------------------------------------------------------------------------

  /**
   * Makes one call and keeps the books. `ok` is applied to the model when it succeeded; when the answer got
   * lost or a fault went by, `either` says what may have become true besides what was.
   */
  async #operation(
    kind: string,
    call: () => Promise<Answer>,
    outcome: { ok: (answer: Answer) => void; either: () => void; expected?: readonly number[] },
  ): Promise<void> {
    this.#operations[kind] ??= { ok: 0, refused: 0, disturbed: 0 };
    const books = this.#operations[kind];
    const faultsBefore = this.#disturbances;
    const faultRuns = this.#ongoingFaults > 0;
    const began = performance.now();
    const answer = await call();
    const ms = performance.now() - began;
    this.#slowest[kind] = Math.max(this.#slowest[kind] ?? 0, Math.round(ms));
    const disturbed = faultRuns || this.#disturbances !== faultsBefore;
    if (answer.status >= 200 && answer.status < 300) {
      books.ok += 1;
      outcome.ok(answer);
      return;
    }
    const body = answer.json as { code?: number; message?: string } | undefined;
    if (answer.status !== 0 && (body?.code !== answer.status || typeof body.message !== "string")) {
      this.#violation(
        `${kind} answers ${answer.status} without a code and a message: ${answer.text.slice(0, 200)}`,
      );
    }
    if (disturbed) {
      books.disturbed += 1;
      outcome.either();
    } else if (outcome.expected?.includes(answer.status) === true) books.refused += 1;
    else this.#violation(`${kind} failed without a fault: ${answer.status} ${answer.text.slice(0, 300)}`);
  }

  #newContent(): string {
    this.#content += 1;
    return `c${this.#content}-${this.#options.seed}`;
  }

  #known(state: "running" | "paused"): Model[] {
    return [...this.#models.values()].filter(
      (model) => !model.busy && model.states.size === 1 && model.states.has(state),
    );
  }

  /** What was in a call's answer is a sandbox of ours. */
  #born(answer: unknown, contents: ReadonlySet<string>): Model {
    const { sandboxID } = answer as { sandboxID: string };
    const model: Model = {
      id: sandboxID,
      states: new Set(["running"]),
      contents: new Set(contents),
      busy: false,
    };
    this.#models.set(sandboxID, model);
    return model;
  }

  async #create(): Promise<void> {
    const die = this.#random();
    const snapshot = die < 0.4 ? this.#pick(this.#snapshots) : undefined;
    const cold = die > 0.9;
    let model: Model | undefined;
    await this.#operation(
      cold ? "cold create" : "create",
      () =>
        cold
          ? this.#call("POST", "/sandboxes-cold", {
              ...{ image: this.#image, cpuCount: 1, memoryMB: 192 },
              ...{ timeout: 3600, secure: true },
              attachedDrives: [
                {
                  ...{ driveID: "work", mountPath: "/drive", readOnly: false },
                  source: { image: this.#image },
                },
              ],
            })
          : this.#call("POST", "/v2/sandboxes", {
              templateID: snapshot?.id ?? "soak",
              timeout: 3600,
              autoPause: true,
            }),
      {
        ok: (answer) => {
          model = this.#born(answer.json, snapshot?.content ?? new Set(["none"]));
        },
        either: () => {
          this.#pendingBirths = true;
        },
      },
    );
    if (model !== undefined && snapshot === undefined) await this.#write(model, true);
  }

  /** Puts a new value into a file on the disk and one in memory. */
  async #write(model: Model, first = false): Promise<void> {
    const content = this.#newContent();
    const process_ = first ? "(while true; do sleep 1; done) >/dev/null 2>&1 & echo $! > /dev/shm/pid; " : "";
    const script = `mkdir -p /dev/shm; ${process_}echo ${content} > /dev/shm/memory; echo ${content} > /disk; [ ! -d /drive ] || echo ${content} > /drive/disk; sync; echo done`;
    for (let attempt = 0; ; attempt++) {
      const said = await this.#exec(model.id, script);
      if (said?.endsWith("done") === true) {
        model.contents = new Set([content]);
        return;
      }
      model.contents.add(content);
      const { status } = await this.#call("GET", `/sandboxes/${model.id}`);
      if (status === 404 || attempt === 50) return;
      await Bun.sleep(200);
    }
  }

  async #onModel(model: Model, work: () => Promise<void>): Promise<void> {
    model.busy = true;
    try {
      await work();
    } finally {
      model.busy = false;
    }
  }

  /** One random operation on a sandbox that nobody else works on. */
  async #step(): Promise<void> {
    const running = this.#pick(this.#known("running"));
    const paused = this.#pick(this.#known("paused"));
    const room = this.#models.size < MAX_SANDBOXES;
    const die = this.#random();
    if (this.#models.size < 2 || (room && die < 0.15)) return this.#create();
    if (paused !== undefined && die < 0.45) {
      return this.#onModel(paused, () => (die < 0.4 ? this.#toRunning(paused) : this.#kill(paused)));
    }
    if (running === undefined) return this.#create();
    return this.#onModel(running, async () => {
      if (die < 0.6) await this.#toPaused(running);
      else if (die < 0.7) await this.#snapshot(running);
      else if (die < 0.78 && this.#models.size <= MAX_SANDBOXES - 2) await this.#fork(running);
      else if (die < 0.84) await this.#kill(running);
      else if (die < 0.93) await this.#write(running);
      else await this.#setTimeout(running);
    });
  }

  async #toPaused(model: Model): Promise<void> {
    await this.#operation("pause", () => this.#call("POST", `/sandboxes/${model.id}/pause`), {
      ok: () => {
        model.states = new Set(["paused"]);
      },
      either: () => model.states.add("paused").add("gone"),
    });
  }

  async #toRunning(model: Model): Promise<void> {
    await this.#operation(
      "connect",
      () => this.#call("POST", `/v2/sandboxes/${model.id}/connect`, { timeout: 3600 }),
      {
        ok: () => {
          model.states = new Set(["running"]);
        },
        either: () => model.states.add("running").add("gone"),
      },
    );
  }

  async #kill(model: Model): Promise<void> {
    await this.#operation("kill", () => this.#call("DELETE", `/sandboxes/${model.id}`), {
      ok: () => {
        model.states = new Set(["gone"]);
      },
      either: () => model.states.add("gone"),
    });
  }

  async #setTimeout(model: Model): Promise<void> {
    await this.#operation(
      "timeout",
      () => this.#call("POST", `/sandboxes/${model.id}/timeout`, { timeout: 7200 }),
      { ok: () => undefined, either: () => model.states.add("gone") },
    );
  }

  async #snapshot(model: Model): Promise<void> {
    await this.#operation("snapshot", () => this.#call("POST", `/sandboxes/${model.id}/snapshots`), {
      ok: ({ json }) => {
        const { snapshotID } = json as { snapshotID: string };
        this.#snapshots.push({ id: snapshotID, content: new Set(model.contents) });
      },
      either: () => model.states.add("gone"),
    });
    while (this.#snapshots.length > MAX_SNAPSHOTS) {
      const { id } = this.#snapshots.shift()!;
      await this.#operation("delete snapshot", () => this.#call("DELETE", `/templates/${id}`), {
        ok: () => undefined,
        either: () => undefined,
      });
    }
  }

  async #fork(model: Model): Promise<void> {
    await this.#operation(
      "fork",
      () => this.#call("POST", `/sandboxes/${model.id}/fork`, { count: 2, timeout: 3600 }),
      {
        ok: ({ json }) => {
          for (const result of json as { sandbox?: unknown; error?: { message: string } }[]) {
            if (result.sandbox !== undefined) this.#born(result.sandbox, model.contents);
            else if (this.#ongoingFaults === 0 && this.#disturbances === 0) {
              this.#violation(`a child failed without a fault: ${result.error?.message}`);
            }
          }
        },
        either: () => {
          model.states.add("gone");
          this.#pendingBirths = true;
        },
      },
    );
  }

  // ---- faults -----------------------------------------------------------------------------------

  async #fault(operations: Promise<void>[]): Promise<void> {
    const kinds = [
      ["VMM killed", () => this.#killVmm()],
      ["server killed", () => this.#killServer(operations)],
      ["blockd killed", () => this.#killBlockd()],
      ["disk full", () => this.#fillDisk()],
      ["slow storage", () => this.#slowStorage()],
    ] as const;
    const [kind, inject] = this.#pick(kinds)!;
    this.#faults[kind] = (this.#faults[kind] ?? 0) + 1;
    this.#say(`fault: ${kind}`);
    this.#disturbances += 1;
    this.#ongoingFaults += 1;
    try {
      await inject();
      await Promise.all(operations);
    } finally {
      this.#ongoingFaults -= 1;
      this.#disturbances += 1;
    }
  }

  async #killVmm(): Promise<void> {
    const model = this.#pick([...this.#models.values()].filter(({ states }) => states.has("running")));
    if (model === undefined) return;
    const live = join(this.#server.home, "sandboxes", model.id, "live.json");
    if (!existsSync(live)) return;
    const { vm } = JSON.parse(readFileSync(live, "utf8")) as { vm?: { pid: number } };
    if (vm === undefined || !existsSync(`/proc/${vm.pid}`)) return;
    if (!readFileSync(`/proc/${vm.pid}/cmdline`, "utf8").includes(model.id)) return;
    process.kill(vm.pid, "SIGKILL");
    model.states.add("gone");
    // It is noticed without anybody asking.
    for (const until = performance.now() + RECOVERY_MS; ; await Bun.sleep(50)) {
      const { status, json } = await this.#call("GET", `/sandboxes/${model.id}`);
      if (status === 404) return;
      // The pause had all it needed.
      if (status === 200 && (json as { state: string }).state === "paused" && !model.busy) return;
      if (performance.now() > until)
        return this.#violation(`the end of the VM of ${model.id} is not noticed`);
    }
  }

  async #killServer(operations: Promise<void>[]): Promise<void> {
    await Bun.sleep(this.#random() * 400);
    await this.#server.kill9();
    await Promise.all(operations);
    await this.#server.start();
    await this.#adoptStrangers();
  }

  #blockdPid(): number | undefined {
    for (const entry of readdirSync("/proc")) {
      if (!/^\d+$/.test(entry)) continue;
      try {
        const command = readFileSync(`/proc/${entry}/cmdline`, "utf8").split("\0");
        if (command.includes("blockd") && command.some((word) => word.startsWith(this.#server.runtime))) {
          return Number(entry);
        }
      } catch (error) {
        // It ended between the listing and the look.
        if (!(error instanceof Error && "code" in error)) throw error;
      }
    }
    return undefined;
  }

  async #killBlockd(): Promise<void> {
    const pid = this.#blockdPid();
    if (pid !== undefined) process.kill(pid, "SIGKILL");
  }

  async #fillDisk(): Promise<void> {
    const filler = join(this.#stateDir, "filler");
    Bun.spawnSync(["dd", "if=/dev/zero", `of=${filler}`, "bs=64k"], { stderr: "ignore" });
    try {
      const model = this.#pick(this.#known("running"));
      if (model === undefined) return;
      await this.#onModel(model, async () => {
        const { status, json, text } = await this.#call("POST", `/sandboxes/${model.id}/pause`);
        if (status >= 200 && status < 300) {
          model.states = new Set(["paused"]);
          return;
        }
        const error = json as { error_code?: string; remediation?: string } | undefined;
        if (status !== 507 || error?.error_code !== "disk_full" || error.remediation === undefined) {
          this.#violation(`pause on a full disk: ${status} ${text.slice(0, 300)}`);
        }
        const began = performance.now();
        while ((await this.#exec(model.id, "echo ok")) !== "ok") {
          if (performance.now() - began > 5000) {
            return this.#violation(`${model.id} does not answer 5 s after a pause that failed`);
          }
          await Bun.sleep(50);
        }
      });
    } finally {
      rmSync(filler, { force: true });
    }
  }

  async #slowStorage(): Promise<void> {
    const pid = this.#blockdPid();
    if (pid === undefined) return;
    process.kill(pid, "SIGSTOP");
    try {
      await Bun.sleep(500 + this.#random() * 1500);
    } finally {
      process.kill(pid, "SIGCONT");
    }
  }

  // ---- the run ----------------------------------------------------------------------------------

  async run(): Promise<void> {
    for (let done = 0; done < this.#options.operations && !interrupted; ) {
      const batch = 1 + Math.floor(this.#random() * 3);
      const fault = this.#random() < FAULT_RATE * batch;
      const operations = Array.from({ length: batch }, () => this.#step());
      if (fault) await this.#fault(operations);
      else await Promise.all(operations);
      done += batch;
      if (this.#pendingBirths) await this.#adoptStrangers();
      await this.#checkList();
      const sample = this.#pick(this.#known("running"));
      if (sample !== undefined) await this.#checkContent(sample);
      this.#say(`${done}/${this.#options.operations}: ${this.#models.size} sandboxes`);
    }
    // At the end every one is looked at, those that are paused as well.
    for (const model of [...this.#models.values()]) {
      if (model.states.has("paused")) await this.#toRunning(model);
      await this.#checkContent(model);
    }
    await this.#checkList();
  }

  async end(): Promise<void> {
    for (const { id } of this.#models.values()) {
      const { status } = await this.#call("DELETE", `/sandboxes/${id}`);
      if (status !== 204) this.#violation(`the deletion of ${id} at the end answers ${status}`);
    }
    for (const { id } of this.#snapshots) await this.#call("DELETE", `/templates/${id}`);
    await this.#call("DELETE", "/templates/soak");
  }

  report(): Pick<SoakReport, "operations" | "faults" | "checks" | "slowestMs"> {
    return {
      operations: this.#operations,
      faults: this.#faults,
      checks: this.#checks,
      slowestMs: this.#slowest,
    };
  }
}

/** An image of busybox alone, as a layout on the disk. */
async function busyboxLayout(directory: string): Promise<void> {
  const busybox = Bun.which("busybox");
  if (busybox === null) throw new Error("busybox is not installed");
  const image = buildImage({
    layers: [
      {
        entries: [
          ...["bin", "etc", "root", "dev", "proc", "sys", "tmp"].map((path) => ({
            path: `${path}/`,
            type: "directory" as const,
          })),
          { path: "bin/busybox", content: readFileSync(busybox), mode: 0o755 },
          ...APPLETS.map((name) => ({ path: `bin/${name}`, type: "symlink" as const, link: "busybox" })),
          { path: "etc/passwd", content: "root:x:0:0:root:/root:/bin/sh\n" },
          { path: "etc/group", content: "root:x:0:\n" },
        ],
      },
    ],
    config: { Env: ["PATH=/bin"] },
  });
  await writeLayout(directory, { latest: image });
}

function rssMiB(pid: number): number {
  const kib = /^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1];
  return Math.round(Number(kib) / 1024);
}

/** Files under a directory, by name. */
function filesIn(dir: string): string[] {
  if (!existsSync(dir)) return [];
  return readdirSync(dir, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
}

export async function runSoak(options: SoakOptions): Promise<SoakReport> {
  const began = performance.now();
  await using stack = new AsyncDisposableStack();
  const stateDir = `/tmp/life-soak-${process.pid}-${options.seed}`;
  mkdirSync(stateDir);
  stack.defer(() => rmSync(stateDir, { recursive: true, force: true }));
  await runCommand(["mount", "-t", "tmpfs", "-o", `size=${STATE_DIR_MIB}m`, "tmpfs", stateDir]);
  stack.defer(async () => void (await runCommand(["umount", stateDir])));
  const server = stack.use(
    await TestServer.create({
      toml: [
        "[orchestrator]",
        `persisted_sandbox_store_path = "${stateDir}/paused"`,
        "[image.resolver]",
        "allow_local_paths = true",
        "[image.cache]",
        "virtual_size_gib = 1",
      ].join("\n"),
      env: { AENV_LOG_LEVEL: process.env.AENV_LOG_LEVEL ?? "warn" },
    }),
  );
  await server.start();
  const layout = join(server.home, "layout");
  await busyboxLayout(layout);
  await server.run(["auth"], `${server.url}\n${await server.apiKey()}\n`);
  const image = `oci-layout:${layout}:latest`;
  const pulled = await server.run([...["pull", image, "--name", "soak", "--cpu", "1", "--memory", "192"]]);
  if (pulled.exitCode !== 0) throw new Error(`no template: ${pulled.stderr}${pulled.stdout}`);
  const first = rssMiB(server.pid);
  const soak = new Soak(options, server, await server.apiKey(), { stateDir, image });
  try {
    await soak.run();
  } finally {
    await soak.end();
  }
  const last = rssMiB(server.pid);
  // Idle network slots wait in the server's pool. One that is held by nobody shows after the stop.
  const expected = /agentenv serve|blockd|^mount .*\/netns\/|^route /;
  const leaks = async (): Promise<string[]> => [
    ...(await hostObjects(server)).filter((line) => !expected.test(line)),
    ...filesIn(join(server.home, "sandboxes")),
    ...filesIn(join(stateDir, "paused/artifacts")),
    ...filesIn(join(server.home, "cache/memory")).filter((name) => name.endsWith(".tmp")),
  ];
  // What is removed in the background after a deletion gets a moment.
  let left = await leaks();
  for (let i = 0; i < 50 && left.length > 0; i++) {
    await Bun.sleep(100);
    left = await leaks();
  }
  const exit = await server.stop();
  if (exit !== 0) left.push(`the server's orderly stop ended with ${exit}`);
  left.push(...(await hostObjects(server)));
  const log = soak.violations.length + left.length > 0 ? await server.log() : "";
  if (log !== "") options.log?.(log.slice(-20_000));
  return {
    seed: options.seed,
    ...soak.report(),
    violations: soak.violations,
    leaks: left,
    serverRssMiB: { first, last },
    seconds: Math.round((performance.now() - began) / 1000),
  };
}

export function formatReport(report: SoakReport): string {
  const lines = [`soak with seed ${report.seed}: ${report.seconds} s`];
  for (const [kind, { ok, refused, disturbed }] of Object.entries(report.operations)) {
    const slowest = `slowest ${report.slowestMs[kind]} ms`;
    lines.push(`  ${kind}: ${ok} ok, ${refused} refused, ${disturbed} under a fault, ${slowest}`);
  }
  const faults = Object.entries(report.faults).map(([kind, count]) => `${count} × ${kind}`);
  lines.push(`  faults: ${faults.length === 0 ? "none" : faults.join(", ")}`);
  lines.push(
    `  server's memory: ${report.serverRssMiB.first} MiB at first, ${report.serverRssMiB.last} MiB at last`,
  );
  lines.push(
    `  checks: ${report.checks}; broken promises: ${report.violations.length}; leaks: ${report.leaks.length}`,
  );
  for (const text of [...report.violations, ...report.leaks.map((leak) => `left behind: ${leak}`)]) {
    lines.push(`  ! ${text}`);
  }
  return lines.join("\n");
}

/** Ends the run early, with its clean-up and report. */
let interrupted = false;

if (import.meta.main) {
  for (const signal of ["SIGINT", "SIGTERM"] as const) {
    process.on(signal, () => {
      interrupted = true;
    });
  }
  const operations = Number(process.argv[2] ?? 200);
  const seed = Number(process.argv[3] ?? Math.floor(Math.random() * 1e6));
  const report = await runSoak({ operations, seed, log: (line) => process.stderr.write(`${line}\n`) });
  process.stdout.write(`${formatReport(report)}\n`);
  process.exit(report.violations.length + report.leaks.length === 0 ? 0 : 1);
}
