/**
 * Words of Dockerfile instructions: how they are split, and how variables in them are replaced. The rules are
 * those of the Dockerfile reference ("Environment replacement", "Parser directives"): quotes as in a shell,
 * `$name`, `${name}` with `:-` `-` `:+` `+` `:?` `?` `#` `##` `%` `%%` `/` `//`.
 */

export type EscapeCharacter = "\\" | "`";

/** Value of a variable; undefined when it is not set. */
export type Lookup = (name: string) => string | undefined;

/** A word that cannot be expanded; the message is for the author of the Dockerfile. */
export class WordError extends Error {
  override readonly name = "WordError";
}

const SPACE = /\s/;

/** Raw words, quotes and escapes still in them. An unclosed quote takes the rest. */
export function splitWords(text: string, escapeCharacter: EscapeCharacter): string[] {
  const words: string[] = [];
  let word: string | undefined;
  let quote = "";
  for (let i = 0; i < text.length; i++) {
    const char = text[i]!;
    if (quote === "" && SPACE.test(char)) {
      if (word !== undefined) words.push(word);
      word = undefined;
      continue;
    }
    word = (word ?? "") + char;
    if (char === escapeCharacter && quote !== "'" && i + 1 < text.length) {
      i += 1;
      word += text[i]!;
    } else if (quote === "" && (char === "'" || char === '"')) {
      quote = char;
    } else if (char === quote) {
      quote = "";
    }
  }
  if (word !== undefined) words.push(word);
  return words;
}

/** A word that expands to exactly this text. */
export function literalWord(text: string): string {
  return text === "" ? "''" : `'${text.replaceAll("'", `'"'"'`)}'`;
}

class Expander {
  readonly #text: string;
  readonly #lookup: Lookup;
  readonly #escape: EscapeCharacter;
  readonly #keepQuotes: boolean;
  #at = 0;

  constructor(text: string, lookup: Lookup, escapeCharacter: EscapeCharacter, keepQuotes: boolean) {
    this.#text = text;
    this.#lookup = lookup;
    this.#escape = escapeCharacter;
    this.#keepQuotes = keepQuotes;
  }

  all(): string {
    return this.#until("");
  }

  /** Up to the first unquoted character of `stops`, which is not taken. */
  #until(stops: string): string {
    let out = "";
    while (this.#at < this.#text.length) {
      const char = this.#text[this.#at]!;
      if (stops.includes(char)) break;
      if (char === "$") out += this.#dollar();
      else if (char === "'" && !this.#keepQuotes) out += this.#singleQuoted();
      else if (char === '"' && !this.#keepQuotes) out += this.#doubleQuoted();
      else {
        this.#at += 1;
        if (char !== this.#escape) out += char;
        else if (this.#keepQuotes && this.#text[this.#at] !== "$") out += char;
        else out += this.#text[this.#at++] ?? "";
      }
    }
    return out;
  }

  #singleQuoted(): string {
    const end = this.#text.indexOf("'", this.#at + 1);
    if (end < 0) throw new WordError(`a single quote is not closed in ${this.#text}`);
    const inside = this.#text.slice(this.#at + 1, end);
    this.#at = end + 1;
    return inside;
  }

  #doubleQuoted(): string {
    let out = "";
    this.#at += 1;
    for (;;) {
      const char = this.#text[this.#at];
      if (char === undefined) throw new WordError(`a double quote is not closed in ${this.#text}`);
      if (char === '"') {
        this.#at += 1;
        return out;
      }
      if (char === "$") {
        out += this.#dollar();
        continue;
      }
      this.#at += 1;
      if (char === this.#escape) {
        const next = this.#text[this.#at];
        // Only what would be special loses its escape.
        if (next === '"' || next === "$" || next === this.#escape) {
          out += next;
          this.#at += 1;
          continue;
        }
      }
      out += char;
    }
  }

  #name(): string {
    const match = /^(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?!$-])/.exec(this.#text.slice(this.#at));
    this.#at += match?.[0].length ?? 0;
    return match?.[0] ?? "";
  }

  #dollar(): string {
    this.#at += 1;
    if (this.#text[this.#at] !== "{") {
      const name = this.#name();
      return name === "" ? "$" : (this.#lookup(name) ?? "");
    }
    this.#at += 1;
    const name = this.#name();
    if (name === "") throw new WordError(`not a variable: ${this.#text}`);
    const value = this.#lookup(name);
    const result = this.#modified(name, value);
    if (this.#text[this.#at] !== "}") throw new WordError(`a brace is not closed in ${this.#text}`);
    this.#at += 1;
    return result;
  }

  #modified(name: string, value: string | undefined): string {
    const rest = this.#text.slice(this.#at);
    if (rest.startsWith("}") || rest === "") return value ?? "";
    const operator = /^(?::?[-+?]|##?|%%?|\/\/?)/.exec(rest)?.[0];
    if (operator === undefined) throw new WordError(`unknown form of $\{${name}...} in ${this.#text}`);
    this.#at += operator.length;
    if (operator.startsWith("/")) {
      const pattern = this.#until("/}");
      if (this.#text[this.#at] !== "/") throw new WordError(`\${${name}/...} lacks its second slash`);
      this.#at += 1;
      const replacement = this.#until("}");
      const found = new RegExp(patternSource(pattern, true), operator === "//" ? "gsu" : "su");
      return pattern === "" ? (value ?? "") : (value ?? "").replace(found, () => replacement);
    }
    const word = this.#until("}");
    const counts = operator.startsWith(":") ? value !== undefined && value !== "" : value !== undefined;
    switch (operator.at(-1)) {
      case "-":
        return counts ? value! : word;
      case "+":
        return counts ? word : "";
      case "?":
        if (!counts) throw new WordError(`${name}: ${word === "" ? "is not set" : word}`);
        return value!;
      case "#":
        return (value ?? "").replace(new RegExp(`^(?:${patternSource(word, operator === "##")})`, "su"), "");
      default:
        return withoutSuffix(value ?? "", word, operator === "%%");
    }
  }
}

function withoutSuffix(value: string, pattern: string, longest: boolean): string {
  const whole = new RegExp(`^(?:${patternSource(pattern, true)})$`, "su");
  const starts = Array.from({ length: value.length + 1 }, (_, i) => i);
  const start = (longest ? starts : starts.toReversed()).find((at) => whole.test(value.slice(at)));
  return start === undefined ? value : value.slice(0, start);
}

/** A shell pattern (`*`, `?`, escapes) as the source of a regular expression. */
function patternSource(pattern: string, greedy: boolean): string {
  let source = "";
  for (let i = 0; i < pattern.length; i++) {
    let char = pattern[i]!;
    if (char === "*") source += greedy ? ".*" : ".*?";
    else if (char === "?") source += ".";
    else {
      if (char === "\\" && i + 1 < pattern.length) char = pattern[++i]!;
      source += char.replace(/[\\^$.*+?()[\]{}|/]/u, "\\$&");
    }
  }
  return source;
}

/**
 * One word with its variables replaced and its quotes taken away. With `keepQuotes` (texts of here-documents)
 * quotes are ordinary characters and only `\$` is an escape. Errors: WordError.
 */
export function expandWord(
  word: string,
  lookup: Lookup,
  options: { readonly escape?: EscapeCharacter; readonly keepQuotes?: boolean } = {},
): string {
  return new Expander(word, lookup, options.escape ?? "\\", options.keepQuotes === true).all();
}
