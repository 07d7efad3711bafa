/** Reading and writing a nested plain object by a list of names. */
export type Tree = { [name: string]: unknown };

export function isTree(value: unknown): value is Tree {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Date);
}

export function getAt(root: unknown, parts: readonly string[]): unknown {
  let current = root;
  for (const part of parts) {
    if (!isTree(current) || !Object.hasOwn(current, part)) return undefined;
    current = current[part];
  }
  return current;
}

/** Makes the tables on the way; one that is there as something else is left to the schema to refuse. */
export function setAt(root: Tree, parts: readonly string[], value: unknown): void {
  let current = root;
  for (const part of parts.slice(0, -1)) {
    if (!Object.hasOwn(current, part)) current[part] = {};
    const next = current[part];
    if (!isTree(next)) return;
    current = next;
  }
  current[parts.at(-1)!] = value;
}

export function deleteAt(root: unknown, parts: readonly string[]): void {
  const parent = getAt(root, parts.slice(0, -1));
  if (isTree(parent)) delete parent[parts.at(-1)!];
}
