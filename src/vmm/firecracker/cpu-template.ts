import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { z } from "zod";
import { AenvError } from "../../lib/errors.ts";

/**
 * What guests see of the host's processor (upstream's docs/cpu_templates/cpu-templates.md): one of Firecracker's own
 * templates by name, or a file in its custom template language.
 */
export type CpuTemplate =
  | { readonly kind: "static"; readonly name: StaticTemplate; readonly identity: string }
  | { readonly kind: "custom"; readonly body: Readonly<Record<string, unknown>>; readonly identity: string };

export const STATIC_TEMPLATES = ["T2", "T2S", "T2CL", "T2A", "C3", "V1N1"] as const;
export type StaticTemplate = (typeof STATIC_TEMPLATES)[number];

/** Which processors they are for (the same page). */
const MADE_FOR: Readonly<
  Record<StaticTemplate, { readonly arch: "x64" | "arm64"; readonly vendor?: string }>
> = {
  T2: { arch: "x64", vendor: "GenuineIntel" },
  T2S: { arch: "x64", vendor: "GenuineIntel" },
  T2CL: { arch: "x64", vendor: "GenuineIntel" },
  C3: { arch: "x64", vendor: "GenuineIntel" },
  T2A: { arch: "x64", vendor: "AuthenticAMD" },
  V1N1: { arch: "arm64" },
};

const hex = z.string().regex(/^(0x[0-9a-fA-F]+|0b[01]+|\d+)$/, 'must be a number in quotes, e.g. "0x1"');
const bitmap = z
  .string()
  .regex(/^0b[01xX_]+$/, 'must be a bitmap of 0, 1, x and _, e.g. "0bxx10"')
  .refine((text) => text.replaceAll("_", "").length <= 2 + 128, "has over 128 bits");

/** The keys and shapes of upstream's docs/cpu_templates/schema.json. */
const customSchema = z.strictObject({
  kvm_capabilities: z
    .array(z.string().regex(/^!?\d+$/, 'must be a number in quotes, "!" before it'))
    .optional(),
  cpuid_modifiers: z
    .array(
      z.strictObject({
        leaf: hex,
        subleaf: hex,
        flags: z.int().min(0),
        modifiers: z.array(z.strictObject({ register: z.enum(["eax", "ebx", "ecx", "edx"]), bitmap })),
      }),
    )
    .optional(),
  msr_modifiers: z.array(z.strictObject({ addr: hex, bitmap })).optional(),
  reg_modifiers: z.array(z.strictObject({ addr: hex, bitmap })).optional(),
  vcpu_features: z.array(z.strictObject({ index: z.int().min(0), bitmap })).optional(),
});

function invalid(message: string, remediation: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "cpu_template_invalid",
    message,
    remediation,
    ...(cause === undefined ? {} : { cause }),
  });
}

/** Error `cpu_template_invalid` when this host's processor is of another kind than the template is for. */
export function staticTemplate(
  name: StaticTemplate,
  host: { readonly arch: string; readonly vendor: string },
): CpuTemplate {
  const { arch, vendor } = MADE_FOR[name];
  if (arch !== host.arch || (vendor !== undefined && vendor !== host.vendor)) {
    const fitting = STATIC_TEMPLATES.filter(
      (other) =>
        MADE_FOR[other].arch === host.arch && [undefined, host.vendor].includes(MADE_FOR[other].vendor),
    );
    throw invalid(
      `the CPU template ${name} is for ${vendor ?? arch}, this host is ${host.vendor} (${host.arch})`,
      `set [firecracker].cpu_template to ${fitting.length === 0 ? "nothing" : `one of ${fitting.join(", ")}`}, or use cpu_template_path`,
    );
  }
  return { kind: "static", name, identity: name };
}

/** A custom template from its file. Its identity is its content's. Error: `cpu_template_invalid`. */
export function customTemplate(path: string): CpuTemplate {
  const cure = "mend the file, or leave [firecracker].cpu_template_path unset";
  let value: unknown;
  try {
    value = JSON.parse(readFileSync(path, "utf8"));
  } catch (cause) {
    throw invalid(`the CPU template ${path} cannot be read as JSON`, cure, cause);
  }
  const parsed = customSchema.safeParse(value);
  if (!parsed.success) {
    const [issue] = parsed.error.issues;
    throw invalid(
      `the CPU template ${path} is not one: ${issue === undefined ? "" : `${issue.path.join(".") || "the whole"}: ${issue.message}`}`,
      cure,
    );
  }
  const canonical = JSON.stringify(parsed.data);
  const digest = createHash("sha256").update(canonical).digest("hex").slice(0, 12);
  return { kind: "custom", body: parsed.data, identity: `custom-${digest}` };
}
