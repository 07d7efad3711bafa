/**
 * Sandbox tokens are derived from the node's seed and never stored: the same for the life of a sandbox
 * id, across pauses, restarts and nodes with the same seed. The seed's text is the HMAC key.
 */
function derive(seed: string, message: string): string {
  return new Bun.CryptoHasher("sha256", seed).update(message).digest("hex");
}

/** Token the guest agent requires (`X-Access-Token`): 64 lower-case hex digits. */
export function deriveEnvdToken(seed: string, sandboxId: string): string {
  return derive(seed, sandboxId);
}

/** Token for the application ports of a sandbox with private ingress: 64 lower-case hex digits. */
export function deriveTrafficToken(seed: string, sandboxId: string): string {
  return derive(seed, `sandbox-traffic-${sandboxId}`);
}
