// biome-ignore-all lint/suspicious/noTemplateCurlyInString: these are words of Dockerfiles.
import { describe, expect, test } from "bun:test";
import { expandWord, literalWord, splitWords, WordError } from "./dockerfile-words.ts";

const SET: Readonly<Record<string, string>> = {
  A: "one",
  EMPTY: "",
  P: "/usr/lib:/usr/lib64",
  F: "a.tar.gz",
  D: "x-y",
};
const expand = (word: string) => expandWord(word, (name) => SET[name]);

describe("variables", () => {
  const cases: [string, string][] = [
    ["plain", "plain"],
    ["$A-${A}b", "one-oneb"],
    ["$Ab|$NONE|${NONE}", "||"],
    ["${A:-x} ${NONE:-x} ${EMPTY:-x} ${EMPTY-x} ${NONE-x}", "one x x  x"],
    ["${A:+y} ${NONE:+y} ${EMPTY:+y} ${EMPTY+y}", "y   y"],
    ["${NONE:-${A}/$A}", "one/one"],
    ["${NONE:-'a}b'}", "a}b"],
    ["\\$A \\\\ \\x", "$A \\ x"],
    ['\'$A\' "$A" "\\$A" "a\\b"', "$A one $A a\\b"],
    ["\"it's\" 'a\"b'", "it's a\"b"],
    ["cost: 5$ $ $/", "cost: 5$ $ $/"],
    ["${P#*/} ${P##*/}", "usr/lib:/usr/lib64 lib64"],
    ["${F%.*} ${F%%.*} ${D%-*} ${D//-/+}", "a.tar a x x+y"],
    ["${P/lib/x} ${P//lib/x}", "/usr/x:/usr/lib64 /usr/x:/usr/x64"],
    ["$1 $@", " "],
  ];
  for (const [word, result] of cases) test(word, () => expect(expand(word)).toBe(result));

  test("what cannot be expanded says why", () => {
    expect(() => expand("${NONE:?give me NONE}")).toThrow(new WordError("NONE: give me NONE"));
    expect(() => expand("${EMPTY:?}")).toThrow("EMPTY: is not set");
    expect(() => expand("${A")).toThrow(/brace is not closed/);
    expect(() => expand("${}")).toThrow(/not a variable/);
    expect(() => expand("${A!x}")).toThrow(/unknown form/);
    expect(() => expand("'a")).toThrow(/single quote is not closed/);
    expect(() => expand('"a')).toThrow(/double quote is not closed/);
  });

  test("a back quote as the escape character; here-documents keep quotes", () => {
    expect(expandWord("C:\\dir `$A", (name) => SET[name], { escape: "`" })).toBe("C:\\dir $A");
    const text = "say \"$A\" 'and' \\$A \\n ${NONE:-q}\n";
    expect(expandWord(text, (name) => SET[name], { keepQuotes: true })).toBe("say \"one\" 'and' $A \\n q\n");
  });

  test("a literal word means itself", () => {
    for (const text of ["", "a b", "$A", "it's", '"', "\\", "`", "{}", "\n"]) {
      expect(expand(literalWord(text))).toBe(text);
      expect(splitWords(literalWord(text), "\\")).toHaveLength(1);
    }
  });
});

test("words are split at white space outside quotes and escapes", () => {
  expect(splitWords("  a  b\tc ", "\\")).toEqual(["a", "b", "c"]);
  expect(splitWords("k=\"a b\" l='c d' m=e\\ f", "\\")).toEqual(['k="a b"', "l='c d'", "m=e\\ f"]);
  expect(splitWords("a=C:\\ b", "`")).toEqual(["a=C:\\", "b"]);
  expect(splitWords("", "\\")).toEqual([]);
});
