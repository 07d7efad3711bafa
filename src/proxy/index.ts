export { type Front, requireFreeAddress, startFront } from "./front.ts";
export type { ExchangeReport, FrontLimits, FrontOptions } from "./options.ts";
