import { AenvError } from "./errors.ts";

export interface CommandOptions {
  readonly cwd?: string;
  readonly env?: Record<string, string>;
  readonly stdin?: string | Uint8Array;
  /** Default 30 s. The command is killed and an error thrown past it. */
  readonly timeoutMs?: number;
  readonly signal?: AbortSignal;
}

export interface CommandResult {
  readonly exitCode: number;
  readonly stdout: string;
  readonly stderr: string;
}

const SYSTEM_DIRECTORIES = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/**
 * A PATH by which the host's own tools are found, behind what it names already: root's shell by plain `su` has the
 * user's, where `nft` and others are not.
 */
export function withSystemDirectories(path: string | undefined): string {
  const named = (path ?? "").split(":").filter((directory) => directory !== "");
  return [...named, ...SYSTEM_DIRECTORIES.filter((directory) => !named.includes(directory))].join(":");
}

/** Runs a host command to its end. Output is small by contract (it is kept in memory). */
export async function tryCommand(
  argv: readonly string[],
  options: CommandOptions = {},
): Promise<CommandResult> {
  const timeoutMs = options.timeoutMs ?? 30_000;
  let child: Bun.Subprocess<"ignore" | Uint8Array<ArrayBuffer>, "pipe", "pipe">;
  try {
    child = Bun.spawn([...argv], {
      cwd: options.cwd,
      env: options.env ?? process.env,
      stdin: options.stdin === undefined ? "ignore" : new Uint8Array(Buffer.from(options.stdin as string)),
      stdout: "pipe",
      stderr: "pipe",
      timeout: timeoutMs,
      killSignal: "SIGKILL",
      signal: options.signal,
    });
  } catch (cause) {
    throw new AenvError({
      code: "command_not_found",
      message: `cannot run ${argv[0]}`,
      remediation: `install the package that provides ${argv[0]}; agentenv doctor lists what is missing`,
      cause,
    });
  }
  const [stdout, stderr, exitCode] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  return { exitCode, stdout, stderr };
}

/** Like {@link tryCommand}, but a non-zero exit is an error that carries the command's own words. */
export async function runCommand(argv: readonly string[], options: CommandOptions = {}): Promise<string> {
  return outputOf(argv, await tryCommand(argv, options));
}

/** The output of a command that ended with 0. @throws AenvError `command_failed` with its own words otherwise. */
export function outputOf(argv: readonly string[], result: CommandResult): string {
  if (result.exitCode !== 0) {
    const said = (result.stderr.trim() || result.stdout.trim()).slice(-2000);
    throw new AenvError({
      code: "command_failed",
      message: `${argv.join(" ")} failed with exit code ${result.exitCode}${said === "" ? "" : `: ${said}`}`,
    });
  }
  return result.stdout;
}
