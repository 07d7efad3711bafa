export {
  type ExchangeReport,
  type Front,
  type FrontLimits,
  type FrontOptions,
  requireFreeAddress,
  startFront,
} from "./front.ts";
