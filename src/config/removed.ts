/**
 * Keys of earlier formats, as patterns over dotted names: files that hold them keep loading, with a warning.
 * Everything else that is not in the schema is refused.
 */
const REMOVED: readonly RegExp[] = [
  /^ublk\.enabled$/,
  /^ublk\.overlaybd\.(enabled|device_type)$/,
  /^memory_snapshot\.compression(_[a-z_]+)?$/,
  /^template_build\.[a-z_]*compression[a-z_]*$/,
];

export function isRemovedKey(name: string): boolean {
  return REMOVED.some((pattern) => pattern.test(name));
}
