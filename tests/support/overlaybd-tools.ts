import { join } from "node:path";

/*
 * The overlaybd project's own tools, for comparison where somebody has them (src/tools of containerd/overlaybd):
 *   overlaybd-create [-s] [--mkfs] DATA INDEX GIB        a writable layer, sparse, with an empty file system
 *   overlaybd-apply --service_config_path SERVICE LAYER IMAGE   a layer's tar, plain or gzip, into that image
 */

export interface OverlaybdTools {
  readonly create: string;
  readonly apply: string;
}

/** Where they are: in the search path, else where their packages put them. Undefined when one is missing. */
export function findOverlaybdTools(path = process.env.PATH ?? ""): OverlaybdTools | undefined {
  const [create, apply] = ["overlaybd-create", "overlaybd-apply"].map((name) =>
    Bun.which(name, { PATH: `${path}:/opt/overlaybd/bin` }),
  );
  return create && apply ? { create, apply } : undefined;
}

export interface OverlaybdPlan {
  /** To be written before: path and content. */
  readonly files: ReadonlyMap<string, string>;
  /** In this order. */
  readonly commands: readonly (readonly string[])[];
}

/** Applies a layer's tar or tar.gz to a new image of `virtualSizeGiB`; everything is below `workDir`. */
export function planOverlaybdApply(
  tools: OverlaybdTools,
  options: { readonly layerFile: string; readonly workDir: string; readonly virtualSizeGiB: number },
): OverlaybdPlan {
  const { layerFile, workDir, virtualSizeGiB } = options;
  const at = (name: string) => join(workDir, `overlaybd.${name}`);
  const [service, image, index, data] = [at("service.json"), at("image.json"), at("index"), at("data")];
  return {
    files: new Map([
      [
        service,
        JSON.stringify({
          logConfig: { logLevel: 1, logPath: at("log") },
          cacheConfig: { cacheType: "file", cacheDir: at("cache"), cacheSizeGB: 1 },
          credentialConfig: { mode: "file", path: at("credentials.json") },
          download: { enable: false },
          enableAudit: false,
        }),
      ],
      [at("credentials.json"), JSON.stringify({ auths: {} })],
      [
        image,
        JSON.stringify({ repoBlobUrl: "", lowers: [], upper: { index, data }, resultFile: at("result") }),
      ],
    ]),
    commands: [
      [tools.create, "-s", "--mkfs", data, index, String(virtualSizeGiB)],
      [tools.apply, "--service_config_path", service, layerFile, image],
      ["sync", "-f", workDir],
    ],
  };
}
