import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

const POLL_MS = 100;

/** A shell in a tmux of its own: a real terminal with a size, keys and a screen to look at. */
export class Tmux implements AsyncDisposable {
  readonly #dir: string;
  readonly #env: Readonly<Record<string, string>>;
  #marks = 0;

  private constructor(dir: string, env: Readonly<Record<string, string>>) {
    this.#dir = dir;
    this.#env = env;
  }

  static async start(
    env: Readonly<Record<string, string>>,
    size: { readonly cols: number; readonly rows: number },
  ): Promise<Tmux> {
    const dir = await mkdtemp(join(tmpdir(), "aenv-tmux-"));
    const tmux = new Tmux(dir, { ...env, PS1: "here$ ", TERM: "xterm-256color", LANG: "C.UTF-8" });
    await tmux.#tmux(
      "new-session",
      "-d",
      "-x",
      String(size.cols),
      "-y",
      String(size.rows),
      // Status by the prompt: a list of commands would end with one that Ctrl-C ends.
      `exec env PS1='here$ ' PROMPT_COMMAND='echo "[status $mark $?]"' bash --norc --noprofile -i`,
    );
    await tmux.#tmux("set-option", "-g", "history-limit", "5000");
    await tmux.shows("here$ ");
    return tmux;
  }

  async #tmux(...args: string[]): Promise<string> {
    const child = Bun.spawn(["tmux", "-S", join(this.#dir, "socket"), "-f", "/dev/null", ...args], {
      env: this.#env,
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [out, err, code] = await Promise.all([
      new Response(child.stdout).text(),
      new Response(child.stderr).text(),
      child.exited,
    ]);
    if (code !== 0) throw new Error(`tmux ${args[0]} failed: ${err}`);
    return out;
  }

  /** What is on the screen, lines that were broken by the width joined; with all that has scrolled away. */
  async screen(options: { readonly visible?: boolean } = {}): Promise<string> {
    return this.#tmux("capture-pane", "-p", "-J", ...(options.visible === true ? [] : ["-S", "-5000"]));
  }

  /** Types text as it is. */
  async type(text: string): Promise<void> {
    await this.#tmux("send-keys", "-l", "--", text);
  }

  /** Presses keys by tmux's names: `Enter`, `C-c`, `C-]`. */
  async press(...keys: string[]): Promise<void> {
    await this.#tmux("send-keys", ...keys);
  }

  async resize(cols: number, rows: number): Promise<void> {
    await this.#tmux("resize-window", "-x", String(cols), "-y", String(rows));
  }

  /** Waits for a text on the screen; resolves with the match. */
  async shows(text: string | RegExp, ms = 30_000): Promise<RegExpExecArray> {
    const wanted = typeof text === "string" ? new RegExp(text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")) : text;
    const deadline = performance.now() + ms;
    for (;;) {
      const screen = await this.screen();
      const found = wanted.exec(screen);
      if (found !== null) return found;
      if (performance.now() > deadline) {
        throw new Error(`the terminal does not show ${wanted} but:\n${screen.trimEnd().slice(-3_000)}`);
      }
      await Bun.sleep(POLL_MS);
    }
  }

  /** Types a command at the prompt of the shell, on an empty screen. Its end is awaited with `status`. */
  async begin(command: string): Promise<void> {
    await this.#tmux("send-keys", "-R");
    await this.#tmux("clear-history");
    await this.type(`mark=${++this.#marks}; clear; ${command}`);
    await this.press("Enter");
  }

  /** Exit status of the command that was begun last. */
  async status(ms = 60_000): Promise<number> {
    return Number((await this.shows(new RegExp(`\\[status ${this.#marks} (\\d+)\\]`), ms))[1]);
  }

  /** Runs a command to its end. */
  async run(command: string, ms = 60_000): Promise<{ readonly status: number; readonly screen: string }> {
    await this.begin(command);
    const status = await this.status(ms);
    return { status, screen: await this.screen() };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#tmux("kill-server");
    await rm(this.#dir, { recursive: true, force: true });
  }
}
