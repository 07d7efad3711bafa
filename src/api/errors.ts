import { AenvError, errorChain, isDiskFull } from "../lib/errors.ts";

/** Error body of the REST contract: `code` equals the HTTP status. */
export interface ErrorBodyJson {
  readonly code: number;
  readonly message: string;
  readonly error_code?: string;
  readonly cause?: readonly string[];
  readonly remediation?: string;
}

export function errorResponse(error: unknown): Response {
  if (error instanceof AenvError) {
    const [message, ...cause] = errorChain(error);
    return jsonError(
      {
        code: error.status,
        message: message ?? error.code,
        error_code: error.code,
        ...(cause.length > 0 ? { cause } : {}),
        ...(error.remediation === undefined ? {} : { remediation: error.remediation }),
      },
      // Clients wait as long as they are told to, and not at all when they are told nothing.
      error.status === 429 ? { "retry-after": "5", ...lowerCase(error.headers) } : error.headers,
    );
  }
  if (isDiskFull(error)) {
    return jsonError({
      code: 507,
      message: "the server's disk is full",
      error_code: "disk_full",
      remediation: "free space on the file system that holds $AENV_HOME_PATH",
    });
  }
  return jsonError({
    code: 500,
    message: "internal error; the server's log has the details under the request id in x-request-id",
    error_code: "internal_server_error",
  });
}

function lowerCase(headers: Readonly<Record<string, string>> = {}): Record<string, string> {
  return Object.fromEntries(Object.entries(headers).map(([name, value]) => [name.toLowerCase(), value]));
}

function jsonError(body: ErrorBodyJson, headers: Readonly<Record<string, string>> = {}): Response {
  return new Response(`${JSON.stringify(body)}\n`, {
    status: body.code,
    headers: { "content-type": "application/json", ...headers },
  });
}

export function badRequest(message: string, code = "invalid_request", remediation?: string): AenvError {
  return new AenvError({ code, status: 400, message, ...(remediation === undefined ? {} : { remediation }) });
}
