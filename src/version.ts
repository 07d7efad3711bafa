declare const BUILD_VERSION: string | undefined;
declare const BUILD_COMMIT: string | undefined;

/** Set at build time; a run from the sources says `dev`. */
export const version = typeof BUILD_VERSION === "string" ? BUILD_VERSION : "0.0.0-dev";
export const commit = typeof BUILD_COMMIT === "string" ? BUILD_COMMIT : "dev";
