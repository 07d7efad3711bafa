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
}

export interface NetworkService extends AsyncDisposable {
  /**
   * Host rules and forwarding; removes what an earlier process left for slots not in `keep`. Throws with
   * the cure when rights, tools or the kernel lack something, and `network_pool_in_use` when another
   * process of this host has the address pools.
   */
  start(keep: readonly number[]): Promise<void>;
  /** A free slot; on an error nothing is left behind. Dispose the slot to remove all of it. */
  acquire(): Promise<NetworkSlot>;
  /** Takes over a slot of an earlier process (it must have been in `keep`). */
  adopt(index: number): Promise<NetworkSlot>;
}
