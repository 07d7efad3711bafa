export { NbdErrno } from "./codec.ts";
export { nbdErrnoOf } from "./errors.ts";
export { BufferPool } from "./pool.ts";
export { type NbdExport, type NbdExportOptions, serveNbd } from "./server.ts";
export type { NbdEvent, NbdExtent, NbdTarget } from "./types.ts";
