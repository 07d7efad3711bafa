export { type ExchangeReport, type Front, type FrontLimits, type FrontOptions, startFront } from "./front.ts";
