import { errorChain } from "../lib/errors.ts";
import { mergeLayers } from "../storage/overlaybd/index.ts";
import type { MergeRequest } from "./compaction.ts";

/** The program `merge-layers`: reads a MergeRequest from standard input, writes the merged LayerRef. */
export async function runMerge(): Promise<number> {
  try {
    const request = (await Bun.stdin.json()) as MergeRequest;
    const { digest: _, ...layer } = mergeLayers(request.layers, request.target, {
      uuid: crypto.randomUUID(),
    });
    process.stdout.write(`${JSON.stringify(layer)}\n`);
    return 0;
  } catch (error) {
    process.stderr.write(`${errorChain(error).join(": ")}\n`);
    return 1;
  }
}
