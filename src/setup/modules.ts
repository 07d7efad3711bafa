import { AenvError } from "../lib/errors.ts";

/** What a kernel module says about itself in its `.modinfo` section. */
export interface ModuleInfo {
  readonly name: string;
  readonly depends: readonly string[];
  /** Kernel release and build options the module is for; its first word is what `uname -r` prints. */
  readonly vermagic: string;
}

/** `virtio-rng.ko` is called `virtio_rng` by the kernel; both spellings mean the same module. */
export function moduleName(path: string): string {
  return path
    .replace(/^.*\//, "")
    .replace(/\.ko(\.(xz|gz|zst))?$/, "")
    .replaceAll("-", "_");
}

/**
 * Reads `.modinfo` of an uncompressed module: NUL-separated `key=value` strings in an ELF section of that
 * name (64-bit little endian section headers).
 */
export function readModuleInfo(path: string, bytes: Uint8Array): ModuleInfo {
  const invalid = (why: string) =>
    new AenvError({ code: "kernel_module_invalid", message: `${path} is not a kernel module: ${why}` });
  if (bytes.length < 64) throw invalid("too short for an ELF header");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (view.getUint32(0) !== 0x7f454c46 || view.getUint8(4) !== 2 || view.getUint8(5) !== 1) {
    throw invalid("no 64-bit little-endian ELF header");
  }
  const tableOffset = Number(view.getBigUint64(40, true));
  const entrySize = view.getUint16(58, true);
  const entryCount = view.getUint16(60, true);
  const namesIndex = view.getUint16(62, true);
  if (entrySize < 64 || namesIndex >= entryCount || tableOffset + entrySize * entryCount > bytes.length) {
    throw invalid("section table out of bounds");
  }
  const section = (index: number) => {
    const at = tableOffset + index * entrySize;
    const offset = Number(view.getBigUint64(at + 24, true));
    const size = Number(view.getBigUint64(at + 32, true));
    return { nameOffset: view.getUint32(at, true), offset, size };
  };
  const names = section(namesIndex);
  for (let index = 0; index < entryCount; index++) {
    const { nameOffset, offset, size } = section(index);
    const at = names.offset + nameOffset;
    const end = bytes.indexOf(0, at);
    if (end < 0 || Buffer.from(bytes.subarray(at, end)).toString("latin1") !== ".modinfo") continue;
    if (offset + size > bytes.length) throw invalid(".modinfo out of bounds");
    const fields = new Map<string, string>();
    for (const item of Buffer.from(bytes.subarray(offset, offset + size))
      .toString("latin1")
      .split("\0")) {
      const equals = item.indexOf("=");
      if (equals > 0 && !fields.has(item.slice(0, equals)))
        fields.set(item.slice(0, equals), item.slice(equals + 1));
    }
    return {
      name: moduleName(fields.get("name") ?? path),
      depends: (fields.get("depends") ?? "")
        .split(",")
        .filter((name) => name !== "")
        .map(moduleName),
      vermagic: fields.get("vermagic") ?? "",
    };
  }
  throw invalid("no .modinfo section");
}

/**
 * Modules in an order in which every one comes after those it needs. `dependenciesOf` is asked once per
 * module and returns undefined for a module that does not exist as a file. Wanted modules that do not
 * exist are left out when `builtin` has them, anything else missing is an error.
 */
export async function orderModules(
  wanted: readonly string[],
  dependenciesOf: (name: string) => Promise<readonly string[] | undefined>,
  builtin: ReadonlySet<string>,
): Promise<string[]> {
  const order: string[] = [];
  const state = new Map<string, "open" | "done">();
  const visit = async (raw: string, neededBy: string | undefined): Promise<void> => {
    const name = moduleName(raw);
    if (state.get(name) === "done" || builtin.has(name)) return;
    if (state.get(name) === "open") {
      throw new AenvError({ code: "kernel_module_cycle", message: `kernel module ${name} needs itself` });
    }
    state.set(name, "open");
    const dependencies = await dependenciesOf(name);
    if (dependencies === undefined) {
      throw new AenvError({
        code: "kernel_module_missing",
        message: `the kernel package has no module ${name}${neededBy === undefined ? "" : ` (needed by ${neededBy})`}`,
        remediation: "this kernel cannot be used: set [kernel].image_path to one with virtio built in",
      });
    }
    for (const dependency of dependencies) await visit(dependency, name);
    state.set(name, "done");
    order.push(name);
  };
  for (const name of wanted) await visit(name, undefined);
  return order;
}
