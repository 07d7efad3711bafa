import { constantTimeEqual } from "../lib/constant-time.ts";
import { AenvError } from "../lib/errors.ts";
import { isUuid } from "../lib/ids.ts";

/**
 * Exactly one `X-API-Key` header equal to one of the server's keys (two during a rotation). A repeated
 * header arrives joined with a comma, which no key contains.
 */
export function isAuthorized(headers: Headers, apiKeys: readonly string[]): boolean {
  const given = headers.get("x-api-key");
  if (given === null) return false;
  let matched = false;
  for (const key of apiKeys) matched = constantTimeEqual(given, key) || matched;
  return matched;
}

/**
 * Why a request for `PORT-ID.domain` came here and not to a sandbox: its domain is none of the server's. Only of
 * a host name of that shape, and only what its sender said is in it.
 */
export function strayHost(headers: Headers): string | undefined {
  const host = (headers.get("host") ?? "").replace(/:\d+$/, "").toLowerCase();
  const found = /^\d{1,5}-([0-9a-f-]{36})\.([a-z0-9.-]{1,253})$/.exec(host);
  if (found === null || !isUuid(found[1]!)) return undefined;
  return `${found[2]} is not in sandbox_proxy.domains, so this host name leads to no sandbox: add it there, or name the sandbox by the headers E2b-Sandbox-Id and E2b-Sandbox-Port`;
}

export function unauthorized(headers: Headers): AenvError {
  return new AenvError({
    code: "unauthorized",
    status: 401,
    message: "authentication failed: the X-API-Key header is missing, repeated or wrong",
    remediation:
      strayHost(headers) ??
      "send the server's key; it is in $AENV_HOME_PATH/secrets/api-key unless AENV_API_KEY is set",
  });
}
