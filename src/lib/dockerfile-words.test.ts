// biome-ignore-all lint/suspicious/noTemplateCurlyInString: these are words of Dockerfiles.
import { describe, expect, test } from "bun:test";
import { expandWord, literalWord, splitWords, WordError } from "./dockerfile-words.ts";

const SET: Readonly<Record<string, string>> = {
  A: "one",
  EMPTY: "",
  P: "/usr/lib:/usr/lib64",
  F: "a.tar.gz",
  D: "x-y",
  U: "\u{1f600}b",
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
    [
      "${P#/*/} ${P##*x} ${P%/*} ${P%%/*}|${P%x}",
      "lib:/usr/lib64 /usr/lib:/usr/lib64 /usr/lib:/usr |/usr/lib:/usr/lib64",
    ],
    ["${P/u*l/x} ${P//u?r/x} ${P/*/x} ${P//*/x}", "/xib64 /x/lib:/x/lib64 x x"],
    ["${EMPTY/*/x} ${EMPTY//a/x}${EMPTY#*}${EMPTY%%*} ${U#?} ${U%%?} ${U/?/[$&]}", "x  b \u{1f600} [$&]b"],
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

  test("patterns take no time that grows with their stars, and what would take long is refused", () => {
    const values: Readonly<Record<string, string>> = { X: "a".repeat(100_000), S: "a".repeat(1000) };
    const long = (word: string) => expandWord(word, (name) => values[name]);
    for (const form of ["//*S", "/S", "#S", "##S", "%S", "%%S"]) {
      const slash = form.startsWith("/") ? "/" : "";
      const stars = form.replace("S", `${"*a".repeat(20)}${form.startsWith("%") ? "b*a*" : "*b"}`);
      expect(long(`\${X${stars}${slash}}`)).toBe(values.X!);
    }
    expect(() => long("${X//${S}b/}")).toThrow(/patterns of a word take too long/);
    expect(() => long(`${"${X//b/}".repeat(50)}`)).toThrow(WordError);
  });

  test("a value grows to 128 KiB and no further", () => {
    const values: Readonly<Record<string, string>> = { X: "ä".repeat(1 << 14), Y: "b".repeat(1 << 17) };
    const long = (word: string) => expandWord(word, (name) => values[name]);
    expect(Buffer.byteLength(long("$X$X$X$X"))).toBe(1 << 17);
    for (const word of ["$X$X$X$X.", "$Y$Y", '"$Y$Y"', "${N:-$Y.}", "${X//?/$Y}", "$Y."])
      expect(() => long(word)).toThrow(/longer than 131072 bytes .* keep texts of that size in a file/);
    expect(expandWord("$Y$Y", (name) => values[name], { keepQuotes: true })).toHaveLength(1 << 18);
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
