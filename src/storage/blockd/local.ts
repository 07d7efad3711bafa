import { createLogger } from "../../lib/log.ts";
import { BufferPool } from "../export/nbd/index.ts";
import { openIoEngine } from "../io/index.ts";
import { openStack } from "../overlaybd/index.ts";
import type { ImageConfig } from "../overlaybd/types.ts";
import { openDevice } from "./device.ts";

export interface LocalExport extends AsyncDisposable {
  readonly socketPath: string;
  readonly exportName: string;
  /** Everything written is on stable storage when the promise resolves. */
  flush(): Promise<void>;
}

/** Exports an image over NBD from this thread, for tools: no daemon, no device table. */
export async function exportLocally(image: ImageConfig, socketPath: string): Promise<LocalExport> {
  await using scope = new AsyncDisposableStack();
  const exportName = "local";
  const engine = scope.use(openIoEngine());
  const log = createLogger("layer");
  log.level = "warn";
  const device = scope.use(
    await openDevice(
      {
        op: "open",
        deviceId: exportName,
        image,
        readOnly: false,
        exportKind: "nbd",
        ublkId: undefined,
        socketPath,
        upperMustExist: true,
      },
      {
        openStack,
        pool: new BufferPool(),
        ublk: () => {
          throw new Error("internal error, please report: a local export is over NBD");
        },
        ublkStamp: 0,
        engine,
        nowhere: new Uint8Array(new ArrayBuffer(256 << 10)),
        log,
      },
    ),
  );
  const owned = scope.move();
  return {
    socketPath,
    exportName,
    flush: () => device.flush(),
    [Symbol.asyncDispose]: () => owned[Symbol.asyncDispose](),
  };
}
