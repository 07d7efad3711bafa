import { isAbsolute } from "node:path";
import { z } from "zod";
import type { ImageConfig, LayerRef, UpperRef } from "../overlaybd/types.ts";
import type { BlockdRequestMessage, DeviceSpec } from "./protocol.ts";

/** What comes over the control socket or from a file is checked here, once. */
const absolutePath = z
  .string()
  .max(4096)
  .refine((path) => isAbsolute(path) && !path.includes("\0"), "must be an absolute path");

const deviceId = z.string().regex(/^[A-Za-z0-9_.-]{1,128}$/, "must match [A-Za-z0-9_.-]{1,128}");

const layerSchema: z.ZodType<LayerRef> = z.strictObject({
  file: absolutePath,
  digest: z.string().max(256).optional(),
  size: z.number().int().nonnegative().optional(),
  uuid: z.string().max(64).optional(),
});

export const upperSchema: z.ZodType<UpperRef> = z.strictObject({
  data: absolutePath,
  index: absolutePath.optional(),
  mode: z.enum(["logStructured", "sparse", "hybridLogStructured"]).optional(),
});

export const imageSchema: z.ZodType<ImageConfig> = z.strictObject({
  lowers: z.array(layerSchema).max(1024),
  upper: upperSchema.optional(),
  virtualSizeBytes: z.number().int().positive().multipleOf(512, "must be a multiple of 512").optional(),
});

export const deviceSchema: z.ZodType<DeviceSpec> = z.strictObject({
  deviceId,
  image: imageSchema,
  readOnly: z.boolean(),
  exportKind: z.enum(["nbd", "ublk"]),
  directIo: z.boolean().optional(),
});

const id = z.number().int().nonnegative();

export const requestSchema: z.ZodType<BlockdRequestMessage> = z.discriminatedUnion("op", [
  z.strictObject({ id, op: z.literal("hello"), version: z.number().int() }),
  z.strictObject({ id, op: z.literal("create"), device: deviceSchema }),
  z.strictObject({ id, op: z.literal("get"), deviceId }),
  z.strictObject({ id, op: z.literal("list"), after: deviceId.optional() }),
  z.strictObject({ id, op: z.literal("release"), deviceId }),
  z.strictObject({ id, op: z.literal("flush"), deviceId }),
  z.strictObject({
    id,
    op: z.literal("restack"),
    deviceId,
    sealedPath: absolutePath,
    freshUpper: upperSchema,
  }),
  z.strictObject({
    id,
    op: z.literal("swapLowers"),
    deviceId,
    swaps: z
      .array(
        z.strictObject({
          first: z.number().int().nonnegative(),
          count: z.number().int().positive(),
          files: z.array(absolutePath).max(1024),
          merged: layerSchema,
        }),
      )
      .max(1024),
  }),
  z.strictObject({ id, op: z.literal("stats"), after: deviceId.optional() }),
  z.strictObject({ id, op: z.literal("shutdown") }),
]);

/** One line a person can act on. */
export function describeIssues(error: z.ZodError): string {
  return error.issues.map((issue) => `${issue.path.join(".") || "message"}: ${issue.message}`).join("; ");
}

const restackSchema = z.strictObject({ sealedPath: absolutePath, freshUpper: upperSchema });

/** One device as kept in the runtime directory. */
export const recordSchema = z.strictObject({
  version: z.literal(1),
  /** As the caller asked for it. */
  spec: deviceSchema,
  /** As it is now. */
  image: imageSchema,
  virtualSizeBytes: z.number().int().nonnegative(),
  /** ublk: the kernel's number of the device, for the next daemon. */
  ublkId: z.number().int().nonnegative().optional(),
  /** A restack that was begun: written before it starts, removed with its outcome. */
  restacking: restackSchema.optional(),
  /** The last restack that succeeded: its repetition is answered from here. */
  restacked: restackSchema.extend({ layer: layerSchema }).optional(),
});
export type DeviceRecord = z.infer<typeof recordSchema>;
