import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { connectBlockd } from "./client.ts";
import { encodeFrame, FrameDecoder } from "./framing.ts";

test("a daemon that greets and then drops every call is asked again, with pauses", async () => {
  const directory = mkdtempSync("/tmp/blockd-client-");
  let dropped = 0;
  const server = Bun.listen<FrameDecoder>({
    unix: `${directory}/socket`,
    socket: {
      open(socket) {
        socket.data = new FrameDecoder();
      },
      data(socket, chunk) {
        for (const message of socket.data.feed(chunk)) {
          const { id, op } = message as { id: number; op: string };
          if (op === "hello") {
            socket.write(encodeFrame({ id, ok: true, result: null }));
          } else {
            dropped++;
            socket.terminate();
          }
        }
      },
    },
  });
  try {
    const patienceMs = 600;
    await using client = await connectBlockd(`${directory}/socket`, { connectPatienceMs: patienceMs });
    const refusal = await client.flush("any").catch((error: unknown) => error);
    expect(refusal).toMatchObject({ code: "blockd_unavailable" });
    expect(dropped).toBeGreaterThan(1);
    // 50 ms apart; without a pause it would be thousands.
    expect(dropped).toBeLessThan(30);
  } finally {
    server.stop(true);
    rmSync(directory, { recursive: true, force: true });
  }
});
