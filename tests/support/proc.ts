import { readdirSync, readFileSync } from "node:fs";

/** Running processes and their command lines (NUL between the words); one that ends meanwhile is left out. */
export function processes(): { readonly pid: number; readonly command: string }[] {
  return readdirSync("/proc").flatMap((name) => {
    if (!/^\d+$/.test(name)) return [];
    try {
      return [{ pid: Number(name), command: readFileSync(`/proc/${name}/cmdline`, "utf8") }];
    } catch {
      return [];
    }
  });
}
