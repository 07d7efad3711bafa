import { test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { lackingForNamespaces, runNetnsSuite } from "../support/netns-suite.ts";

const lacking = existsSync("/dev/loop-control")
  ? lackingForNamespaces("losetup", "mkfs.ext4", "busybox", "pivot_root")
  : "needs /dev/loop-control";
if (lacking !== "") console.warn(`skipped, ${lacking}: file systems held still`);

test.skipIf(lacking !== "")(
  "file systems held still",
  () => runNetnsSuite(join(import.meta.dir, "hold.netns.ts")),
  120_000,
);
