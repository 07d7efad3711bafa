/**
 * Order of Debian package versions (deb-version(7)): negative, zero or positive as `a` is older than, the
 * same as, or newer than `b`.
 */
export function compareDebianVersions(a: string, b: string): number {
  const left = split(a);
  const right = split(b);
  return (
    left.epoch - right.epoch ||
    comparePart(left.upstream, right.upstream) ||
    comparePart(left.revision, right.revision)
  );
}

/** Upstream part without epoch and Debian revision: `1:10.0.2+ds-2` gives `10.0.2+ds`. */
export function upstreamVersion(version: string): string {
  return split(version).upstream;
}

function split(version: string): { epoch: number; upstream: string; revision: string } {
  const colon = version.indexOf(":");
  const epoch = colon < 0 ? 0 : Number(version.slice(0, colon));
  const rest = version.slice(colon + 1);
  const dash = rest.lastIndexOf("-");
  return dash < 0
    ? { epoch, upstream: rest, revision: "" }
    : { epoch, upstream: rest.slice(0, dash), revision: rest.slice(dash + 1) };
}

/** `~` sorts before the end, the end before letters, letters before everything else. */
function weight(character: string | undefined): number {
  if (character === undefined || /\d/.test(character)) return 0;
  if (character === "~") return -1;
  const code = character.charCodeAt(0);
  return /[A-Za-z]/.test(character) ? code : code + 256;
}

function comparePart(a: string, b: string): number {
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    while ((i < a.length && !/\d/.test(a[i]!)) || (j < b.length && !/\d/.test(b[j]!))) {
      const difference = weight(a[i]) - weight(b[j]);
      if (difference !== 0) return difference;
      i++;
      j++;
    }
    const left = /^\d*/.exec(a.slice(i))![0];
    const right = /^\d*/.exec(b.slice(j))![0];
    i += left.length;
    j += right.length;
    const l = left.replace(/^0+/, "");
    const r = right.replace(/^0+/, "");
    if (l.length !== r.length) return l.length - r.length;
    if (l !== r) return l < r ? -1 : 1;
  }
  return 0;
}
