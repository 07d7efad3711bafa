export { type Front, type FrontLimits, type FrontOptions, startFront } from "./front.ts";
