import { type Disk, hostDisk } from "./disk.ts";
import { openLayer } from "./open-layer.ts";
import type { OverlaybdRoom } from "./types.ts";

/** See OverlaybdRoom.inspectLayer. */
export function inspectLayer(file: string, disk: Disk = hostDisk): ReturnType<OverlaybdRoom["inspectLayer"]> {
  using layer = openLayer(disk, file, 0);
  const { header, trailer } = layer.blocks;
  const uuid = trailer.uuid ?? header.uuid;
  const parentUuid = trailer.parentUuid ?? header.parentUuid;
  return {
    virtualSizeBytes: trailer.virtualSizeBytes,
    mappingCount: layer.index.count,
    ...(uuid === undefined ? {} : { uuid }),
    ...(parentUuid === undefined ? {} : { parentUuid }),
    container: layer.container,
  };
}
