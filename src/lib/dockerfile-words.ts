/**
 * Words of Dockerfile instructions: how they are split, and how variables in them are replaced. The rules are
 * those of the Dockerfile reference ("Environment replacement", "Parser directives"): quotes as in a shell,
 * `$name`, `${name}` with `:-` `-` `:+` `+` `:?` `?` `#` `##` `%` `%%` `/` `//`.
 */

import { Glob, Work, WorkError } from "./glob.ts";

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

/** Of one value: what Linux takes as one argument or variable of a program. */
const MAX_VALUE_BYTES = 128 * 1024;
/** Of a here-document. */
const MAX_TEXT_BYTES = 16 * 1024 * 1024;
/** Of the patterns of one word: some 20 ms. */
const MAX_COMPARISONS = 1 << 22;

function tooLong(maxBytes: number): WordError {
  return new WordError(
    `a value becomes longer than ${maxBytes} bytes with its variables replaced: keep texts of that size in a file`,
  );
}

class Expander {
  readonly #text: string;
  readonly #lookup: Lookup;
  readonly #escape: EscapeCharacter;
  readonly #keepQuotes: boolean;
  readonly #maxBytes: number;
  readonly #work = new Work(MAX_COMPARISONS);
  #at = 0;

  constructor(text: string, lookup: Lookup, escapeCharacter: EscapeCharacter, keepQuotes: boolean) {
    this.#text = text;
    this.#lookup = lookup;
    this.#escape = escapeCharacter;
    this.#keepQuotes = keepQuotes;
    this.#maxBytes = keepQuotes ? MAX_TEXT_BYTES : MAX_VALUE_BYTES;
  }

  all(): string {
    try {
      const out = this.#until("");
      if (Buffer.byteLength(out) > this.#maxBytes) throw tooLong(this.#maxBytes);
      return out;
    } catch (error) {
      if (!(error instanceof WorkError)) throw error;
      throw new WordError(
        "the patterns of a word take too long to be found: use shorter ones, or a RUN step",
      );
    }
  }

  /** Up to the first unquoted character of `stops`, which is not taken. */
  #until(stops: string): string {
    let out = "";
    while (this.#at < this.#text.length) {
      const char = this.#text[this.#at]!;
      if (stops.includes(char)) break;
      if (char === "$") out = this.#bounded(out + this.#dollar());
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
        out = this.#bounded(out + this.#dollar());
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
      return pattern === ""
        ? (value ?? "")
        : this.#replaced(value ?? "", pattern, replacement, operator === "//");
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
        return this.#withoutPrefix(value ?? "", word, operator === "##");
      default:
        return this.#withoutSuffix(value ?? "", word, operator === "%%");
    }
  }

  #characters(value: string): string[] {
    this.#work.spend(value.length);
    return Array.from(value);
  }

  #replaced(value: string, pattern: string, replacement: string, all: boolean): string {
    const glob = Glob.shell(pattern, this.#work);
    const chars = this.#characters(value);
    let out = "";
    let at = 0;
    do {
      const found = glob.find(chars, at);
      if (found === undefined) break;
      out = this.#bounded(out + chars.slice(at, found.start).join("") + replacement);
      at = found.end;
    } while (all && at < chars.length);
    return out + chars.slice(at).join("");
  }

  #withoutPrefix(value: string, pattern: string, longest: boolean): string {
    const chars = this.#characters(value);
    const length = Glob.shell(pattern, this.#work).prefix(chars, longest) ?? 0;
    return chars.slice(length).join("");
  }

  #withoutSuffix(value: string, pattern: string, longest: boolean): string {
    const chars = this.#characters(value);
    const length = Glob.shell(pattern, this.#work).reversed().prefix(chars.toReversed(), longest) ?? 0;
    return chars.slice(0, chars.length - length).join("");
  }

  #bounded(text: string): string {
    if (text.length > this.#maxBytes) throw tooLong(this.#maxBytes);
    return text;
  }
}

/**
 * One word with its variables replaced and its quotes taken away. With `keepQuotes` (texts of here-documents)
 * quotes are ordinary characters and only `\$` is an escape. Errors: WordError, also for a result of more than
 * 128 KiB (16 MiB with `keepQuotes`) and for patterns that would take long to be found.
 */
export function expandWord(
  word: string,
  lookup: Lookup,
  options: { readonly escape?: EscapeCharacter; readonly keepQuotes?: boolean } = {},
): string {
  return new Expander(word, lookup, options.escape ?? "\\", options.keepQuotes === true).all();
}
