import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { BufferPool } from "./pool.ts";
import { serveNbd } from "./server.ts";
import { clientFlags, RawClient } from "./testing.ts";
import type { NbdEvent, NbdTarget } from "./types.ts";

const dir = mkdtempSync("/tmp/blockd-nbd-");
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const zeros: NbdTarget = {
  exportName: "zeros",
  sizeBytes: 1 << 20,
  readOnly: true,
  tryRead(_, into) {
    into.fill(0);
    return true;
  },
  async read(_, into) {
    into.fill(0);
  },
  write: () => undefined,
  trim: () => undefined,
  writeZeroes: () => undefined,
  flush: async () => undefined,
  extents: (_, lengthBytes) => [{ lengthBytes, kind: "hole" }],
};

test("a client that does not finish its handshake is cut off, one that has is not", async () => {
  const events: NbdEvent[] = [];
  const socketPath = join(dir, "slow.sock");
  // Left by an earlier process.
  writeFileSync(socketPath, "");
  using served = serveNbd({
    socketPath,
    target: zeros,
    pool: new BufferPool(),
    onEvent: (event) => events.push(event),
    handshakeTimeoutMs: 1000,
  });
  expect(statSync(socketPath).isSocket()).toBe(true);
  using good = await RawClient.open(socketPath, "zeros");
  using silent = await RawClient.connect(socketPath);
  silent.send(clientFlags());
  await silent.untilClosed();
  expect(events).toMatchObject([{ kind: "protocol_error" }]);
  expect((await good.read(1, 0, 512)).length).toBe(512);
  expect(served.connections).toBe(1);
});

test("disposing ends every connection and removes the socket, twice is once", async () => {
  const socketPath = join(dir, "gone.sock");
  const served = serveNbd({ socketPath, target: zeros, pool: new BufferPool(), onEvent: () => undefined });
  using client = await RawClient.open(socketPath, "");
  served[Symbol.dispose]();
  served[Symbol.dispose]();
  await client.untilClosed();
  expect(served.connections).toBe(0);
  expect(existsSync(socketPath)).toBe(false);
});
