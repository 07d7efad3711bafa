/** The image room: references, registries, layouts, and their layers as overlaybd commits. */
export { openLayerTar } from "./decompress.ts";
export { applyLayer } from "./layer-apply.ts";
export { type CopyTarget, OpStreamWriter } from "./opstream.ts";
export { formatReference, parseReference } from "./reference.ts";
export { createImageService, type ImageServiceDeps } from "./service.ts";
export { showBytes, type TarEntry, TarParser, type TarSink } from "./tar.ts";
export type * from "./types.ts";
