/**
 * What failed in a run of `bun test --parallel`, from its JUnit report: what workers print arrives in any order, so
 * the log does not tell which file an error belongs to.
 *
 *   bun scripts/test-report.ts SUITE REPORT.xml FAILED ERRORS FILE...
 *
 * FAILED and ERRORS are the counts of the run's last lines, FILE the files it was given. Prints, for each failure, a
 * line `SUITE: name` with its error below; and writes REPORT.xml.files, the failed files, one a line, but only where
 * every failure and error belongs to one of them.
 */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { normalize } from "node:path";

interface Failure {
  readonly file: string;
  /** The test's name, with those of the groups around it. */
  readonly name: string;
  readonly why: string;
}

const ENTITIES: Readonly<Record<string, string>> = { lt: "<", gt: ">", quot: '"', apos: "'", amp: "&" };

function decoded(text: string): string {
  return text.replaceAll(/&(?:#x([0-9a-f]+)|#(\d+)|(\w+));/gi, (all, hex, decimal, name) => {
    if (name !== undefined) return ENTITIES[name] ?? all;
    return String.fromCodePoint(hex === undefined ? Number(decimal) : Number.parseInt(hex, 16));
  });
}

function attribute(tag: string, name: string): string {
  return decoded(new RegExp(`\\b${name}="([^"]*)"`).exec(tag)?.[1] ?? "");
}

/** Of bun's report: `<testcase name classname file><failure type message>text</failure></testcase>`. */
function failures(report: string): Failure[] {
  const found: Failure[] = [];
  for (const [, tag, inside] of report.matchAll(/<testcase\b([^>]*[^/])>(.*?)<\/testcase>/gs)) {
    const failure = /<failure\b([^>]*)>/.exec(inside!)?.[1];
    if (failure === undefined) continue;
    const groups = attribute(tag!, "classname").split(" > ").filter(Boolean).reverse(); // innermost first
    const [file, name] = [attribute(tag!, "file"), attribute(tag!, "name")];
    const why = `${attribute(failure, "type") || "Error"}: ${attribute(failure, "message")}`;
    found.push({
      file,
      name: name === "(worker crashed)" ? `${file} ${name}` : [...groups, name].join(" > "),
      why,
    });
  }
  return found;
}

const [suite, path, failedText, errorsText, ...given] = process.argv.slice(2);
if (suite === undefined || path === undefined)
  throw new Error("usage: test-report.ts SUITE REPORT.xml FAILED ERRORS FILE...");
if (existsSync(path)) {
  const report = readFileSync(path, "utf8");
  const found = failures(report);
  const told = new Set(
    [...report.matchAll(/<testsuite\b[^>]*\bfile="([^"]*)"/g)].map((match) => decoded(match[1]!)),
  );
  const missing = given.map((file) => normalize(file)).filter((file) => !told.has(file));
  for (const { name, why } of found) {
    const lines = why.split("\n").filter((line) => line.trim() !== "");
    console.log(
      [`${suite}: ${name}`, ...lines.slice(0, 12).map((line) => `    ${line.slice(0, 400)}`)].join("\n"),
    );
  }
  for (const file of missing) console.log(`${suite}: ${file} (could not be loaded)`);
  const others = Number(errorsText) - missing.length;
  if (others > 0) console.log(`${suite}: ${others} errors between tests ("# Unhandled error" above)`);
  if (others === 0 && found.length + missing.length === Number(failedText))
    writeFileSync(
      `${path}.files`,
      [...new Set([...found.map(({ file }) => file), ...missing, ""])].join("\n"),
    );
}
