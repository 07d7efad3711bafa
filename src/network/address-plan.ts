import { AenvError } from "../lib/errors.ts";
import { cidrsOverlap, formatIpv4, type Ipv4Cidr, parseCidr } from "../lib/ipv4.ts";

/** The link between guest and tap is part of every snapshot: the same everywhere, for good. */
export const VM_LINK = parseCidr("169.254.0.20/30")!;
export const GUEST_ADDRESS = VM_LINK.base + 1;
export const GATEWAY_ADDRESS = VM_LINK.base + 2;
/** MAC addresses are 02:fc and four bytes: on the VM link the address's own, on veths see below. */
export const GUEST_MAC_LOW = GUEST_ADDRESS;
export const GATEWAY_MAC_LOW = GATEWAY_ADDRESS;

/** Slot 0 is reserved. */
export const FIRST_SLOT = 1;
export const LAST_SLOT = 32767;

export const TAP_NAME = "tap0";
export const PEER_NAME = "vpeer";

export interface SlotAddresses {
  readonly index: number;
  readonly hostDevice: string;
  /** Numbers in host byte order. */
  readonly hostAddress: number;
  readonly hostVeth: number;
  readonly peerVeth: number;
}

export interface AddressPlan {
  readonly hostInteraction: Ipv4Cidr;
  readonly veth: Ipv4Cidr;
  /** Device group of our host devices; differs between servers whose pools differ. */
  readonly deviceGroup: number;
  /** Name of the host's nftables table (family inet). */
  readonly tableName: string;
  /**
   * Address (of slot 0, which does not exist) at which this host answers what it diverts from guests, and
   * from which it connects on their behalf.
   */
  readonly egressAddress: number;
  slot(index: number): SlotAddresses;
}

export function formatMac(low: number): string {
  const bytes = [0x02, 0xfc, low >>> 24, (low >>> 16) & 255, (low >>> 8) & 255, low & 255];
  return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(":");
}

export function tableNameOf(deviceGroup: number): string {
  return `agentenv-${formatIpv4(deviceGroup)}`;
}

function pool(name: string, text: string, minimum: number): Ipv4Cidr {
  const cidr = parseCidr(text);
  if (cidr === undefined || cidr.addressCount < minimum || cidr.base === 0) {
    throw new AenvError({
      code: "invalid_network_pool",
      message: `${name} "${text}" is not an IPv4 CIDR of at least ${minimum} addresses`,
    });
  }
  return cidr;
}

/** Which addresses slot i has: one of the interaction pool, two neighbours of the veth pool. */
export function createAddressPlan(hostInteractionCidr: string, vethCidr: string): AddressPlan {
  const hostInteraction = pool("host_interaction_cidr", hostInteractionCidr, 32768);
  const veth = pool("veth_cidr", vethCidr, 65536);
  if (
    cidrsOverlap(hostInteraction, veth) ||
    cidrsOverlap(hostInteraction, VM_LINK) ||
    cidrsOverlap(veth, VM_LINK)
  ) {
    throw new AenvError({
      code: "invalid_network_pool",
      message: `network pools ${hostInteractionCidr} and ${vethCidr} overlap each other or the VM link 169.254.0.20/30`,
    });
  }
  return {
    hostInteraction,
    veth,
    deviceGroup: hostInteraction.base,
    egressAddress: hostInteraction.base,
    tableName: tableNameOf(hostInteraction.base),
    slot(index) {
      if (!Number.isInteger(index) || index < FIRST_SLOT || index > LAST_SLOT) {
        throw new RangeError(`network slot ${index} is not in ${FIRST_SLOT}..${LAST_SLOT}`);
      }
      return {
        index,
        hostDevice: `veth-${index}`,
        hostAddress: hostInteraction.base + index,
        hostVeth: veth.base + 2 * index,
        peerVeth: veth.base + 2 * index + 1,
      };
    },
  };
}
