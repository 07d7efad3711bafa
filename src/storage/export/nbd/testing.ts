import { Command, Option, readU16, readU32 } from "./codec.ts";

/** The client's side of the wire format, for tests: encoders and an incremental reader of answers. */
function be(...parts: readonly [size: 2 | 4 | 8, value: number | bigint][]): Uint8Array {
  const out = Buffer.alloc(parts.reduce((sum, [size]) => sum + size, 0));
  let at = 0;
  for (const [size, value] of parts) {
    if (size === 8) out.writeBigUInt64BE(BigInt(value), at);
    else out.writeUIntBE(Number(value), at, size);
    at += size;
  }
  return out;
}

export function clientFlags(flags = 3): Uint8Array {
  return be([4, flags]);
}

export function option(code: number, data: Uint8Array = new Uint8Array(0)): Uint8Array {
  return Buffer.concat([be([8, 0x49484156454f5054n], [4, code], [4, data.length]), data]);
}

export function infoData(name: string, wants: readonly number[] = []): Uint8Array {
  const text = Buffer.from(name);
  return Buffer.concat([
    be([4, text.length]),
    text,
    be([2, wants.length]),
    ...wants.map((want) => be([2, want])),
  ]);
}

export function request(
  command: number,
  cookie: number,
  offset: number | bigint,
  length: number,
  flags = 0,
  data: Uint8Array = new Uint8Array(0),
): Uint8Array {
  return Buffer.concat([
    be([4, 0x25609513], [2, flags], [2, command], [8, cookie], [8, offset], [4, length]),
    data,
  ]);
}

/** Flags and options up to transmission. */
export function openSession(name: string, structured: boolean): Uint8Array {
  return Buffer.concat([
    clientFlags(),
    ...(structured ? [option(Option.structuredReply)] : []),
    option(Option.go, infoData(name)),
  ]);
}

export interface OptionAnswer {
  readonly option: number;
  readonly type: number;
  readonly data: Uint8Array;
}

export interface Answer {
  readonly cookie: number;
  readonly error: number;
  /** Content by offset; a simple reply's data has the offset 0. */
  readonly chunks: { readonly offset: number; readonly data: Uint8Array }[];
  readonly structured: boolean;
  /** Of an answer to BLOCK_STATUS. */
  readonly extents?: readonly { readonly lengthBytes: number; readonly state: number }[];
}

/** Takes answers apart as they arrive. Simple replies to reads need the reads' lengths. */
export class AnswerReader {
  #buffer: Buffer = Buffer.alloc(0);
  readonly readLengths = new Map<number, number>();
  readonly #partial = new Map<number, Answer["chunks"]>();

  feed(bytes: Uint8Array): void {
    this.#buffer = Buffer.concat([this.#buffer, bytes]);
  }

  get pendingBytes(): number {
    return this.#buffer.length;
  }

  take(size: number): Uint8Array | undefined {
    if (this.#buffer.length < size) return undefined;
    const taken = this.#buffer.subarray(0, size);
    this.#buffer = this.#buffer.subarray(size);
    return taken;
  }

  greeting(): { magic: string; flags: number } | undefined {
    const bytes = this.take(18);
    if (bytes === undefined) return undefined;
    return { magic: Buffer.from(bytes.subarray(0, 16)).toString("latin1"), flags: readU16(bytes, 16) };
  }

  optionAnswer(): OptionAnswer | undefined {
    if (this.#buffer.length < 20) return undefined;
    const length = readU32(this.#buffer, 16);
    const bytes = this.take(20 + length);
    if (bytes === undefined) return undefined;
    if (Buffer.from(bytes.subarray(0, 8)).toString("hex") !== "0003e889045565a9")
      throw new Error("bad reply magic");
    return { option: readU32(bytes, 8), type: readU32(bytes, 12), data: bytes.subarray(20) };
  }

  /** The next finished answer to a request. */
  answer(): Answer | undefined {
    for (;;) {
      if (this.#buffer.length < 16) return undefined;
      const magic = readU32(this.#buffer, 0);
      if (magic === 0x67446698) {
        const error = readU32(this.#buffer, 4);
        const cookie = readU32(this.#buffer, 12);
        const size = error === 0 ? (this.readLengths.get(cookie) ?? 0) : 0;
        const bytes = this.take(16 + size);
        if (bytes === undefined) return undefined;
        const chunks = size === 0 ? [] : [{ offset: 0, data: bytes.subarray(16) }];
        return { cookie, error, chunks, structured: false };
      }
      if (magic !== 0x668e33ef) throw new Error(`bad answer magic 0x${magic.toString(16)}`);
      if (this.#buffer.length < 20) return undefined;
      const length = readU32(this.#buffer, 16);
      const bytes = this.take(20 + length);
      if (bytes === undefined) return undefined;
      const done = (readU16(bytes, 4) & 1) !== 0;
      const type = readU16(bytes, 6);
      const cookie = readU32(bytes, 12);
      const chunks = this.#partial.get(cookie) ?? [];
      let error = 0;
      let extents: Answer["extents"];
      if (type === 5) {
        extents = Array.from({ length: (length - 4) / 8 }, (_, i) => ({
          lengthBytes: readU32(bytes, 24 + 8 * i),
          state: readU32(bytes, 28 + 8 * i),
        }));
      } else if (type === 1) {
        const offset = readU32(bytes, 20) * 2 ** 32 + readU32(bytes, 24);
        chunks.push({ offset, data: bytes.subarray(28) });
      } else if (type === 0x8001) {
        error = readU32(bytes, 20);
      } else {
        throw new Error(`unknown chunk type ${type}`);
      }
      if (!done) {
        this.#partial.set(cookie, chunks);
        continue;
      }
      this.#partial.delete(cookie);
      return { cookie, error, chunks, structured: true, ...(extents === undefined ? {} : { extents }) };
    }
  }
}

/** A connection to an export's socket that leaves pace and content to the test. */
export class RawClient implements Disposable {
  readonly reader = new AnswerReader();
  #socket!: Bun.Socket<undefined>;
  #queue: Uint8Array[] = [];
  #wake: () => void = () => undefined;
  closed = false;

  static async connect(socketPath: string): Promise<RawClient> {
    const client = new RawClient();
    const gone = () => {
      client.closed = true;
      client.#wake();
    };
    client.#socket = await Bun.connect<undefined>({
      unix: socketPath,
      socket: {
        data: (_, chunk) => {
          client.reader.feed(chunk);
          client.#wake();
        },
        drain: () => client.#flush(),
        end: gone,
        close: gone,
        error: gone,
      },
    });
    return client;
  }

  /** Through the handshake into transmission. */
  static async open(socketPath: string, name: string, structured = true): Promise<RawClient> {
    const client = await RawClient.connect(socketPath);
    client.send(openSession(name, structured));
    await client.next(() => client.reader.greeting());
    for (;;) {
      const answer = await client.next(() => client.reader.optionAnswer());
      if (answer.type >= 0x80000000)
        throw new Error(`option refused: ${Buffer.from(answer.data).toString()}`);
      if (answer.option === Option.go && answer.type === 1) return client;
    }
  }

  #flush(): void {
    while (this.#queue.length > 0) {
      const head = this.#queue[0]!;
      const taken = Math.max(0, this.#socket.write(head));
      if (taken < head.length) {
        this.#queue[0] = head.subarray(taken);
        return;
      }
      this.#queue.shift();
    }
  }

  send(bytes: Uint8Array): void {
    this.#queue.push(bytes);
    if (this.#queue.length === 1) this.#flush();
  }

  /** Waits until `take` finds something in what has arrived. */
  async next<T>(take: () => T | undefined, timeoutMs = 10_000): Promise<T> {
    const giveUpAt = performance.now() + timeoutMs;
    for (;;) {
      const found = take();
      if (found !== undefined) return found;
      if (this.closed) throw new Error("the server closed the connection");
      const leftMs = giveUpAt - performance.now();
      if (leftMs <= 0) throw new Error("no answer in time");
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, leftMs);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  answer(timeoutMs?: number): Promise<Answer> {
    return this.next(() => this.reader.answer(), timeoutMs);
  }

  async untilClosed(timeoutMs = 10_000): Promise<void> {
    await this.next(() => (this.closed ? true : undefined), timeoutMs);
  }

  async read(cookie: number, offset: number, length: number): Promise<Uint8Array> {
    this.reader.readLengths.set(cookie, length);
    this.send(request(Command.read, cookie, offset, length));
    const answer = await this.answer();
    if (answer.error !== 0) throw new Error(`read failed with ${answer.error}`);
    return Buffer.concat(answer.chunks.map(({ data }) => data));
  }

  pause(): void {
    this.#socket.pause();
  }

  resume(): void {
    this.#socket.resume();
  }

  [Symbol.dispose](): void {
    this.#socket.terminate();
  }
}
