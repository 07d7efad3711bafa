import type { Logger } from "../lib/log.ts";
import type { Orchestrator } from "../orchestrator/types.ts";
import type { DataSource } from "./classify.ts";
import type { SignedUrls } from "./signed.ts";

export interface FrontOptions {
  readonly hostname: string;
  readonly port: number;
  /** Sandbox host domains, lower case. */
  readonly domains: readonly string[];
  readonly apiKeys: readonly string[];
  readonly control: {
    handle(request: Request): Promise<Response>;
    hasPath(path: string): boolean;
    /** True when the answer to a request reads the body as it arrives. Absent: all bodies are collected. */
    streamsBody?(method: string, path: string): boolean;
  };
  readonly orchestrator: Pick<
    Orchestrator,
    "access" | "accessToken" | "trafficToken" | "route" | "autoResume" | "get" | "list"
  >;
  /** Told of every finished data-plane exchange. */
  readonly onExchange?: (exchange: ExchangeReport) => void;
  readonly log: Logger;
  readonly limits?: Partial<FrontLimits>;
}

export interface ExchangeReport {
  readonly source: DataSource;
  readonly method: string;
  /** What the client got; 499 when it went away before there was an answer. */
  readonly status: number;
  readonly seconds: number;
}

export interface FrontLimits {
  /** A client that does not finish its request head. */
  readonly headMs: number;
  /** An idle keep-alive connection. */
  readonly idleMs: number;
  /** A client that does not close after its last answer. */
  readonly lingerMs: number;
  readonly connectMs: number;
  /** Request body without a byte. */
  readonly bodyIdleMs: number;
  /** From the end of the request body to the response head. */
  readonly responseHeadMs: number;
  /** A peer that takes nothing of what waits for it: a service the request body, one end of a tunnel the last bytes. */
  readonly stallMs: number;
  readonly autoResumeMs: number;
  readonly maxConnections: number;
  /** Exchanges with one sandbox at a time. */
  readonly maxPerSandbox: number;
  readonly maxControlBodyBytes: number;
}

export const DEFAULT_LIMITS: FrontLimits = {
  headMs: 30_000,
  idleMs: 75_000,
  lingerMs: 5_000,
  connectMs: 5_000,
  bodyIdleMs: 30_000,
  responseHeadMs: 30_000,
  stallMs: 300_000,
  autoResumeMs: 60_000,
  maxConnections: 20_000,
  maxPerSandbox: 4096,
  maxControlBodyBytes: 8 * 1024 * 1024,
};

/** What all connections of a listener share. */
export interface Shared {
  readonly options: FrontOptions;
  readonly limits: FrontLimits;
  readonly signedUrls: SignedUrls;
  /** Exchanges under way by sandbox. */
  readonly perSandbox: Map<string, number>;
  stopping: boolean;
}
