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
  readonly dnsServer: string;
  readonly macAddress: string;
}

export interface NetworkServiceOptions {
  readonly runtimeDir: string;
  readonly hostInteractionCidr: string;
  readonly vethCidr: string;
  readonly alwaysDeniedCidrs: readonly string[];
}

export interface NetworkService extends AsyncDisposable {
  /** Host rules and forwarding; removes what an earlier process left for slots not in `keep`. */
  start(keep: readonly number[]): Promise<void>;
  acquire(): Promise<NetworkSlot>;
  /** Takes over a slot of an earlier process (it must have been in `keep`). */
  adopt(index: number): Promise<NetworkSlot>;
}
