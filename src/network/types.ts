import type { GuestLedger, ProxyLimits } from "./egress/index.ts";
import type { EgressPolicy } from "./egress-policy.ts";
import type { PoolOptions } from "./pool.ts";
import type { GuestLimits } from "./ruleset.ts";

/** One network slot: namespace, veth pair and tap, ready for a VM. Names: spec, address plan. */
export interface NetworkSlot extends AsyncDisposable {
  readonly index: number;
  readonly netnsPath: string;
  readonly tapName: string;
  /** Address on the host under which every port of the guest is reached. */
  readonly hostAddress: string;
  readonly guestAddress: string;
  readonly gatewayAddress: string;
  readonly prefixLength: number;
  /**
   * Name server to write into the guest: the gateway, the same in every slot, so that a snapshot does not
   * carry a host's resolver to another. Its port 53 leads to the server the node chose.
   */
  readonly dnsServer: string;
  /** Same in every slot (a restored guest keeps it); the namespace keeps slots apart. */
  readonly macAddress: string;
  /** The egress policy in force, in normal form. */
  readonly policy: EgressPolicy;
  /**
   * Replaces the egress policy in one step: a new connection is judged by the old one or the new one, and by
   * the new one once this resolves; established ones go on. When it rejects, the old policy is in force.
   * Throws `invalid_egress_policy` (400) for an entry that is not understood.
   */
  applyPolicy(policy: EgressPolicy): Promise<void>;
  /**
   * From here on nothing leaves the guest but answers to who speaks to it: every destination is denied, and what it
   * had established is cut. For good: the slot is given back next.
   */
  isolate(): Promise<void>;
  /** The policy with what it has let through and refused since it was applied. */
  policyReport(): Promise<SlotPolicyReport>;
}

export interface RuleCounter {
  /** `allow 203.0.113.0/24` and the like. */
  readonly rule: string;
  readonly packets: number;
  readonly bytes: number;
}

export interface SlotPolicyReport {
  readonly slot: {
    readonly index: number;
    readonly hostAddress: string;
    readonly hostDevice: string;
    readonly netnsPath: string;
  };
  /** Of the host's rules: what no guest reaches, and who answers DNS queries. */
  readonly node: { readonly deniedCidrs: readonly string[]; readonly dnsServer: string };
  readonly policy: EgressPolicy;
  /** What is not named is refused, and DNS answers only allowed names. */
  readonly restricted: boolean;
  /** HTTP and TLS go through the node's egress proxy. */
  readonly filtered: boolean;
  /**
   * Packets per address rule: the first ones of connections, those of established ones are not looked at.
   * Restricted: what no rule allows is in `refused`. Connections by name do not come here.
   */
  readonly rules: readonly RuleCounter[];
  /** Packets refused for whatever reason, the node's own denials included. */
  readonly refused: { readonly packets: number; readonly bytes: number };
  readonly proxiedConnections: number;
  /** Of the egress proxy and the name server. */
  readonly byName: GuestLedger;
}

/** A slot of an earlier process whose VM lives on. */
export interface KeptSlot {
  readonly index: number;
  /** In force from `start` on; default: the node's default policy. */
  readonly policy?: EgressPolicy;
}

/** What a guest may receive and send: bytes a second (0: no limit), and bytes at once on top of a second's worth. */
export interface NetworkRates {
  readonly receiveBytesPerSec: number;
  readonly receiveBurstBytes: number;
  readonly sendBytesPerSec: number;
  readonly sendBurstBytes: number;
}

export interface NetworkServiceOptions {
  /** Namespaces are kept in `<runtimeDir>/netns`. */
  readonly runtimeDir: string;
  /** One address per slot under which the host reaches the guest; at least 32768. */
  readonly hostInteractionCidr: string;
  /** Two addresses per slot for the veth pair; at least 65536. */
  readonly vethCidr: string;
  readonly alwaysDeniedCidrs: readonly string[];
  /** IPv4 address that answers the guests' DNS queries. Absent: chosen from the host's resolver files. */
  readonly dnsServer?: string;
  /** What one guest may take of what all share. Default: {@link GUEST_LIMITS}. */
  readonly guestLimits?: Partial<GuestLimits>;
  /** What each guest may send and receive; slots taken over have it from then on. Absent: no limits. */
  readonly rates?: NetworkRates;
  /** Of the egress proxy; what is absent is as in PROXY_LIMITS. */
  readonly proxyLimits?: Partial<ProxyLimits>;
  /** Slots kept ready. Absent: each is made when it is asked for and removed when it is given back. */
  readonly pool?: PoolOptions;
}

export interface NetworkService extends AsyncDisposable {
  /**
   * Host rules, egress proxy and forwarding; removes what an earlier process left for slots not in `keep`.
   * Connections that those have go on; new ones are refused for the moment until their policy is in force.
   * Throws with the cure when rights, tools or the kernel lack something, and `network_pool_in_use` when
   * another process of this host has the address pools.
   */
  start(keep: readonly KeptSlot[]): Promise<void>;
  /**
   * A free slot with the policy (default: the node's default) in force, so that a guest's first packet is
   * judged by it; on an error nothing is left behind. Dispose the slot to give it back.
   */
  acquire(policy?: EgressPolicy): Promise<NetworkSlot>;
  /** Takes over a slot of an earlier process (it must have been in `keep`), with the policy given there. */
  adopt(index: number): Promise<NetworkSlot>;
}
