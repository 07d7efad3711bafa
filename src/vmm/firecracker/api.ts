import { z } from "zod";
import { AenvError } from "../../lib/errors.ts";

const faultSchema = z.object({ fault_message: z.string() });

/**
 * Firecracker's API on its unix socket (src/firecracker/swagger/firecracker.yaml of upstream): JSON requests,
 * `204` without a body or `200` with one, errors as `{"fault_message": …}`.
 */
export class FirecrackerApi {
  readonly #socketPath: string;
  readonly #vmId: string;

  constructor(socketPath: string, vmId: string) {
    this.#socketPath = socketPath;
    this.#vmId = vmId;
  }

  /** Errors: `firecracker_refused` with Firecracker's words, `vm_unreachable` when nobody answers. */
  async call(
    method: "GET" | "PUT" | "PATCH",
    path: string,
    body?: Readonly<Record<string, unknown>>,
    timeoutMs = 10_000,
  ): Promise<unknown> {
    let status: number;
    let text: string;
    try {
      const response = await fetch(`http://localhost${path}`, {
        method,
        unix: this.#socketPath,
        headers: { accept: "application/json", "content-type": "application/json" },
        ...(body === undefined ? {} : { body: JSON.stringify(body) }),
        signal: AbortSignal.timeout(timeoutMs),
      });
      status = response.status;
      text = await response.text();
    } catch (cause) {
      throw new AenvError({
        code: "vm_unreachable",
        message: `VM ${this.#vmId} does not answer ${method} ${path} on its API socket`,
        cause,
      });
    }
    let answer: unknown;
    try {
      answer = text === "" ? undefined : JSON.parse(text);
    } catch {
      answer = undefined;
    }
    if (status >= 200 && status < 300) return answer;
    const fault = faultSchema.safeParse(answer);
    throw new AenvError({
      code: "firecracker_refused",
      message: `Firecracker refuses ${method} ${path} of VM ${this.#vmId} (${status}): ${fault.success ? fault.data.fault_message : text.slice(0, 500)}`,
    });
  }
}
