import { createHmac, randomBytes } from "node:crypto";
import { z } from "zod";
import { constantTimeEqual } from "../lib/constant-time.ts";
import { AenvError } from "../lib/errors.ts";
import type { TemplateService } from "../template/types.ts";
import { type Route, route } from "./route.ts";

/** The archives of COPY steps, and the end of builds that are not wanted any more. */

/** An upload has to begin within this time of its link. */
const LINK_LIFETIME_MS = 3_600_000;

const FileUpload = z.object({ present: z.boolean(), url: z.url() });
const UploadQuery = z.object({
  expires: z.string().regex(/^\d{1,15}$/, "must be a number"),
  signature: z.string().min(1),
});

/** Where the client reaches us, as it sees it: also through a proxy that ends TLS. */
function originOf(request: Request): string {
  const forwarded = request.headers.get("x-forwarded-proto")?.split(",")[0]?.trim().toLowerCase();
  const scheme = forwarded === "https" ? "https" : "http";
  return `${scheme}://${request.headers.get("host") ?? "localhost"}`;
}

function declaredLength(request: Request): number | undefined {
  const text = request.headers.get("content-length");
  return text === null || !/^\d+$/.test(text) ? undefined : Number(text);
}

export function buildRoutes(templates: Pick<TemplateService, "hasFiles" | "putFiles" | "cancel">): Route[] {
  // Links are for a moment: those of an earlier process are not honoured.
  const key = randomBytes(32);
  const signature = (templateId: string, hash: string, expires: string): string =>
    createHmac("sha256", key).update(`PUT\n${templateId}\n${hash}\n${expires}`).digest("base64url");

  return [
    route({
      method: "GET",
      path: "/templates/:id/files/:hash",
      summary: "Whether the files of a COPY step are here, and where to upload their archive",
      tag: "templates",
      authenticated: true,
      success: [
        {
          status: 201,
          schema: FileUpload,
          description: "url takes one PUT of a tar or tar.gz without an API key",
        },
      ],
      errors: [400, 404],
      run: async ({ request, params }) => {
        const [templateId, hash] = [params.id!, params.hash!];
        const present = await templates.hasFiles(templateId, hash);
        const expires = String(Date.now() + LINK_LIFETIME_MS);
        const query = new URLSearchParams({ expires, signature: signature(templateId, hash, expires) });
        const path = `/templates/${encodeURIComponent(templateId)}/files/${hash}/upload`;
        return { status: 201, json: { present, url: `${originOf(request)}${path}?${query}` } };
      },
    }),
    route({
      method: "PUT",
      path: "/templates/:id/files/:hash/upload",
      summary: "Upload the archive of a COPY step, by the link the server gave",
      tag: "templates",
      authenticated: false,
      streamsBody: true,
      query: UploadQuery,
      success: [{ status: 204, description: "Complete, checked and stored" }],
      errors: [400, 403, 404, 413, 507],
      run: async ({ request, params, query }) => {
        const [templateId, hash] = [params.id!, params.hash!];
        const valid = constantTimeEqual(query.signature, signature(templateId, hash, query.expires));
        if (!valid || Number(query.expires) < Date.now()) {
          throw new AenvError({
            code: "invalid_upload_link",
            status: 403,
            message: `the upload link is ${valid ? "too old" : "not valid"}`,
            remediation: "ask for a new one: GET /templates/{id}/files/{hash}",
          });
        }
        const declaredBytes = declaredLength(request);
        await templates.putFiles(templateId, hash, request.body ?? new Blob([]).stream(), {
          signal: request.signal,
          ...(declaredBytes === undefined ? {} : { declaredBytes }),
        });
        return { status: 204 };
      },
    }),
    route({
      method: "DELETE",
      path: "/templates/:id/builds/:build",
      summary: "Cancel a running or queued build",
      tag: "templates",
      authenticated: true,
      success: [{ status: 204, description: "The build has ended in error" }],
      errors: [404, 409],
      run: async ({ params }) => {
        await templates.cancel(params.id!, params.build!);
        return { status: 204 };
      },
    }),
  ];
}
