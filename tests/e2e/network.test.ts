import { test } from "bun:test";
import { join } from "node:path";
import { lackingForNamespaces, runNetnsSuite } from "../support/netns-suite.ts";
import { testDeps } from "../support/real-node.ts";

const lacking =
  lackingForNamespaces("tcpdump", "musl-gcc", "busybox", "mke2fs") ||
  (testDeps() === undefined ? "needs kernel and QEMU (agentenv setup)" : "");
if (lacking !== "") console.warn(`skipped: policies of real guests: ${lacking}`);

test.skipIf(lacking !== "")(
  "policies of real guests, on every way a guest can start",
  async () => {
    await runNetnsSuite(join(import.meta.dir, "network.netns.ts"));
  },
  600_000,
);
