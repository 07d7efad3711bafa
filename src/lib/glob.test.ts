import { expect, test } from "bun:test";
import { Glob, Work, WorkError } from "./glob.ts";

test("components of Go's path patterns", () => {
  const cases: [pattern: string, yes: string[], no: string[]][] = [
    ["", [""], ["a"]],
    ["*", ["", "a", "abc"], []],
    ["a*", ["a", "ab"], ["", "ba"]],
    ["*.so", [".so", "a.so", "a.so.so"], ["a.so.1", "so"]],
    ["a*b*c", ["abc", "axbxc", "abcbc"], ["ac", "abcd", "acb"]],
    ["aa*a", ["aaa", "aaaa"], ["aa"]],
    ["?b?", ["abc", "\u{1f600}bc"], ["ab", "abcd"]],
    ["[a-c][^a-c]x", ["adx", "c.x"], ["aax", "ddx"]],
    ["[ab-]", ["-"], ["c"]],
    ["[\\]^]\\*", ["]*", "^*"], ["]a", "[*"]],
    ["[ä-ö]", ["ä", "å"], ["a", "z"]],
    ["[Ā-ſ]*[^Ā]", ["Āa", "ſſ"], ["Ā", "aa"]],
    ["a.c", ["a.c"], ["abc"]],
  ];
  for (const [pattern, yes, no] of cases) {
    // Go takes no minus that is not escaped.
    const glob = Glob.go(pattern.replace("b-]", "b\\-]"))!;
    for (const text of yes) expect([pattern, text, glob.matches(text)]).toEqual([pattern, text, true]);
    for (const text of no) expect([pattern, text, glob.matches(text)]).toEqual([pattern, text, false]);
  }
  for (const broken of ["[", "[]", "[]a]", "[^]", "[a", "[a-", "[a-]", "[-a]", "[a\\", "a\\"])
    expect([broken, Glob.go(broken)]).toEqual([broken, undefined]);
});

test("stars against what almost fits", () => {
  const text = "a".repeat(255);
  expect(Glob.go(`${"*a".repeat(100)}*b`)!.matches(text)).toBe(false);
  expect(Glob.go(`${"*a".repeat(100)}*`)!.matches(text)).toBe(true);
  expect(Glob.go(`b${"*a".repeat(100)}`)!.matches(text)).toBe(false);
});

test("the same as regular expressions find, for every short pattern and text", () => {
  const all = (alphabet: string, length: number): string[] =>
    length === 0
      ? [""]
      : ["", ...all(alphabet, length - 1).flatMap((rest) => [...alphabet].map((c) => c + rest))];
  const texts = [...new Set(all("ab", 5))];
  for (const pattern of new Set(all("ab*?", 4))) {
    const glob = Glob.shell(pattern, new Work(1e9));
    const source = (star: string) => pattern.replaceAll("?", ".").replaceAll("*", star);
    const whole = new RegExp(`^${source(".*")}$`);
    const [shortest, longest, any] = [
      new RegExp(`^${source(".*?")}`),
      new RegExp(`^${source(".*")}`),
      new RegExp(source(".*")),
    ];
    for (const text of texts) {
      const chars = [...text];
      const [found, match] = [glob.find(chars, 0), any.exec(text)];
      const starts = chars
        .map((_, i) => i)
        .concat(chars.length)
        .filter((at) => whole.test(text.slice(at)));
      const backwards = [...chars].reverse();
      expect([
        pattern,
        text,
        glob.matches(text),
        glob.prefix(chars, false),
        glob.prefix(chars, true),
        glob.reversed().prefix(backwards, false),
        glob.reversed().prefix(backwards, true),
        found && [found.start, found.end],
      ]).toEqual([
        pattern,
        text,
        whole.test(text),
        shortest.exec(text)?.[0].length,
        longest.exec(text)?.[0].length,
        starts.length === 0 ? undefined : text.length - starts.at(-1)!,
        starts.length === 0 ? undefined : text.length - starts[0]!,
        match === null ? undefined : [match.index, match.index + match[0].length],
      ]);
    }
  }
});

test("a search ends when its work is used up", () => {
  const glob = Glob.shell(`${"a".repeat(500)}b`, new Work(10_000));
  expect(() => glob.find(Array.from("a".repeat(1000)), 0)).toThrow(WorkError);
});
