import { closeSync, constants, fstatSync, openSync } from "node:fs";
import { z } from "zod";
import { AenvError } from "../../lib/errors.ts";

const faultSchema = z.object({ fault_message: z.string() });

/** Answers are a few hundred bytes; what a process that was taken over says may have no end. */
const ANSWER_BYTES = 1 << 20;
/** Linux' O_PATH, which node:fs does not name. */
export const O_PATH = 0o10000000;

async function boundedText(response: Response): Promise<string> {
  const chunks: Uint8Array[] = [];
  let total = 0;
  for await (const chunk of response.body ?? []) {
    total += chunk.length;
    if (total > ANSWER_BYTES) throw new Error(`the answer has more than ${ANSWER_BYTES} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString("utf8");
}

/**
 * A descriptor of the socket itself (close it). The name lies where the process may put something else in its place: a
 * link that leads to a socket of the host's is not followed.
 */
function openSocket(path: string): number {
  const fd = openSync(path, O_PATH | constants.O_NOFOLLOW);
  if (fstatSync(fd).isSocket()) return fd;
  closeSync(fd);
  throw new AenvError({ code: "vmm_untrusted", message: `${path} is no socket` });
}

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
    let socket: number | undefined;
    try {
      socket = openSocket(this.#socketPath);
      const response = await fetch(`http://localhost${path}`, {
        method,
        unix: `/proc/self/fd/${socket}`,
        // Numbers of descriptors are used again, for other VMs.
        keepalive: false,
        headers: { accept: "application/json", "content-type": "application/json" },
        ...(body === undefined ? {} : { body: JSON.stringify(body) }),
        signal: AbortSignal.timeout(timeoutMs),
      });
      status = response.status;
      text = await boundedText(response);
    } catch (cause) {
      throw new AenvError({
        code: "vm_unreachable",
        message: `VM ${this.#vmId} does not answer ${method} ${path} on its API socket`,
        cause,
      });
    } finally {
      if (socket !== undefined) closeSync(socket);
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
