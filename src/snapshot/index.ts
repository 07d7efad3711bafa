export { contextOfImage, pinnedReference } from "./context.ts";
export { DEFAULT_TAG, formatName, parseAlias, parseName, type SnapshotName } from "./names.ts";
export { createPosixRepository, type PosixRepositoryOptions } from "./posix.ts";
export type * from "./types.ts";
