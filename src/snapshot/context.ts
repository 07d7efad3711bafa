import type { ImageRuntimeConfig } from "../image/types.ts";
import type { StartupContext } from "./types.ts";

/** What an image's configuration says about how its processes are started. */
export function contextOfImage(config: ImageRuntimeConfig): StartupContext {
  const { workingDir, user, entrypoint, cmd } = config;
  return {
    envVars: config.env,
    ...(workingDir === undefined || workingDir === "" ? {} : { workdir: workingDir }),
    ...(user === undefined || user === "" ? {} : { user }),
    exposedPorts: config.exposedPorts,
    ...(entrypoint === undefined ? {} : { entrypoint }),
    ...(cmd === undefined ? {} : { cmd }),
    volumes: config.volumes,
    labels: config.labels,
  };
}

/** `host/repository@digest`: names the same image for ever. */
export function pinnedReference(image: {
  readonly reference: string;
  readonly manifestDigest: string;
}): string {
  return image.reference.includes("@")
    ? image.reference
    : `${image.reference.replace(/:[^/:]+$/, "")}@${image.manifestDigest}`;
}
