import { spawn } from "node:child_process";
import { AenvError, assert } from "../lib/errors.ts";
import { OpStreamWriter } from "./opstream.ts";
import { TarParser } from "./tar.ts";

export interface ApplyOptions {
  /** Path of the aenv-ext4 executable. */
  readonly helper: string;
  readonly socketPath: string;
  readonly exportName: string;
  /** Make the file system first, with this UUID; else it is there already. */
  readonly formatUuid?: string;
  /** The layer's tar bytes. */
  readonly tar: AsyncIterable<Uint8Array>;
  readonly signal: AbortSignal;
  /** Called with the tar bytes applied so far. */
  readonly onProgress?: (doneBytes: number) => void;
}

export interface ApplyReport {
  readonly entries: number;
  readonly dataBytes: number;
  /** Extended attributes left out because ext4 has no place for their name space. */
  readonly skippedXattrs: number;
}

const STDERR_LIMIT = 4096;

/** Exit codes of c/ext4/failure.h. */
function helperError(exitCode: number | null, signalName: string | null, said: string): AenvError {
  switch (exitCode) {
    case 1:
      return new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `the layer cannot be applied: ${said}`,
      });
    case 3:
      return new AenvError({
        code: "image_unsupported",
        status: 400,
        message: said,
        remediation: "use a smaller image, or configure a larger virtual disk for converted images",
      });
    case 5:
      return new AenvError({
        code: "disk_full",
        status: 507,
        message: `converting the layer: ${said}`,
        remediation: "free space on the file system that holds the image cache",
      });
    case 4:
      return new AenvError({ code: "image_conversion_failed", message: `converting the layer: ${said}` });
    default:
      return new AenvError({
        code: "image_conversion_failed",
        message:
          exitCode === null
            ? `the layer converter was ended by ${signalName ?? "a signal"}${said === "" ? "" : `: ${said}`}`
            : `the layer converter failed (exit code ${exitCode}): ${said}`,
      });
  }
}

/**
 * Streams one layer's tar into the file system on an NBD export. The tar is parsed here, in a memory-safe
 * language; the helper sees checked records only. Resolves when everything is durable on the device.
 */
export async function applyTar(options: ApplyOptions): Promise<ApplyReport> {
  const { signal } = options;
  signal.throwIfAborted();
  const format = options.formatUuid === undefined ? [] : ["--format", options.formatUuid];
  const child = spawn(
    options.helper,
    ["--socket", options.socketPath, "--export", options.exportName, ...format],
    { stdio: ["pipe", "pipe", "pipe"], env: {} },
  );
  const { stdin, stdout, stderr } = child;
  let spawnError: Error | undefined;
  let said = "";
  let report = "";
  const exited = new Promise<{ code: number | null; signalName: string | null }>((resolve) => {
    child.on("close", (code, signalName) => resolve({ code, signalName }));
    child.on("error", (error) => {
      spawnError = error;
      resolve({ code: null, signalName: null });
    });
  });
  let gone = false;
  void exited.then(() => {
    gone = true;
  });
  stderr.setEncoding("utf8").on("data", (text: string) => {
    said = (said + text).slice(-STDERR_LIMIT);
  });
  stdout.setEncoding("utf8").on("data", (text: string) => {
    report = (report + text).slice(0, STDERR_LIMIT);
  });
  // A helper that gives up closes its input; the exit code and its words say why.
  stdin.on("error", () => {
    gone = true;
  });
  const kill = () => child.kill("SIGKILL");
  signal.addEventListener("abort", kill, { once: true });

  const send = async (pieces: readonly Uint8Array[]): Promise<void> => {
    for (const piece of pieces) {
      if (gone) return;
      if (stdin.write(piece)) continue;
      // The helper takes more, or it has given up.
      const drained = new Promise<void>((resolve) => stdin.once("drain", resolve));
      await Promise.race([drained, exited]);
    }
  };
  const writer = new OpStreamWriter();
  const parser = new TarParser(writer);
  try {
    for await (const chunk of options.tar) {
      if (gone) break;
      parser.push(chunk);
      await send(writer.take());
      options.onProgress?.(parser.offsetBytes);
    }
    if (!gone) {
      parser.finish();
      writer.end();
      await send(writer.take());
      if (!gone) stdin.end();
    }
  } catch (error) {
    kill();
    await exited;
    signal.throwIfAborted();
    throw error;
  } finally {
    signal.removeEventListener("abort", kill);
  }
  // The last write-back may take a while: the signal still counts.
  signal.addEventListener("abort", kill, { once: true });
  const { code, signalName } = await exited;
  signal.removeEventListener("abort", kill);
  signal.throwIfAborted();
  if (spawnError !== undefined) {
    throw new AenvError({
      code: "image_conversion_failed",
      message: `cannot run the layer converter ${options.helper}`,
      cause: spawnError,
    });
  }
  if (code !== 0) throw helperError(code, signalName, said.trim());
  const parsed: unknown = JSON.parse(report);
  assert(
    typeof parsed === "object" && parsed !== null && "entries" in parsed,
    "report of the layer converter",
  );
  return parsed as ApplyReport;
}
