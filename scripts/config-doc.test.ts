import { expect, test } from "bun:test";
import packagedFile from "../config/default.toml" with { type: "text" };
import { describeKeys } from "../src/config/index.ts";
import { sections } from "./config-doc.ts";

test("every key has a comment of its own, never its neighbour's", () => {
  const keys = sections(packagedFile).flatMap((section) => section.keys);
  expect(keys.map(({ name }) => name).sort()).toEqual(
    describeKeys()
      .map(({ name }) => name)
      .sort(),
  );
  expect(keys.filter(({ about }) => about.trim() === "")).toEqual([]);
  const start = "# ---- part ---------\n\n[table]\n# About one.\none = 1\n";
  expect(sections(`${start}\n# About two.\n# two = 2\n`)[0]!.keys).toEqual([
    { name: "table.one", about: "About one." },
    { name: "table.two", about: "About two." },
  ]);
  for (const second of ["two = 2", "# two = 2", "\ntwo = 2", "\n# ---- more ------\n\ntwo = 2"]) {
    expect(() => sections(`${start}${second}\n`)).toThrow(
      "config/default.toml says nothing about table.two: put a comment above it",
    );
  }
});
