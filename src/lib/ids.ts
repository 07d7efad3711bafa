const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

/** A fresh UUIDv7 in lower case: sandboxes, templates, snapshots, builds, runtime instances. */
export function newId(): string {
  return Bun.randomUUIDv7();
}

export function isUuid(text: string): boolean {
  return UUID.test(text);
}
