import { mkdir, open, readdir } from "node:fs/promises";
import { join } from "node:path";
import { nextTurn } from "../lib/turn.ts";
import { createLayerWriter, type LayerRef, openStack, type UpperRef } from "../storage/overlaybd/index.ts";

const PIECE_BYTES = 1 << 20;
/** The event loop gets its turn after this much copied: some milliseconds. */
const TURN_BYTES = 4 << 20;

export interface CommitRequest {
  readonly upper: UpperRef;
  /** An existing directory for the result alone. */
  readonly directory: string;
  readonly virtualSizeBytes: number;
  readonly uuid: string;
  readonly parentUuid?: string;
  readonly signal: AbortSignal;
}

/** Syncs what is in the directory off the event loop, so that the writer's own sync has nothing left to do. */
async function syncFiles(directory: string): Promise<void> {
  for (const name of await readdir(directory)) {
    await using handle = await open(join(directory, name), "r");
    await handle.sync();
  }
}

/**
 * Compacts a finished upper into a committed layer, like the overlaybd room's `commitUpper`, but in slices:
 * layers have gigabytes, and the server goes on serving meanwhile.
 */
export async function commitInSlices(request: CommitRequest): Promise<LayerRef> {
  const { upper, virtualSizeBytes, uuid, parentUuid, signal } = request;
  await mkdir(request.directory, { recursive: true });
  using stack = openStack({ lowers: [], upper, virtualSizeBytes });
  using writer = createLayerWriter(join(request.directory, "overlaybd.commit"), {
    virtualSizeBytes,
    uuid,
    ...(parentUuid === undefined ? {} : { parentUuid }),
  });
  const buffer = new Uint8Array(new ArrayBuffer(PIECE_BYTES));
  let sinceTurn = 0;
  for (const { offsetBytes, lengthBytes, zeroed } of stack.mappedExtents("upper")) {
    if (zeroed) {
      writer.zero(offsetBytes, lengthBytes);
      continue;
    }
    for (let done = 0; done < lengthBytes; ) {
      const piece = buffer.subarray(0, Math.min(PIECE_BYTES, lengthBytes - done));
      stack.read(offsetBytes + done, piece);
      writer.append(offsetBytes + done, piece);
      done += piece.length;
      sinceTurn += piece.length;
      if (sinceTurn < TURN_BYTES) continue;
      sinceTurn = 0;
      await nextTurn();
      signal.throwIfAborted();
    }
  }
  await syncFiles(request.directory);
  signal.throwIfAborted();
  return writer.finish();
}
