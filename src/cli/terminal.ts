import { writeSync } from "node:fs";
import { CliError } from "./command.ts";
import { SignalHandler, signalStatus } from "./signals.ts";

/** True when a person sits at both ends of this process. */
export function hasTerminal(): boolean {
  return process.stdin.isTTY === true && process.stdout.isTTY === true;
}

/** Fails when this process has no terminal to work with: asked before anything is started for it. */
export function requireTerminal(hint: string): void {
  if (hasTerminal()) return;
  throw new CliError("a shell needs a terminal on standard input and output", { exitCode: 2, hint });
}

/**
 * `setRawMode` leaves it to the terminal to put a carriage return before each line feed. The remote terminal
 * has done that already where it was wanted; full-screen programs mean their line feeds as they are.
 */
function makeRaw(): void {
  process.stdin.setRawMode(true);
  if (Bun.which("stty") === null) return;
  Bun.spawnSync(["stty", "-opost"], { stdin: "inherit", stdout: "ignore", stderr: "ignore" });
}

/**
 * Raw mode of the terminal on standard input. The settings before come back on every way out of this
 * process that it can notice: leaving the scope, `process.exit`, an uncaught error, a signal.
 */
export class RawMode implements Disposable {
  readonly #restore: () => void;
  readonly #signals: SignalHandler;
  readonly #again: SignalHandler;

  /** `modes` is what programs of the other side did to the terminal, to be undone, too. */
  constructor(modes?: ScreenModes) {
    let raw = true;
    makeRaw();
    this.#restore = () => {
      if (!raw) return;
      raw = false;
      const undo = modes?.undo() ?? "";
      try {
        if (undo !== "") writeSync(1, undo); // Written at once: the process may be about to end.
      } finally {
        process.stdin.setRawMode(false);
      }
    };
    process.on("exit", this.#restore);
    this.#signals = new SignalHandler(["SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT"], (signal) => {
      this.#restore();
      process.exit(signalStatus(signal));
    });
    // Whoever stopped us had the terminal meanwhile.
    this.#again = new SignalHandler(["SIGCONT"], () => {
      process.stdin.setRawMode(false);
      makeRaw();
    });
  }

  [Symbol.dispose](): void {
    this.#again[Symbol.dispose]();
    this.#signals[Symbol.dispose]();
    process.off("exit", this.#restore);
    this.#restore();
  }
}

/** Modes that programs set with `CSI ? n h` and that would spoil a terminal they are left on in. */
const STICKY_MODES = new Set([
  "47",
  "1047",
  "1049",
  "1000",
  "1002",
  "1003",
  "1004",
  "1005",
  "1006",
  "1015",
  "2004",
]);
const CURSOR = "25";
const LONGEST_SEQUENCE = 64;

/**
 * Watches what remote programs do to the terminal, so that it can be undone when they are cut off: the
 * alternate screen, mouse reports, bracketed paste, a hidden cursor.
 */
export class ScreenModes {
  readonly #set = new Set<string>();
  #cursorHidden = false;
  #tail = "";

  observe(bytes: Uint8Array): void {
    const text =
      this.#tail + Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("latin1");
    let read = 0;
    // biome-ignore lint/suspicious/noControlCharactersInRegex: control sequences are what is looked for
    for (const match of text.matchAll(/\x1b\[\?([\d;]+)([hl])/g)) {
      read = match.index + match[0].length;
      const on = match[2] === "h";
      for (const mode of match[1]!.split(";")) {
        if (mode === CURSOR) this.#cursorHidden = !on;
        else if (!STICKY_MODES.has(mode)) continue;
        else if (on) this.#set.add(mode);
        else this.#set.delete(mode);
      }
    }
    // A sequence may go on in the next chunk.
    const begun = text.lastIndexOf("\x1b");
    this.#tail = begun >= read && text.length - begun < LONGEST_SEQUENCE ? text.slice(begun) : "";
  }

  /** What to write so that the terminal is as before. */
  undo(): string {
    const modes = [...this.#set].map((mode) => `\x1b[?${mode}l`).join("");
    this.#set.clear();
    const cursor = this.#cursorHidden ? "\x1b[?25h" : "";
    this.#cursorHidden = false;
    return modes === "" && cursor === "" ? "" : `${modes}${cursor}\x1b[0m`;
  }
}
