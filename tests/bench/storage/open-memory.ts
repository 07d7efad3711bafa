/**
 * Memory that a process needs to have an image open: `open-memory.ts LAYERS [INDEX-CACHE]`, LAYERS the paths of its
 * layers, one a line. Prints bytes per mapping. A process of its own, since what others left shows in RSS.
 */
import { readFileSync } from "node:fs";
import { openStack } from "../../../src/storage/overlaybd/index.ts";

const [list, directory] = process.argv.slice(2);
if (list === undefined) throw new Error("usage: open-memory.ts LAYERS [INDEX-CACHE]");
const lowers = readFileSync(list, "utf8")
  .trim()
  .split("\n")
  .map((file) => ({ file }));
// Code and file descriptors of all that follows are there before.
openStack({ lowers: lowers.slice(0, 1) })[Symbol.dispose]();
Bun.gc(true);
const before = process.memoryUsage().rss;
using stack = openStack({ lowers }, directory === undefined ? {} : { indexCache: { directory } });
Bun.gc(true);
const taken = process.memoryUsage().rss - before;
console.log((taken / stack.stats().lowerMappings).toFixed(1));
