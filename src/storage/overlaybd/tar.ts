import { badRequest, invalidLayer } from "./errors.ts";
import { type FileRangeVisitor, type ReadSource, readUpTo } from "./source.ts";

/**
 * Tar wrapping of a layer: [pax header, its record block,] file header, payload, zeros. Only the first 512
 * bytes decide whether it is a tar; payload start is fixed (1536 behind a pax header, else 512), its size is
 * the pax `size` record, else the size field. Later members are ignored.
 */
const TAR_BLOCK = 512;
const PAX_PAYLOAD_OFFSET = 3 * TAR_BLOCK;
export const TAR_HEAD_BYTES = PAX_PAYLOAD_OFFSET;

interface TarPayload {
  readonly offsetBytes: number;
  readonly sizeBytes: number;
}

function parseOctal(field: Uint8Array): number | undefined {
  const text = Buffer.from(field).toString("latin1").replaceAll("\0", " ").trim();
  return /^[0-7]{1,12}$/.test(text) ? Number.parseInt(text, 8) : undefined;
}

/** The checksum of a header: the sum of its bytes with the checksum field taken as blanks. */
function checksum(block: Uint8Array, signed: boolean): number {
  let sum = 0;
  for (let i = 0; i < TAR_BLOCK; i++) {
    const byte = i >= 148 && i < 156 ? 32 : block[i]!;
    sum += signed && byte > 127 ? byte - 256 : byte;
  }
  return sum;
}

function isTarHeader(block: Uint8Array): boolean {
  if (block.byteLength < TAR_BLOCK) return false;
  const text = Buffer.from(block.buffer, block.byteOffset + 257, 8).toString("latin1");
  if (text.slice(0, 5) !== "ustar" || text.slice(6, 8) !== "00") return false;
  const stored = parseOctal(block.subarray(148, 156));
  return stored !== undefined && (stored === checksum(block, false) || stored === checksum(block, true));
}

/** Value of the pax record `size`, undefined when there is none. */
function paxSize(records: string): number | undefined {
  let found: number | undefined;
  for (let rest = records; rest.length > 0 && rest[0] !== "\0"; ) {
    const length = /^(\d{1,6}) /.exec(rest);
    if (length === null) return found;
    const record = rest.slice(length[0].length, Number(length[1]));
    const size = /^size=(\d{1,16})\n$/.exec(record);
    if (size !== null) found = Number(size[1]);
    if (Number(length[1]) <= length[0].length) return found;
    rest = rest.slice(Number(length[1]));
  }
  return found;
}

/** Where the payload lies when the source begins with a tar header, undefined when it is no tar. */
export function findTarPayload(source: ReadSource): TarPayload | undefined {
  const first = readUpTo(source, 0, TAR_BLOCK);
  if (!isTarHeader(first)) return undefined;
  let offsetBytes = TAR_BLOCK;
  let header = first;
  let size: number | undefined;
  if (String.fromCharCode(first[156]!) === "x") {
    const recordBytes = parseOctal(first.subarray(124, 136));
    if (recordBytes === undefined || recordBytes > TAR_BLOCK) {
      throw invalidLayer(source.name, 124, "tar pax header is longer than the one block a layer has");
    }
    offsetBytes = PAX_PAYLOAD_OFFSET;
    size = paxSize(Buffer.from(readUpTo(source, TAR_BLOCK, recordBytes)).toString("latin1"));
    header = readUpTo(source, 2 * TAR_BLOCK, TAR_BLOCK);
    if (header.byteLength < TAR_BLOCK)
      throw invalidLayer(source.name, 2 * TAR_BLOCK, "tar ends in its headers");
    if (Buffer.from(header.subarray(257, 262)).toString("latin1") === "xxtar") {
      throw invalidLayer(source.name, 2 * TAR_BLOCK + 257, "tar is unfinished: its writer was interrupted");
    }
  }
  if (size === undefined || size === 0) size = parseOctal(header.subarray(124, 136));
  if (size === undefined)
    throw invalidLayer(source.name, offsetBytes - TAR_BLOCK + 124, "tar size is not a number");
  if (offsetBytes + size > source.sizeBytes) {
    throw invalidLayer(
      source.name,
      offsetBytes,
      `tar payload of ${size} bytes is cut: the file has ${source.sizeBytes} bytes`,
    );
  }
  return { offsetBytes, sizeBytes: size };
}

/** The payload of a tar as a source of its own. Owns `source`. */
export class TarSource implements ReadSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly direct?: { readonly fd: number; readonly baseBytes: number };
  readonly #source: ReadSource;
  readonly #base: number;

  constructor(source: ReadSource, payload: TarPayload) {
    this.name = `${source.name} (tar payload)`;
    this.sizeBytes = payload.sizeBytes;
    this.#source = source;
    this.#base = payload.offsetBytes;
    if (source.direct !== undefined) {
      this.direct = { fd: source.direct.fd, baseBytes: source.direct.baseBytes + payload.offsetBytes };
    }
  }

  #check(offsetBytes: number, lengthBytes: number): void {
    if (offsetBytes < 0 || offsetBytes + lengthBytes > this.sizeBytes) {
      throw invalidLayer(
        this.name,
        offsetBytes,
        `${lengthBytes} bytes wanted, the payload ends at ${this.sizeBytes}`,
      );
    }
  }

  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void {
    this.#check(offsetBytes, lengthBytes);
    this.#source.read(this.#base + offsetBytes, target, targetOffset, lengthBytes);
  }

  tryRead(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): boolean {
    this.#check(offsetBytes, lengthBytes);
    return this.#source.tryRead(this.#base + offsetBytes, target, targetOffset, lengthBytes);
  }

  locate(offsetBytes: number, lengthBytes: number, visit: FileRangeVisitor): void {
    this.#source.locate(this.#base + offsetBytes, lengthBytes, visit);
  }

  [Symbol.dispose](): void {
    this.#source[Symbol.dispose]();
  }
}

function tarHeader(fields: { name: string; type: string; size: number; regular: boolean }): Uint8Array {
  const block = new Uint8Array(TAR_BLOCK);
  const put = (at: number, text: string) => block.set(Buffer.from(text, "latin1"), at);
  // Numbers as the reference writer has them: octal, blanks on the left, a blank behind; short fields end in NUL.
  const octal = (at: number, width: 8 | 12, value: number) =>
    put(at, `${value.toString(8).padStart(width === 8 ? 6 : 11, " ")} `);
  put(0, fields.name);
  if (fields.regular) {
    octal(100, 8, 0o100644);
    octal(108, 8, 0);
    octal(116, 8, 0);
    octal(136, 12, 0);
    put(265, "root");
    put(297, "root");
  }
  octal(124, 12, fields.size);
  put(156, fields.type);
  put(257, "ustar\0" + "00");
  octal(148, 8, checksum(block, false));
  return block;
}

/** The 1536 bytes before a payload of `sizeBytes`, in the form that registries hold. */
export function encodeTarHead(sizeBytes: number): Uint8Array {
  if (!Number.isSafeInteger(sizeBytes) || sizeBytes < 0)
    throw badRequest("invalid_size", `tar payload ${sizeBytes}`);
  const body = ` size=${sizeBytes}\n`;
  let length = body.length + 1;
  while (`${length}${body}`.length !== length) length++;
  const head = new Uint8Array(TAR_HEAD_BYTES);
  head.set(tarHeader({ name: "overlaybd.pax", type: "x", size: length, regular: false }), 0);
  head.set(Buffer.from(`${length}${body}`, "latin1"), TAR_BLOCK);
  head.set(tarHeader({ name: "overlaybd.commit", type: "0", size: 0, regular: true }), 2 * TAR_BLOCK);
  return head;
}

/** What follows a payload: zeros to the next block and the two end blocks. */
export function tarTailBytes(sizeBytes: number): number {
  return ((TAR_BLOCK - (sizeBytes % TAR_BLOCK)) % TAR_BLOCK) + 2 * TAR_BLOCK;
}
