import type { Socket } from "bun";
import { BLOCKD_MAX_MESSAGE_BYTES } from "./protocol.ts";

/**
 * Framing of the control socket: 4 bytes little-endian length, then that many bytes of JSON.
 */
const LENGTH_BYTES = 4;
/** A peer that does not read its answers is cut off beyond this. */
const MAX_QUEUED_BYTES = 16 << 20;

export class FramingError extends Error {
  constructor(message: string) {
    super(message);
    this.name = "FramingError";
  }
}

export function encodeFrame(message: unknown): Uint8Array {
  const body = Buffer.from(JSON.stringify(message));
  if (body.length > BLOCKD_MAX_MESSAGE_BYTES) {
    throw new FramingError(`message of ${body.length} bytes is over ${BLOCKD_MAX_MESSAGE_BYTES}`);
  }
  const frame = Buffer.allocUnsafe(LENGTH_BYTES + body.length);
  frame.writeUInt32LE(body.length, 0);
  body.copy(frame, LENGTH_BYTES);
  return frame;
}

/** Puts messages together from chunks of any size. Holds at most one message. */
export class FrameDecoder {
  #pending: Buffer = Buffer.alloc(0);

  /** Throws FramingError on a length out of bounds or a body that is not JSON: the stream is lost then. */
  *feed(chunk: Uint8Array): Generator<unknown> {
    let input: Buffer =
      this.#pending.length === 0 ? Buffer.from(chunk) : Buffer.concat([this.#pending, chunk]);
    this.#pending = Buffer.alloc(0);
    while (input.length >= LENGTH_BYTES) {
      const length = input.readUInt32LE(0);
      if (length === 0 || length > BLOCKD_MAX_MESSAGE_BYTES) {
        throw new FramingError(`message length ${length} is not between 1 and ${BLOCKD_MAX_MESSAGE_BYTES}`);
      }
      if (input.length < LENGTH_BYTES + length) break;
      const body = input.subarray(LENGTH_BYTES, LENGTH_BYTES + length).toString("utf8");
      input = input.subarray(LENGTH_BYTES + length);
      let message: unknown;
      try {
        message = JSON.parse(body);
      } catch (cause) {
        throw new FramingError(`message is not JSON: ${cause instanceof Error ? cause.message : cause}`);
      }
      yield message;
    }
    this.#pending = input;
  }
}

/** Sends frames in order over a socket that may take only part of them. */
export class FrameWriter {
  readonly #socket: Pick<Socket, "write" | "terminate">;
  #queue: Uint8Array[] = [];
  #queuedBytes = 0;

  constructor(socket: Pick<Socket, "write" | "terminate">) {
    this.#socket = socket;
  }

  get idle(): boolean {
    return this.#queue.length === 0;
  }

  send(frame: Uint8Array): void {
    this.#queue.push(frame);
    this.#queuedBytes += frame.length;
    if (this.#queue.length === 1) this.drain();
    if (this.#queuedBytes > MAX_QUEUED_BYTES) this.#socket.terminate();
  }

  /** To be called when the socket takes bytes again. */
  drain(): void {
    while (this.#queue.length > 0) {
      const frame = this.#queue[0]!;
      const taken = Math.max(0, this.#socket.write(frame));
      this.#queuedBytes -= taken;
      if (taken < frame.length) {
        this.#queue[0] = frame.subarray(taken);
        return;
      }
      this.#queue.shift();
    }
  }
}
