import http from "node:http";
import { z } from "zod";
import { AGENT_PORT } from "../sandbox/types.ts";
import type { SandboxMetric } from "./types.ts";

const MAX_BYTES = 64 * 1024;

const bytes = z.number().nonnegative();
const AgentMetrics = z.object({
  cpu_count: z.number().nonnegative(),
  cpu_used_pct: z.number().nonnegative(),
  mem_total: bytes,
  mem_used: bytes,
  mem_cache: bytes.default(0),
  disk_used: bytes,
  disk_total: bytes,
});

/** Where a guest agent is reached, and with what. */
export interface AgentTarget {
  /** `host` (the agent's own port) or `host:port`. */
  readonly address: string;
  readonly token?: string;
}

function get(target: AgentTarget, path: string, timeoutMs: number): Promise<string> {
  const [host, port] = target.address.split(":");
  return new Promise((resolve, reject) => {
    const request = http.request(
      {
        host,
        port: port ?? AGENT_PORT,
        path,
        // A pooled connection could belong to an earlier life of the VM.
        agent: false,
        headers: {
          Connection: "close",
          ...(target.token === undefined ? {} : { "X-Access-Token": target.token }),
        },
        signal: AbortSignal.timeout(timeoutMs),
      },
      (response) => {
        const parts: Buffer[] = [];
        let size = 0;
        response.on("data", (chunk: Buffer) => {
          size += chunk.length;
          parts.push(chunk);
          if (size > MAX_BYTES) request.destroy(new Error(`the answer is larger than ${MAX_BYTES} bytes`));
        });
        response.on("error", reject);
        response.on("end", () => {
          const text = Buffer.concat(parts).toString("utf8");
          if (response.statusCode === 200) resolve(text);
          else reject(new Error(`the agent answered ${response.statusCode}: ${text.slice(0, 200)}`));
        });
      },
    );
    request.on("error", reject);
    request.end();
  });
}

/** Asks a guest agent for its resource use (`GET /metrics`). Rejects when it does not answer in time. */
export async function readAgentMetrics(target: AgentTarget, timeoutMs: number): Promise<SandboxMetric> {
  const parsed = AgentMetrics.parse(JSON.parse(await get(target, "/metrics", timeoutMs)));
  return {
    // A guest's clock is the guest's affair; points of one sandbox are compared with the host's.
    atMs: Date.now(),
    cpuUsedPct: Math.min(100, parsed.cpu_used_pct),
    cpuCount: parsed.cpu_count,
    memUsed: parsed.mem_used,
    memTotal: parsed.mem_total,
    memCache: parsed.mem_cache,
    diskUsed: parsed.disk_used,
    diskTotal: parsed.disk_total,
  };
}
