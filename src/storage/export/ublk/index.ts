export { type ProbeVerdict, probeUblkHere } from "./probe.ts";
export {
  type UblkCommands,
  type UblkExport,
  type UblkExportOptions,
  type UblkHost,
  type UblkIdentity,
  UblkServer,
  ublkStamp,
} from "./server.ts";
