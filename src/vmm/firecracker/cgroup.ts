import { existsSync, mkdirSync, readdirSync, rmdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { errorCode } from "../../lib/durable.ts";

/** What a VMM may take of the host, its guest included. */
export interface GroupLimits {
  readonly memoryBytes: number;
  /** Processors' worth of time. */
  readonly cpus: number;
  readonly processes: number;
}

const CONTROLLERS = ["cpu", "memory", "pids"] as const;
const PERIOD_US = 100_000;

function enableControllers(mount: string, parent: string): void {
  const all = CONTROLLERS.map((name) => `+${name}`).join(" ");
  let dir = mount;
  writeFileSync(join(dir, "cgroup.subtree_control"), all);
  for (const part of parent.split("/").filter((part) => part !== "")) {
    dir = join(dir, part);
    mkdirSync(dir, { recursive: true });
    writeFileSync(join(dir, "cgroup.subtree_control"), all);
  }
}

/** One control group for each VMM, below one parent. Version 2 or 1 of the kernel's interface, as mounted. */
export class Groups {
  readonly #parents: readonly string[];
  readonly #unified: boolean;
  readonly #mount: string;

  private constructor(parents: readonly string[], unified: boolean, mount: string) {
    this.#parents = parents;
    this.#unified = unified;
    this.#mount = mount;
  }

  /** `parent` is a path below the mount. Throws where no groups with these controllers can be made. */
  static open(parent: string, mount = "/sys/fs/cgroup"): Groups {
    const unified = existsSync(join(mount, "cgroup.controllers"));
    const parents = unified ? [join(mount, parent)] : CONTROLLERS.map((name) => join(mount, name, parent));
    const groups = new Groups(parents, unified, mount);
    try {
      if (unified) enableControllers(mount, parent);
      else for (const dir of parents) mkdirSync(dir, { recursive: true });
    } catch (error) {
      // Those that were made before.
      groups.close();
      throw error;
    }
    return groups;
  }

  /** Directories of a group, each of which a process joins. Made if need be. */
  make(name: string, limits: GroupLimits): string[] {
    const dirs = this.#dirs(name);
    for (const dir of dirs) mkdirSync(dir, { recursive: true });
    this.limit(name, limits);
    return dirs;
  }

  limit(name: string, { memoryBytes, cpus, processes }: GroupLimits): void {
    const dirs = this.#dirs(name);
    const quota = Math.round(cpus * PERIOD_US);
    const values = this.#unified
      ? [
          [dirs[0]!, "cpu.max", `${quota} ${PERIOD_US}`],
          [dirs[0]!, "memory.max", String(memoryBytes)],
          [dirs[0]!, "pids.max", String(processes)],
        ]
      : [
          [dirs[0]!, "cpu.cfs_period_us", String(PERIOD_US)],
          [dirs[0]!, "cpu.cfs_quota_us", String(quota)],
          [dirs[1]!, "memory.limit_in_bytes", String(memoryBytes)],
          [dirs[2]!, "pids.max", String(processes)],
        ];
    for (const [dir, file, value] of values) writeFileSync(join(dir!, file!), value!);
  }

  /** Puts a process in that did not join by itself. */
  join(name: string, pid: number): void {
    for (const dir of this.#dirs(name)) writeFileSync(join(dir, "cgroup.procs"), String(pid));
  }

  /** False while a process is in it. */
  remove(name: string): boolean {
    let gone = true;
    for (const dir of this.#dirs(name)) {
      try {
        rmdirSync(dir);
      } catch (error) {
        if (errorCode(error) === "EBUSY") gone = false;
        else if (errorCode(error) !== "ENOENT") throw error;
      }
    }
    return gone;
  }

  /** Names of the groups there are. */
  list(): string[] {
    const names = this.#parents.flatMap((parent) =>
      readdirSync(parent, { withFileTypes: true })
        .filter((entry) => entry.isDirectory())
        .map((entry) => entry.name),
    );
    return [...new Set(names)];
  }

  /** Removes the parents, too, up to one in which there are other groups. */
  close(): void {
    for (const parent of this.#parents) {
      for (let dir = parent; dir.startsWith(`${this.#mount}/`) && !this.#isRoot(dir); dir = dirname(dir)) {
        try {
          rmdirSync(dir);
        } catch (error) {
          const code = errorCode(error) ?? "";
          // One below may not have been made.
          if (code === "ENOENT") continue;
          if (!["EBUSY", "ENOTEMPTY"].includes(code)) throw error;
          break;
        }
      }
    }
  }

  /** Version 1 has a tree for each controller. */
  #isRoot(dir: string): boolean {
    return !this.#unified && dirname(dir) === this.#mount;
  }

  #dirs(name: string): string[] {
    return this.#parents.map((parent) => join(parent, name));
  }
}
