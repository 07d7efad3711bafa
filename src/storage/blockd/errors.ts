import { AenvError, errorChain } from "../../lib/errors.ts";
import type { BlockdError } from "./protocol.ts";

/** An error for the other side of a socket or worker boundary. */
export function toBlockdError(error: unknown): BlockdError {
  const message = errorChain(error).join(": ");
  if (!(error instanceof AenvError)) return { kind: "error", code: "blockd_internal", message };
  const terminal = error.code.endsWith("_terminal");
  return {
    kind: terminal ? "terminal" : error.status < 500 ? "invalid_request" : "error",
    code: error.code,
    message,
    status: error.status,
    ...(error.remediation === undefined ? {} : { remediation: error.remediation }),
  };
}

/** The same error again, on this side. */
export function fromBlockdError(error: BlockdError): AenvError {
  return new AenvError({
    code: error.code,
    status: error.status ?? (error.kind === "invalid_request" ? 400 : 500),
    message: error.message,
    ...(error.remediation === undefined ? {} : { remediation: error.remediation }),
  });
}
