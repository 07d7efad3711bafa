import { existsSync } from "node:fs";
import { rm } from "node:fs/promises";
import { join } from "node:path";
import { errorChain } from "../../src/lib/errors.ts";

/** Newest version the tests are written for. */
const VERSION = "2.63.0";

async function run(argv: string[], timeoutMs: number): Promise<string> {
  const child = Bun.spawn(argv, { stdin: "ignore", stdout: "pipe", stderr: "pipe", timeout: timeoutMs });
  const [out, err, code] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  if (code !== 0) throw new Error((err || out).trim().split("\n").at(-1) ?? `${argv[0]} failed`);
  return out.trim();
}

interface Interpreter {
  readonly interpreter: string;
  readonly version: string;
}

/** The Python client in an environment of its own under .tools, installed when it can be. */
export async function preparePythonSdk(root: string): Promise<Interpreter | { readonly missing: string }> {
  return await preparePackage(root, "python-sdk", "e2b", VERSION);
}

/** An interpreter with a package of the Python index, in an environment of its own under .tools. */
export async function preparePackage(
  root: string,
  name: string,
  pack: string,
  version: string,
): Promise<Interpreter | { readonly missing: string }> {
  const dir = join(root, ".tools", name);
  const interpreter = join(dir, "bin/python");
  try {
    if (!existsSync(interpreter)) await run(["python3", "-m", "venv", dir], 60_000);
    const installed = await run(
      [interpreter, "-c", `import importlib.metadata as m; print(m.version('${pack}'))`],
      20_000,
    ).catch(() => undefined);
    if (installed !== version) {
      await run([interpreter, "-m", "pip", "install", "--quiet", `${pack}==${version}`], 120_000);
    }
    return { interpreter, version };
  } catch (error) {
    await rm(dir, { recursive: true, force: true });
    return { missing: `it could not be installed (${errorChain(error)[0]})` };
  }
}
