import { readFileSync } from "node:fs";
import { isUuid, newId } from "../lib/ids.ts";

export interface NodeIdentity {
  readonly nodeId: string;
  readonly clusterId: string;
  /** New at every start unless configured. */
  readonly serviceInstanceId: string;
}

export const NIL_UUID = "00000000-0000-0000-0000-000000000000";

const HOST_NAME_FILES = ["/proc/sys/kernel/hostname", "/etc/hostname"];

function readName(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8").trim() || undefined;
  } catch (error) {
    // A host without the file: the next source.
    if (error instanceof Error && "code" in error) return undefined;
    throw error;
  }
}

/** Who this node is: what is configured, else the host's name, the nil cluster and a fresh instance. */
export function resolveIdentity(
  configured: {
    readonly node_id?: string | undefined;
    readonly cluster_id?: string | undefined;
    readonly service_instance_id?: string | undefined;
  },
  env: Readonly<Record<string, string | undefined>>,
  warnings: string[],
): NodeIdentity {
  const hostName = env.HOSTNAME?.trim() || HOST_NAME_FILES.map(readName).find((name) => name !== undefined);
  let clusterId = configured.cluster_id?.toLowerCase() ?? NIL_UUID;
  if (!isUuid(clusterId)) {
    warnings.push(
      `node_identity.cluster_id "${configured.cluster_id}" is not a UUID: the nil UUID is used instead`,
    );
    clusterId = NIL_UUID;
  }
  return {
    nodeId: configured.node_id ?? hostName ?? "unknown",
    clusterId,
    serviceInstanceId: configured.service_instance_id ?? newId(),
  };
}
