/** The image room: references, registries, layouts, and their layers as overlaybd commits. */
export { formatReference, parseReference } from "./reference.ts";
export { createImageService, type ImageServiceDeps } from "./service.ts";
export type * from "./types.ts";
