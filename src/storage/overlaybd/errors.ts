import { AenvError } from "../../lib/errors.ts";

/** A file that is not what it should be: says where in which file and why. */
export function invalidLayer(file: string, offsetBytes: number, reason: string): AenvError {
  return new AenvError({
    code: "layer_invalid",
    status: 422,
    message: `${file}: not a valid layer: at byte ${offsetBytes}: ${reason}`,
    remediation: "the file is damaged or not an overlaybd layer; fetch or make it again",
  });
}

export function badRequest(code: string, message: string, remediation?: string): AenvError {
  return new AenvError({ code, status: 400, message, ...(remediation === undefined ? {} : { remediation }) });
}
