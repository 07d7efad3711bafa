export type {
  ExportEvent as NbdEvent,
  ExportExtent as NbdExtent,
  ExportTarget as NbdTarget,
} from "../types.ts";
