import { netNamespaceRules } from "../../ffi/netns.ts";
import { errorCode } from "../lib/durable.ts";
import { Batch, decide, outDevice } from "./nft.ts";

/** A table beside the slot's own, which is made anew now and then. */
const TABLE = "agentenv-still";

/**
 * From when this resolves on, the namespace at `netnsPath` hands nothing to `device` any more: what comes for it is
 * lost, as on any network, and sent again by who needs it. Addresses, routes and neighbours stay as they are, which
 * they would not if the device were set down. Throws `os_…` with the kernel's refusal.
 */
export async function holdDevice(netnsPath: string, device: string): Promise<void> {
  const batch = new Batch(TABLE);
  batch.replaceTable();
  // Before anything else of its hook. IPv6 and ARP (neighbours are permanent) do not come this way.
  batch.chain("held", { type: "filter", hook: "postrouting", priority: -400, policy: "accept" });
  batch.rule("held", outDevice(device), decide("drop"));
  await netNamespaceRules(netnsPath, batch.finish());
}

/** Undoes {@link holdDevice}. No error where nothing was held, or the namespace is gone. */
export async function letDeviceGo(netnsPath: string): Promise<void> {
  const batch = new Batch(TABLE);
  batch.removeTable();
  try {
    await netNamespaceRules(netnsPath, batch.finish());
  } catch (error) {
    if (errorCode(error) !== "os_enoent") throw error;
  }
}
