/**
 * Patterns with `*`, `?` and classes against texts a caller chooses both of. No regular expressions: they may take
 * time exponential in the number of stars. Here a star is left for good once what follows it has been found, so
 * that a search costs at most the length of the text times that of the pattern.
 */

/** A set of characters. Those below 256 are looked up, as a set of many ranges would be slow. */
class CharacterClass {
  readonly #negated: boolean;
  readonly #low = new Uint8Array(256);
  readonly #high: [number, number][] = [];

  constructor(negated: boolean) {
    this.#negated = negated;
  }

  add(first: number, last: number): void {
    this.#low.fill(1, Math.min(first, 256), Math.min(last + 1, 256));
    if (last > 255) this.#high.push([first, last]);
  }

  has(code: number): boolean {
    const inside =
      code < 256 ? this.#low[code] === 1 : this.#high.some(([first, last]) => first <= code && code <= last);
    return inside !== this.#negated;
  }
}

/** null: any one character. */
type Token = string | CharacterClass | null;

/** Where a pattern was found: from `start` up to, not including, `end`. */
export interface Found {
  readonly start: number;
  readonly end: number;
}

/** Comparisons that may still be made, so that one request cannot hold everything up. */
export class Work {
  #left: number;

  constructor(comparisons: number) {
    this.#left = comparisons;
  }

  /** Error: WorkError when there is nothing left. */
  spend(comparisons: number): void {
    this.#left -= comparisons;
    if (this.#left < 0) throw new WorkError("patterns and texts are too long to be compared");
  }
}

export class WorkError extends Error {
  override readonly name = "WorkError";
}

function fitsCharacter(token: Token, char: string): boolean {
  if (token === null) return true;
  return typeof token === "string" ? token === char : token.has(char.codePointAt(0)!);
}

/** Texts are lists of characters (code points or, of byte strings, bytes). */
export class Glob {
  /** What is between the stars. */
  readonly #segments: readonly (readonly Token[])[];
  readonly #work: Work;

  private constructor(segments: readonly (readonly Token[])[], work: Work) {
    this.#segments = segments;
    this.#work = work;
  }

  /** Of shell parameters: `*`, `?` and `\x`; all else, also a last backslash, means itself. */
  static shell(pattern: string, work: Work): Glob {
    const chars = Array.from(pattern);
    const segments: Token[][] = [[]];
    for (let i = 0; i < chars.length; i++) {
      const char = chars[i]!;
      if (char === "*") segments.push([]);
      else if (char === "?") segments.at(-1)!.push(null);
      else segments.at(-1)!.push(char === "\\" ? (chars[++i] ?? char) : char);
    }
    return new Glob(segments, work);
  }

  /**
   * A component of a path pattern as Go's path.Match reads it: `*`, `?`, `\x`, `[a-z]`, `[^a]`. Undefined when it is
   * malformed.
   */
  static go(pattern: string): Glob | undefined {
    const chars = Array.from(pattern);
    const segments: Token[][] = [[]];
    let at = 0;
    const member = (): string | undefined => {
      if (chars[at] === "-" || chars[at] === "]") return undefined;
      if (chars[at] === "\\") at += 1;
      return chars[at++];
    };
    while (at < chars.length) {
      const char = chars[at++]!;
      if (char === "*") segments.push([]);
      else if (char === "?") segments.at(-1)!.push(null);
      else if (char === "[") {
        const negated = chars[at] === "^";
        if (negated) at += 1;
        const set = new CharacterClass(negated);
        let empty = true;
        while (empty || chars[at] !== "]") {
          const low = member();
          if (low === undefined) return undefined;
          let high: string | undefined = low;
          if (chars[at] === "-") {
            at += 1;
            high = member();
          }
          if (high === undefined) return undefined;
          set.add(low.codePointAt(0)!, high.codePointAt(0)!);
          empty = false;
        }
        at += 1;
        segments.at(-1)!.push(set);
      } else {
        const literal = char === "\\" ? chars[at++] : char;
        if (literal === undefined) return undefined;
        segments.at(-1)!.push(literal);
      }
    }
    return new Glob(segments, new Work(Number.POSITIVE_INFINITY));
  }

  /** The pattern of the texts read backwards. */
  reversed(): Glob {
    return new Glob(this.#segments.map((segment) => segment.toReversed()).toReversed(), this.#work);
  }

  /** Whether it means the whole text. */
  matches(text: string): boolean {
    const chars = Array.from(text);
    const last = this.#segments.at(-1)!;
    if (this.#segments.length === 1) return chars.length === last.length && this.#fits(last, chars, 0);
    const end = chars.length - last.length;
    const least = this.#chain(chars, 0, this.#segments.length - 1);
    return least !== undefined && least <= end && this.#fits(last, chars, end);
  }

  /** Length of the shortest or longest beginning of the text that it means. */
  prefix(chars: readonly string[], longest: boolean): number | undefined {
    return longest ? this.#longest(chars, 0) : this.#chain(chars, 0, this.#segments.length);
  }

  /** The longest of the first ones that begin at `from` or later. */
  find(chars: readonly string[], from: number): Found | undefined {
    const start = this.#next(this.#segments[0]!, chars, from);
    if (start === undefined) return undefined;
    // What is not to be found behind this beginning is not behind a later one.
    const end = this.#longest(chars, start);
    return end === undefined ? undefined : { start, end };
  }

  /** End of the first `count` segments, the first of them at `start`, each of the others as early as can be. */
  #chain(chars: readonly string[], start: number, count: number): number | undefined {
    const first = this.#segments[0]!;
    if (!this.#fits(first, chars, start)) return undefined;
    let end = start + first.length;
    for (const segment of this.#segments.slice(1, count)) {
      const at = this.#next(segment, chars, end);
      if (at === undefined) return undefined;
      end = at + segment.length;
    }
    return end;
  }

  #longest(chars: readonly string[], start: number): number | undefined {
    const count = this.#segments.length;
    const least = this.#chain(chars, start, count);
    if (least === undefined || count === 1) return least;
    const last = this.#segments[count - 1]!;
    for (let at = chars.length - last.length; at > least - last.length; at--) {
      if (this.#fits(last, chars, at)) return at + last.length;
    }
    return least;
  }

  #next(segment: readonly Token[], chars: readonly string[], from: number): number | undefined {
    for (let at = from; at + segment.length <= chars.length; at++) {
      if (this.#fits(segment, chars, at)) return at;
    }
    return undefined;
  }

  #fits(segment: readonly Token[], chars: readonly string[], at: number): boolean {
    let i = 0;
    if (at + segment.length <= chars.length)
      while (i < segment.length && fitsCharacter(segment[i]!, chars[at + i]!)) i += 1;
    this.#work.spend(i + 1);
    return i === segment.length;
  }
}
