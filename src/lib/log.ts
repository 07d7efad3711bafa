import pino from "pino";

export type Logger = pino.Logger;

const REDACTED = [
  "apiKey",
  "accessToken",
  "envdAccessToken",
  "trafficAccessToken",
  "password",
  "*.apiKey",
  "*.accessToken",
  "*.envdAccessToken",
  "*.trafficAccessToken",
  "*.password",
  'headers["x-api-key"]',
  'headers["x-access-token"]',
  "headers.authorization",
];

/**
 * JSON lines on standard error (file descriptor 2), written synchronously so that the last line before
 * a crash is there. `AENV_LOG_LEVEL` picks the level (default info).
 */
export function createLogger(name: string, fd = 2): Logger {
  return pino(
    {
      name,
      level: process.env.AENV_LOG_LEVEL ?? "info",
      base: { pid: process.pid },
      timestamp: pino.stdTimeFunctions.isoTime,
      redact: { paths: REDACTED, censor: "[redacted]" },
      serializers: { err: pino.stdSerializers.err },
    },
    pino.destination({ fd, sync: true }),
  );
}
