import { constantTimeEqual } from "../lib/constant-time.ts";
import { AenvError } from "../lib/errors.ts";

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

export function unauthorized(): AenvError {
  return new AenvError({
    code: "unauthorized",
    status: 401,
    message: "authentication failed: the X-API-Key header is missing, repeated or wrong",
    remediation: "send the server's key; it is in $AENV_HOME_PATH/secrets/api-key unless AENV_API_KEY is set",
  });
}
