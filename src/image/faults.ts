import { errorCode } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";

/** Turns a full disk or quota, wherever it showed, into the service's error; other errors pass unchanged. */
export function diskFault(error: unknown, doing: string): unknown {
  const code = errorCode(error);
  if (code === "disk_full") return error;
  if (code !== "ENOSPC" && code !== "EDQUOT") return error;
  return new AenvError({
    code: "disk_full",
    status: 507,
    message: `${doing}: no space left on the image cache's file system`,
    remediation: "free space there, or set image.cache.root_dir to a larger file system",
    cause: error,
  });
}

export function digestMismatch(image: string, what: string, expected: string, found: string): AenvError {
  return new AenvError({
    code: "image_digest_mismatch",
    status: 502,
    message: `${image}: the content of ${what} does not have its digest: expected ${expected}, found ${found}`,
    remediation: "pull again; when it stays, the registry (or a proxy before it) serves damaged content",
  });
}

export function truncated(
  image: string,
  what: string,
  found: number,
  expected: number,
  cause?: unknown,
): AenvError {
  return new AenvError({
    code: "image_truncated",
    status: 502,
    message: `${image}: ${what} is cut off: ${found} of ${expected} bytes arrived`,
    remediation: "pull again; when it stays, the image was pushed incomplete",
    ...(cause === undefined ? {} : { cause }),
  });
}
