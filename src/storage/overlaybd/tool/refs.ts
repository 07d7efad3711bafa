import { existsSync } from "node:fs";
import { openStack } from "../stack.ts";
import type { CommitOptions, ImageConfig, LayerStack, UpperMode, UpperRef } from "../types.ts";
import { type Flag, type Invocation, UsageError } from "./command.ts";

/** `x.data` goes with `x.index`, anything else with `<name>.index`, where none is named. */
export function upperRef(data: string, index: string | undefined, mode?: UpperMode): UpperRef {
  const beside = data.endsWith(".data") ? `${data.slice(0, -".data".length)}.index` : `${data}.index`;
  const name = index ?? (mode === "sparse" ? undefined : beside);
  return {
    data,
    ...(name === undefined ? {} : { index: name }),
    ...(mode === undefined ? {} : { mode }),
  };
}

export const UPPER_FLAGS: Readonly<Record<string, Flag>> = {
  index: { value: "FILE", help: "index file (default: beside the data file, .index for .data)" },
};

export const COMMIT_FLAGS: Readonly<Record<string, Flag>> = {
  uuid: { value: "UUID", help: "uuid of the new layer" },
  "parent-uuid": { value: "UUID", help: "uuid of the layer below it" },
  tag: { value: "TEXT", help: "text kept in the layer, up to 256 bytes" },
  compress: { value: "ALGORITHM", help: "lz4 or zstd; absent: not compressed" },
  "block-size": { value: "SIZE", help: "of compressed blocks: 4K (default), 8K, 16K, 32K or 64K" },
  tar: { help: "wrap it in tar, as registries hold it" },
};

export function compressionOf(
  algorithm: string | undefined,
  blockSizeBytes = 4096,
): CommitOptions["compression"] {
  if (algorithm === undefined) return undefined;
  if (algorithm !== "lz4" && algorithm !== "zstd") {
    throw new UsageError(`${JSON.stringify(algorithm)} is no compression: lz4 or zstd`);
  }
  return { algorithm, blockSizeBytes };
}

export function commitOptions(invocation: Invocation): CommitOptions {
  const compression = compressionOf(invocation.text("compress"), invocation.bytes("block-size"));
  if (compression === undefined && invocation.text("block-size") !== undefined) {
    throw new UsageError("--block-size goes with --compress");
  }
  const uuid = invocation.text("uuid");
  const parentUuid = invocation.text("parent-uuid");
  const userTag = invocation.text("tag");
  return {
    ...(uuid === undefined ? {} : { uuid }),
    ...(parentUuid === undefined ? {} : { parentUuid }),
    ...(userTag === undefined ? {} : { userTag }),
    ...(compression === undefined ? {} : { compression }),
    tar: invocation.has("tar"),
  };
}

/** A stack named on the command line: layers bottom to top, divided by commas. */
export function openNamed(names: string): LayerStack {
  const lowers = names.split(",").map((file) => ({ file }));
  return openStack({ lowers });
}

/** Opens an existing upper for a command that changes it. */
export function openUpper(config: ImageConfig): LayerStack {
  const data = config.upper?.data;
  if (data !== undefined && !existsSync(data)) {
    throw new UsageError(`there is no upper ${data}: make one with "agentenv layer create"`);
  }
  return openStack(config);
}
