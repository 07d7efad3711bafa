export { type ProbeVerdict, probeUblkHere } from "./probe.ts";
export {
  type UblkExport,
  type UblkExportOptions,
  type UblkIdentity,
  UblkServer,
  ublkStamp,
} from "./server.ts";
