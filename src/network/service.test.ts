import { test } from "bun:test";
import { join } from "node:path";
import { lackingForNamespaces, runNetnsSuite } from "../../tests/support/netns-suite.ts";

const lacking = lackingForNamespaces("tcpdump");
if (lacking !== "") console.warn(`skipped: network tests in real namespaces: ${lacking}`);

test.skipIf(lacking !== "")(
  "network slots in real namespaces",
  () => runNetnsSuite(join(import.meta.dir, "service.netns.ts")),
  90_000,
);

test.skipIf(lacking !== "")(
  "egress policies in real namespaces",
  () => runNetnsSuite(join(import.meta.dir, "policy.netns.ts")),
  180_000,
);

test.skipIf(lacking !== "")(
  "hostile guests and other firewalls in real namespaces",
  () => runNetnsSuite(join(import.meta.dir, "hostile.netns.ts")),
  180_000,
);
