import { expect, test } from "bun:test";
import pino from "pino";
import { serveMetrics } from "./metrics.ts";
import type { BlockdStats } from "./protocol.ts";

const stats = (): Promise<BlockdStats> => Promise.reject(new Error("nobody asks"));

test("an address that another daemon has costs the metrics alone, and the warning names the key to change", () => {
  const lines: { level: number; msg: string }[] = [];
  const log = pino({}, { write: (line: string) => lines.push(JSON.parse(line)) });
  using taken = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: () => new Response("other") });
  const port = taken.port!;
  using _metrics = serveMetrics({ hostname: "127.0.0.1", port }, stats, log);
  expect(lines.map(({ level }) => level)).toEqual([pino.levels.values.warn!]);
  expect(lines[0]!.msg).toContain(`127.0.0.1:${port} cannot be had (EADDRINUSE)`);
  expect(lines[0]!.msg).toContain(
    "set ublk.daemon_metrics_listen_addr (or AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR)",
  );
});
