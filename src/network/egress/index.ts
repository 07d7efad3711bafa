import { networkInterfaces } from "node:os";
import { AenvError } from "../../lib/errors.ts";
import { formatIpv4, parseIpv4 } from "../../lib/ipv4.ts";
import type { Logger } from "../../lib/log.ts";
import { inRanges, mergeRanges } from "../egress-policy.ts";
import { type GuestLedger, Ledgers } from "./ledger.ts";
import { NameServer, type NameServerCounters } from "./name-server.ts";
import { Names } from "./names.ts";
import { EgressProxy, PROXY_LIMITS, type ProxyCounters, type ProxyLimits } from "./proxy.ts";
import type { FindGuest } from "./types.ts";

export type { GuestLedger } from "./ledger.ts";
export type { ProxyLimits } from "./proxy.ts";
export type { FindGuest, GuestView } from "./types.ts";

export interface EgressOptions {
  /** Host byte order; must be an address of this host. */
  readonly address: number;
  readonly dnsServer: string;
  readonly deniedCidrs: readonly string[];
  readonly findGuest: FindGuest;
  readonly log: Logger;
  readonly proxyLimits?: Partial<ProxyLimits>;
}

/** The two servers behind the host's diverting rules. */
export interface Egress extends Disposable {
  readonly proxyPort: number;
  readonly namePort: number;
  /** Ends all connections of a slot's address. */
  closeGuest(slotAddress: number): void;
  openConnections(slotAddress: number): number;
  /** What was done for the holder of a slot's address; {@link closeGuest} begins a new page. */
  ledger(slotAddress: number): GuestLedger;
  readonly proxyCounters: Readonly<ProxyCounters>;
  readonly nameCounters: Readonly<NameServerCounters>;
}

/**
 * Below the range of ports that the kernel gives out: while this process is down, its rules lead to these
 * ports, and nobody may come by one of them by chance.
 */
const FIRST_PORT = 15_000;
const LAST_PORT = 15_099;
const HOST_ADDRESSES_VALID_MS = 1000;

/** The first port from `from` on that `listen` gets. */
async function onFreePort<T>(from: number, listen: (port: number) => T | Promise<T>): Promise<[T, number]> {
  for (let port = from; ; port++) {
    try {
      return [await listen(port), port];
    } catch (cause) {
      const taken = cause instanceof Error && "code" in cause && cause.code === "EADDRINUSE";
      if (taken && port < LAST_PORT) continue;
      throw new AenvError({
        code: "network_egress_port",
        message: `no port for the egress proxy: ${FIRST_PORT} to ${LAST_PORT} cannot be listened at`,
        remediation: "free one of these ports on this host (ss -lntup)",
        cause,
      });
    }
  }
}

export async function startEgress(options: EgressOptions): Promise<Egress> {
  const { dnsServer, findGuest, log } = options;
  const address = formatIpv4(options.address);
  const denied = mergeRanges(options.deniedCidrs);
  let own = new Set<number>();
  let ownUntil = 0;
  // The host's services are no destination for guests: neither directly nor through us.
  const isOwn = (candidate: number) => {
    if (performance.now() >= ownUntil) {
      const all = Object.values(networkInterfaces()).flatMap((list) => list ?? []);
      own = new Set(all.map((entry) => parseIpv4(entry.address) ?? 0));
      ownUntil = performance.now() + HOST_ADDRESSES_VALID_MS;
    }
    return own.has(candidate);
  };
  const isDenied = (candidate: number) => inRanges(denied, candidate) || isOwn(candidate);
  const names = new Names({ server: dnsServer, isDenied });
  const ledgers = new Ledgers();
  using undo = new DisposableStack();
  const [proxy, proxyPort] = await onFreePort(
    FIRST_PORT,
    (port) =>
      new EgressProxy({
        ...{ address, port, names, isDenied, findGuest, ledgers, log },
        limits: { ...PROXY_LIMITS, ...options.proxyLimits },
      }),
  );
  undo.use(proxy);
  const [nameServer, namePort] = await onFreePort(proxyPort + 1, (port) =>
    NameServer.listen({ address, port, names, findGuest, ledgers, log }),
  );
  undo.use(nameServer);
  const servers = undo.move();
  return {
    proxyPort,
    namePort,
    closeGuest: (slotAddress) => {
      proxy.closeGuest(slotAddress);
      ledgers.forget(slotAddress);
    },
    ledger: (slotAddress) => ledgers.read(slotAddress),
    openConnections: (slotAddress) => proxy.openConnections(slotAddress),
    proxyCounters: proxy.counters,
    nameCounters: nameServer.counters,
    [Symbol.dispose]: () => servers.dispose(),
  };
}
