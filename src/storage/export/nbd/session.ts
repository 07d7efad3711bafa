import {
  ALLOCATION_CONTEXT,
  CLIENT_FLAGS_BYTES,
  Command,
  CommandFlag,
  type Cookie,
  DATA_CHUNK_HEADER_BYTES,
  decodeClientFlags,
  decodeInfoRequest,
  decodeMetaContexts,
  decodeOptionHeader,
  decodeRequest,
  type ExportDescription,
  encodeDataChunkHeader,
  encodeErrorChunk,
  encodeExportNameReply,
  encodeGreeting,
  encodeInfoReplies,
  encodeListEntry,
  encodeMetaContext,
  encodeOptionError,
  encodeOptionReply,
  encodeSimpleReply,
  encodeStatusChunk,
  MAX_PAYLOAD_BYTES,
  MAX_STATUS_EXTENTS,
  NbdErrno,
  NbdProtocolError,
  type NbdRequest,
  newRequest,
  OPTION_HEADER_BYTES,
  Option,
  type OptionHeader,
  OptionReply,
  REQUEST_BYTES,
  SIMPLE_REPLY_BYTES,
  statusChunkBytes,
  TransmissionFlag,
} from "./codec.ts";
import { nbdErrnoOf } from "./errors.ts";
import { type BufferPool, HEADROOM_BYTES } from "./pool.ts";
import type { NbdEvent, NbdTarget } from "./types.ts";

/** How a session reaches its peer. Nothing is queued behind it. */
export interface SessionTransport {
  /** Sends what fits now; returns how many bytes that were. Short or 0: wait for `onDrain`. */
  write(bytes: Uint8Array, offset: number, length: number): number;
  pause(): void;
  resume(): void;
  close(): void;
  /** Runs `step` in a later turn, after the other connections that wait for theirs. */
  defer(step: () => void): void;
}

export interface SessionOptions {
  readonly target: NbdTarget;
  readonly transport: SessionTransport;
  readonly pool: BufferPool;
  readonly onEvent: (event: NbdEvent) => void;
}

/** Replies are gathered up to this size and sent at once. */
const OUTPUT_BYTES = 128 << 10;
/** Structured replies to large reads go out in pieces, so that a slow reader holds one piece and not 32 MiB. */
const READ_PIECE_BYTES = 1 << 20;
/**
 * What a connection may do before others get their turn, in bytes moved; every request counts as a block more.
 * Who overdraws (one request may be 32 MiB) sits out turns until the debt is paid.
 */
const TURN_CREDIT_BYTES = 1 << 20;
const REQUEST_COST_BYTES = 4096;
/** Writes reach the device in pieces that end where such a block ends. */
const BLOCK_BYTES = 4096;
/** Requests that wait for a disk; further ones are not looked at. */
const MAX_PENDING = 64;
/** The same by memory that they hold. */
const MAX_PENDING_BYTES = 32 << 20;
/** A late answer up to this size is copied to the others, a larger one is sent from its own buffer. */
const COPY_BYTES = 64 << 10;
/** Input that arrived while the session was paused. The socket's own receive buffer is the limit in practice. */
const MAX_BACKLOG_BYTES = 4 << 20;
/** Largest reply that is not a read's data: always kept free before a request is looked at. */
const SMALL_REPLY_BYTES = 64;
const EMPTY = new Uint8Array(0);

type Phase = "flags" | "option" | "optionData" | "request" | "payload" | "skip" | "closed";

/** An answer that came later than its request's turn: data with its header in `buffer`, or a number. */
interface Late {
  readonly buffer: Uint8Array | undefined;
  readonly start: number;
  readonly length: number;
  readonly request: NbdRequest;
  readonly error: NbdErrno;
  /** It is in the output (or nobody is there to take it). */
  readonly taken: () => void;
}

/**
 * One NBD connection as a state machine without I/O: bytes in at {@link onData} in chunks of any size,
 * bytes out through the transport. What needs no waiting is executed and answered in the order it came;
 * requests that have to wait for a disk are answered when they are done, while others go on. While the peer
 * does not take replies nothing new is executed and no input is read, so that a session holds a bounded
 * amount of replies, payload and input.
 */
export class NbdSession {
  readonly #target: NbdTarget;
  readonly #transport: SessionTransport;
  readonly #pool: BufferPool;
  readonly #onEvent: (event: NbdEvent) => void;

  #phase: Phase = "flags";
  #noZeroes = false;
  #structured = false;
  #option: OptionHeader = { option: 0, lengthBytes: 0 };
  readonly #request: NbdRequest = newRequest();

  /** Headers and option data that did not arrive in one piece. */
  #partial: Uint8Array = new Uint8Array(REQUEST_BYTES);
  #partialFill = 0;
  /** Of the current write: bytes written, and those of the block that has not arrived whole. */
  #payloadDone = 0;
  readonly #block = new Uint8Array(new ArrayBuffer(BLOCK_BYTES));
  #blockFill = 0;
  #skipBytes = 0;
  #skipError: NbdErrno = NbdErrno.none;
  /** Bytes of the current read that were put into the output; undefined when no read is under way. */
  #readDone: number | undefined;
  /** The client chose the metadata context. */
  #allocationContext = false;

  /** Requests that wait for a disk, and the buffers they hold. */
  #pending = 0;
  #pendingBytes = 0;
  #late: Late[] = [];
  #pumping = false;
  /** The client said goodbye: what is pending is still answered. */
  #leaving = false;
  #credit = TURN_CREDIT_BYTES;

  #output: Uint8Array | undefined;
  #outputStart = 0;
  #outputEnd = 0;
  #blocked = false;
  #paused = false;
  #deferred = false;
  #backlog: Uint8Array = EMPTY;

  constructor(options: SessionOptions) {
    this.#target = options.target;
    this.#transport = options.transport;
    this.#pool = options.pool;
    this.#onEvent = options.onEvent;
  }

  /** False until the client picked the export. */
  get negotiated(): boolean {
    return this.#phase === "request" || this.#phase === "payload" || this.#phase === "skip";
  }

  start(): void {
    this.#append(encodeGreeting());
    this.#send();
  }

  /** `chunk` is only read during the call. */
  onData(chunk: Uint8Array): void {
    if (this.#phase === "closed") return;
    if (this.#paused) {
      if (this.#backlog.length + chunk.length > MAX_BACKLOG_BYTES) {
        this.#fail(new NbdProtocolError("client sent more than its answers let through"));
        return;
      }
      const joined = new Uint8Array(this.#backlog.length + chunk.length);
      joined.set(this.#backlog);
      joined.set(chunk, this.#backlog.length);
      this.#backlog = joined;
      return;
    }
    this.#advance(chunk, false);
  }

  /** The transport takes bytes again. */
  onDrain(): void {
    if (this.#phase === "closed" || !this.#blocked) return;
    this.#pump();
  }

  /** The connection is gone: buffers go back to the pool. */
  onClosed(): void {
    this.#phase = "closed";
    this.#backlog = EMPTY;
    if (this.#output !== undefined) this.#pool.give(this.#output);
    this.#output = undefined;
    for (const late of this.#late.splice(0)) this.#drop(late);
  }

  #advance(input: Uint8Array, owned: boolean): void {
    let used: number;
    try {
      used = this.#consume(input);
      if (this.#isClosed()) return;
      this.#send();
      if (this.#isClosed() || this.#leave()) return;
    } catch (error) {
      this.#fail(error);
      return;
    }
    const idle = used === input.length && !this.#blocked && this.#readDone === undefined;
    if (idle) {
      this.#backlog = EMPTY;
      if (this.#paused) {
        this.#paused = false;
        this.#transport.resume();
      }
      return;
    }
    this.#backlog = owned ? input.subarray(used) : input.slice(used);
    if (!this.#paused) {
      this.#paused = true;
      this.#transport.pause();
    }
    // Who waits for the peer or for a disk is woken by what it waits for.
    if (!this.#blocked && !this.#full() && !this.#deferred) {
      this.#deferred = true;
      this.#transport.defer(() => {
        this.#deferred = false;
        if (!this.#isClosed() && !this.#blocked) this.#advance(this.#backlog, true);
      });
    }
  }

  /** So much waits for disks that nothing new is begun. */
  #full(): boolean {
    return this.#pending >= MAX_PENDING || this.#pendingBytes >= MAX_PENDING_BYTES;
  }

  /** Ends a connection whose client said goodbye, once everything before was answered. */
  #leave(): boolean {
    if (!this.#leaving || this.#pending > 0 || this.#late.length > 0 || this.#blocked) return false;
    this.#close();
    return true;
  }

  #isClosed(): boolean {
    return this.#phase === "closed";
  }

  /** Works through `input` until it is used up, the output is full or the turn is over; returns bytes used. */
  #consume(input: Uint8Array): number {
    let at = 0;
    this.#credit = Math.min(TURN_CREDIT_BYTES, this.#credit + TURN_CREDIT_BYTES);
    while (this.#credit > 0) {
      if (this.#isClosed() || this.#leaving) return input.length;
      if (this.#full() || !this.#room(SMALL_REPLY_BYTES)) return at;
      if (this.#readDone !== undefined) {
        if (!this.#continueRead()) return at;
        continue;
      }
      const before = at;
      switch (this.#phase) {
        case "flags": {
          const header = this.#gather(input, at, CLIENT_FLAGS_BYTES);
          at = header.next;
          if (header.bytes === undefined) return at;
          this.#noZeroes = decodeClientFlags(header.bytes, header.at).noZeroes;
          this.#phase = "option";
          break;
        }
        case "option": {
          const header = this.#gather(input, at, OPTION_HEADER_BYTES);
          at = header.next;
          if (header.bytes === undefined) return at;
          this.#option = decodeOptionHeader(header.bytes, header.at);
          this.#phase = "optionData";
          break;
        }
        case "optionData": {
          const data = this.#gather(input, at, this.#option.lengthBytes);
          at = data.next;
          if (data.bytes === undefined) return at;
          this.#phase = "option";
          this.#negotiate(data.bytes.subarray(data.at, data.at + this.#option.lengthBytes));
          break;
        }
        case "request": {
          const header = this.#gather(input, at, REQUEST_BYTES);
          at = header.next;
          if (header.bytes === undefined) return at;
          decodeRequest(header.bytes, header.at, this.#request);
          this.#credit -= REQUEST_COST_BYTES;
          this.#begin();
          break;
        }
        case "payload":
          at = this.#fillPayload(input, at);
          if (at === before) return at;
          break;
        case "skip": {
          const skipped = Math.min(this.#skipBytes, input.length - at);
          this.#credit -= skipped;
          this.#skipBytes -= skipped;
          at += skipped;
          if (this.#skipBytes > 0) return at;
          this.#phase = "request";
          this.#reply(this.#skipError);
          break;
        }
        case "closed":
          return input.length;
      }
    }
    return at;
  }

  /** `size` bytes in one piece: straight from the input where they lie there, else put together. */
  #gather(input: Uint8Array, at: number, size: number): { bytes?: Uint8Array; at: number; next: number } {
    const available = input.length - at;
    if (this.#partialFill === 0 && available >= size) return { bytes: input, at, next: at + size };
    if (this.#partial.length < size) {
      const larger = new Uint8Array(size);
      larger.set(this.#partial.subarray(0, this.#partialFill));
      this.#partial = larger;
    }
    const taken = Math.min(size - this.#partialFill, available);
    this.#partial.set(input.subarray(at, at + taken), this.#partialFill);
    this.#partialFill += taken;
    if (this.#partialFill < size) return { at, next: at + taken };
    this.#partialFill = 0;
    return { bytes: this.#partial, at: 0, next: at + taken };
  }

  // ---- negotiation ------------------------------------------------------------------------------

  #description(): ExportDescription {
    let flags =
      TransmissionFlag.hasFlags |
      TransmissionFlag.sendFlush |
      TransmissionFlag.sendFua |
      // One thread executes everything: what one connection wrote, all see, and a flush is everybody's.
      TransmissionFlag.canMultiConn;
    flags |= this.#target.readOnly
      ? TransmissionFlag.readOnly
      : TransmissionFlag.sendTrim | TransmissionFlag.sendWriteZeroes;
    if (this.#structured) flags |= TransmissionFlag.sendDf;
    return { name: this.#target.exportName, sizeBytes: this.#target.sizeBytes, flags };
  }

  /** The empty name stands for the only export there is. */
  #isExport(name: string): boolean {
    return name === "" || name === this.#target.exportName;
  }

  #negotiate(data: Uint8Array): void {
    const { option } = this.#option;
    switch (option) {
      case Option.exportName: {
        const name = new TextDecoder().decode(data);
        if (!this.#isExport(name))
          throw new NbdProtocolError(`client asked for unknown export ${JSON.stringify(name)}`);
        this.#append(encodeExportNameReply(this.#description(), this.#noZeroes));
        this.#phase = "request";
        return;
      }
      case Option.abort:
        this.#append(encodeOptionReply(option, OptionReply.ack));
        this.#send();
        this.#close();
        return;
      case Option.list:
        if (data.length !== 0) {
          this.#append(encodeOptionError(option, OptionReply.errInvalid, "LIST takes no data"));
          return;
        }
        this.#append(encodeListEntry(this.#target.exportName));
        this.#append(encodeOptionReply(option, OptionReply.ack));
        return;
      case Option.structuredReply:
        if (data.length !== 0) {
          this.#append(encodeOptionError(option, OptionReply.errInvalid, "STRUCTURED_REPLY takes no data"));
          return;
        }
        this.#structured = true;
        this.#append(encodeOptionReply(option, OptionReply.ack));
        return;
      case Option.listMetaContext:
      case Option.setMetaContext:
        this.#metaContexts(option, data);
        return;
      case Option.info:
      case Option.go: {
        const request = decodeInfoRequest(data);
        if (request === undefined) {
          this.#append(encodeOptionError(option, OptionReply.errInvalid, "malformed data"));
          return;
        }
        if (!this.#isExport(request.name)) {
          this.#append(encodeOptionError(option, OptionReply.errUnknown, "no such export here"));
          return;
        }
        for (const reply of encodeInfoReplies(option, this.#description(), request.wants))
          this.#append(reply);
        this.#append(encodeOptionReply(option, OptionReply.ack));
        if (option === Option.go) this.#phase = "request";
        return;
      }
      default:
        this.#append(encodeOptionError(option, OptionReply.errUnsupported, "not supported"));
    }
  }

  #metaContexts(option: number, data: Uint8Array): void {
    const request = decodeMetaContexts(data);
    if (request === undefined || !this.#structured) {
      const why = request === undefined ? "malformed data" : "negotiate structured replies first";
      this.#append(encodeOptionError(option, OptionReply.errInvalid, why));
      return;
    }
    if (!this.#isExport(request.name)) {
      this.#append(encodeOptionError(option, OptionReply.errUnknown, "no such export here"));
      return;
    }
    const set = option === Option.setMetaContext;
    // A listing may ask for everything, or for a whole namespace.
    const wanted = set
      ? request.queries.includes(ALLOCATION_CONTEXT)
      : request.queries.length === 0 ||
        request.queries.some((q) => q === "base:" || q === ALLOCATION_CONTEXT);
    if (set) this.#allocationContext = wanted;
    if (wanted) this.#append(encodeMetaContext(option));
    this.#append(encodeOptionReply(option, OptionReply.ack));
  }

  // ---- requests ---------------------------------------------------------------------------------

  /** A request's header is in `#request`. */
  #begin(): void {
    const request = this.#request;
    const error = this.#check(request);
    if (request.command === Command.write) {
      if (request.lengthBytes > MAX_PAYLOAD_BYTES) {
        throw new NbdProtocolError(`write of ${request.lengthBytes} bytes is over ${MAX_PAYLOAD_BYTES}`);
      }
      if (error !== NbdErrno.none) {
        this.#skipBytes = request.lengthBytes;
        this.#skipError = error;
        this.#phase = "skip";
      } else if (request.lengthBytes === 0) {
        this.#reply(NbdErrno.none);
      } else {
        this.#payloadDone = 0;
        this.#blockFill = 0;
        this.#phase = "payload";
      }
      return;
    }
    if (error !== NbdErrno.none) {
      this.#reply(error);
      return;
    }
    switch (request.command) {
      case Command.read:
        this.#readDone = 0;
        return;
      case Command.disconnect:
        this.#leaving = true;
        return;
      case Command.flush:
        this.#flushLate();
        return;
      case Command.blockStatus:
        this.#blockStatus();
        return;
      case Command.trim:
        this.#change("trim", (own) => this.#target.trim(own.offsetBytes, own.lengthBytes));
        return;
      case Command.writeZeroes:
        // NO_HOLE needs nothing: space of an append-only layer is never promised in place.
        this.#change("write zeroes", (own) => this.#target.writeZeroes(own.offsetBytes, own.lengthBytes));
        return;
    }
  }

  /** What the header alone says is wrong. The numbers are those the protocol document names. */
  #check(request: NbdRequest): NbdErrno {
    const { command, flags, offsetBytes, lengthBytes } = request;
    let allowed: number = CommandFlag.fua;
    switch (command) {
      case Command.read:
        if (this.#structured) allowed |= CommandFlag.df;
        break;
      case Command.writeZeroes:
        allowed |= CommandFlag.noHole;
        break;
      case Command.blockStatus:
        if (!this.#allocationContext || lengthBytes === 0) return NbdErrno.EINVAL;
        allowed |= CommandFlag.reqOne;
        break;
      case Command.write:
      case Command.trim:
      case Command.flush:
      case Command.disconnect:
        break;
      default:
        return NbdErrno.EINVAL;
    }
    if ((flags & ~allowed) !== 0) return NbdErrno.EINVAL;
    const writes = command === Command.write || command === Command.writeZeroes;
    if ((writes || command === Command.trim) && this.#target.readOnly) return NbdErrno.EPERM;
    if (command === Command.flush || command === Command.disconnect) return NbdErrno.none;
    if (offsetBytes + lengthBytes > this.#target.sizeBytes) return writes ? NbdErrno.ENOSPC : NbdErrno.EINVAL;
    if (command === Command.read && (lengthBytes === 0 || lengthBytes > MAX_PAYLOAD_BYTES))
      return NbdErrno.EINVAL;
    return NbdErrno.none;
  }

  /**
   * Writes what has arrived of the payload, in whole blocks straight from the input; what is left of a block
   * waits for the rest of it. Of a write that fails half-way or whose client goes away a part may be done, as
   * with any disk: nobody was told that it is.
   */
  #fillPayload(input: Uint8Array, at: number): number {
    const { offsetBytes, lengthBytes } = this.#request;
    let from = at;
    while (from < input.length && this.#payloadDone < lengthBytes) {
      const start = this.#payloadDone;
      const available = Math.min(input.length - from, lengthBytes - start - this.#blockFill);
      const toBlockEnd = BLOCK_BYTES - ((offsetBytes + start + this.#blockFill) % BLOCK_BYTES);
      const last = start + this.#blockFill + available === lengthBytes;
      if (this.#blockFill > 0 || (available < toBlockEnd && !last)) {
        const taken = Math.min(available, toBlockEnd);
        this.#block.set(input.subarray(from, from + taken), this.#blockFill);
        this.#blockFill += taken;
        from += taken;
        const complete = taken === toBlockEnd || start + this.#blockFill === lengthBytes;
        if (complete) {
          const whole = this.#block.subarray(0, this.#blockFill);
          this.#blockFill = 0;
          if (!this.#writePiece(whole)) return from;
        }
        continue;
      }
      const taken = last ? available : available - ((offsetBytes + start + available) % BLOCK_BYTES);
      from += taken;
      if (!this.#writePiece(input.subarray(from - taken, from))) return from;
    }
    return from;
  }

  /** Writes the next piece of the payload and, after the last, answers. False: it failed, the rest is skipped. */
  #writePiece(piece: Uint8Array): boolean {
    const { offsetBytes, lengthBytes } = this.#request;
    const offset = offsetBytes + this.#payloadDone;
    this.#payloadDone += piece.length;
    this.#credit -= piece.length;
    const error = this.#attempt("write", this.#request, () => this.#target.write(offset, piece));
    if (this.#payloadDone === lengthBytes) {
      this.#phase = "request";
      this.#finishChange(error);
    } else if (error !== NbdErrno.none) {
      this.#skipBytes = lengthBytes - this.#payloadDone;
      this.#skipError = error;
      this.#phase = "skip";
    }
    return error === NbdErrno.none;
  }

  /** Runs a change of the content and answers it: at once, or after a flush when it is to be durable (FUA). */
  #change(operation: string, action: (own: NbdRequest) => void): void {
    this.#finishChange(this.#attempt(operation, this.#request, action));
  }

  #finishChange(error: NbdErrno): void {
    if (error === NbdErrno.none && (this.#request.flags & CommandFlag.fua) !== 0) this.#flushLate();
    else this.#reply(error);
  }

  /** The current request is answered when everything written so far is durable. */
  #flushLate(): void {
    const own = { ...this.#request };
    this.#pending++;
    void this.#flush(own).then((error) => {
      this.#pending--;
      this.#answerLate({
        buffer: undefined,
        start: 0,
        length: 0,
        request: own,
        error,
        taken: () => undefined,
      });
    });
  }

  async #flush(own: NbdRequest): Promise<NbdErrno> {
    try {
      await this.#target.flush();
      return NbdErrno.none;
    } catch (error) {
      return this.#failed("flush", own, error);
    }
  }

  /** Puts (a piece of) the current read into the output; false when that is full. */
  #continueRead(): boolean {
    const request = this.#request;
    const done = this.#readDone!;
    const rest = request.lengthBytes - done;
    const size = this.#inOnePiece(request) ? rest : Math.min(rest, READ_PIECE_BYTES);
    const headerBytes = this.#readHeaderBytes();
    if (!this.#room(headerBytes + size)) return false;
    const output = this.#output!;
    const at = this.#outputEnd;
    const offsetBytes = request.offsetBytes + done;
    const data = output.subarray(at + headerBytes, at + headerBytes + size);
    this.#credit -= size;
    let there = false;
    const error = this.#attempt("read", request, () => {
      there = this.#target.tryRead(offsetBytes, data);
    });
    if (error !== NbdErrno.none) {
      this.#readDone = undefined;
      this.#reply(error);
      return true;
    }
    if (!there) {
      this.#readDone = undefined;
      void this.#readLate({ ...request }, done);
      return true;
    }
    this.#encodeReadHeader(output, at, request, offsetBytes, size, size === rest);
    this.#outputEnd = at + headerBytes + size;
    this.#readDone = size === rest ? undefined : done + size;
    return true;
  }

  #inOnePiece(request: NbdRequest): boolean {
    return !this.#structured || (request.flags & CommandFlag.df) !== 0;
  }

  #readHeaderBytes(): number {
    return this.#structured ? DATA_CHUNK_HEADER_BYTES : SIMPLE_REPLY_BYTES;
  }

  #encodeReadHeader(
    out: Uint8Array,
    at: number,
    request: NbdRequest,
    offsetBytes: number,
    size: number,
    last: boolean,
  ): void {
    if (this.#structured) encodeDataChunkHeader(out, at, request, offsetBytes, size, last);
    else encodeSimpleReply(out, at, request, NbdErrno.none);
  }

  /** The rest of a read whose bytes are not in memory, piece after piece: the next when the last was taken. */
  async #readLate(own: NbdRequest, from: number): Promise<void> {
    const { lengthBytes } = own;
    const headerBytes = this.#readHeaderBytes();
    const pieceBytes = this.#inOnePiece(own) ? lengthBytes - from : Math.min(lengthBytes, READ_PIECE_BYTES);
    this.#pending++;
    this.#pendingBytes += pieceBytes;
    for (let done = from; done < lengthBytes && !this.#isClosed(); ) {
      const size = Math.min(pieceBytes, lengthBytes - done);
      const last = done + size === lengthBytes;
      const offsetBytes = own.offsetBytes + done;
      const buffer = this.#pool.take(HEADROOM_BYTES + size);
      const start = HEADROOM_BYTES - headerBytes;
      let error: NbdErrno = NbdErrno.none;
      try {
        await this.#target.read(offsetBytes, buffer.subarray(HEADROOM_BYTES, HEADROOM_BYTES + size));
        this.#encodeReadHeader(buffer, start, own, offsetBytes, size, last);
      } catch (cause) {
        error = this.#failed("read", own, cause);
      }
      if (last || error !== NbdErrno.none) {
        this.#pending--;
        this.#pendingBytes -= pieceBytes;
      }
      const length = headerBytes + size;
      await new Promise<void>((taken) =>
        this.#answerLate({ buffer, start, length, request: own, error, taken }),
      );
      if (error !== NbdErrno.none) return;
      done += size;
    }
  }

  #blockStatus(): void {
    const request = this.#request;
    const limit = (request.flags & CommandFlag.reqOne) !== 0 ? 1 : MAX_STATUS_EXTENTS;
    let extents: ReturnType<NbdTarget["extents"]> = [];
    const error = this.#attempt("block status", request, () => {
      extents = this.#target.extents(request.offsetBytes, request.lengthBytes, limit);
    });
    if (error !== NbdErrno.none) {
      this.#reply(error);
      return;
    }
    const buffer = this.#pool.take(statusChunkBytes(extents.length));
    this.#answerLate({
      buffer,
      start: 0,
      length: encodeStatusChunk(buffer, 0, request, extents),
      request: { ...request },
      error: NbdErrno.none,
      taken: () => undefined,
    });
  }

  #attempt(operation: string, request: NbdRequest, action: (own: NbdRequest) => void): NbdErrno {
    try {
      action(request);
      return NbdErrno.none;
    } catch (error) {
      return this.#failed(operation, request, error);
    }
  }

  #failed(operation: string, request: NbdRequest, error: unknown): NbdErrno {
    if (!this.#isClosed())
      this.#onEvent({ kind: "io_error", operation, offsetBytes: request.offsetBytes, error });
    return nbdErrnoOf(error);
  }

  /** The current request's answer without data. Room for it was made before the request was looked at. */
  #reply(error: NbdErrno): void {
    this.#encodeReply(this.#request, this.#request.command, error);
  }

  #encodeReply(cookie: Cookie, command: number, error: NbdErrno): void {
    const output = this.#output!;
    const asChunk = this.#structured && (command === Command.read || command === Command.blockStatus);
    this.#outputEnd += asChunk
      ? encodeErrorChunk(output, this.#outputEnd, cookie, error)
      : encodeSimpleReply(output, this.#outputEnd, cookie, error);
  }

  // ---- late answers -----------------------------------------------------------------------------

  #answerLate(late: Late): void {
    if (this.#isClosed()) {
      this.#drop(late);
      return;
    }
    this.#late.push(late);
    if (this.#pumping) return;
    // Together with the others that become ready in this turn.
    this.#pumping = true;
    queueMicrotask(() => {
      this.#pumping = false;
      if (!this.#isClosed() && !this.#blocked) this.#pump();
    });
  }

  #drop(late: Late): void {
    if (late.buffer !== undefined) this.#pool.give(late.buffer);
    late.taken();
  }

  /** Sends what is ready, then goes on with what stood still for it. */
  #pump(): void {
    try {
      this.#send();
      while (this.#late.length > 0 && !this.#blocked && !this.#isClosed()) {
        const late = this.#late.shift()!;
        if (this.#putLate(late)) {
          late.taken();
          continue;
        }
        if (this.#isClosed()) this.#drop(late);
        else this.#late.unshift(late);
        break;
      }
      if (this.#isClosed()) return;
      this.#send();
    } catch (error) {
      this.#fail(error);
      return;
    }
    if (this.#isClosed() || this.#blocked || this.#leave()) return;
    if (this.#paused && !this.#deferred) this.#advance(this.#backlog, true);
  }

  /** False: the peer has to take something first. */
  #putLate({ buffer, start, length, request, error }: Late): boolean {
    if (buffer === undefined || error !== NbdErrno.none) {
      if (!this.#room(SMALL_REPLY_BYTES)) return false;
      this.#encodeReply(request, request.command, error);
    } else if (length <= COPY_BYTES) {
      if (!this.#room(length)) return false;
      this.#output!.set(buffer.subarray(start, start + length), this.#outputEnd);
      this.#outputEnd += length;
    } else {
      this.#send();
      if (this.#blocked || this.#isClosed()) return false;
      this.#output = buffer;
      this.#outputStart = start;
      this.#outputEnd = start + length;
      this.#send();
      return true;
    }
    if (buffer !== undefined) this.#pool.give(buffer);
    return true;
  }

  // ---- output -----------------------------------------------------------------------------------

  /** Makes room for `size` more bytes of output; false when the peer has to take some first. */
  #room(size: number): boolean {
    if (this.#blocked) return false;
    if (this.#output !== undefined && this.#outputEnd + size <= this.#output.length) return true;
    if (this.#outputEnd > this.#outputStart) {
      this.#send();
      if (this.#blocked) return false;
    }
    if (this.#output !== undefined && this.#output.length < size) {
      this.#pool.give(this.#output);
      this.#output = undefined;
    }
    this.#output ??= this.#pool.take(Math.max(size, OUTPUT_BYTES));
    return true;
  }

  #append(bytes: Uint8Array): void {
    if (!this.#room(bytes.length))
      throw new NbdProtocolError("client does not read the answers to its options");
    this.#output!.set(bytes, this.#outputEnd);
    this.#outputEnd += bytes.length;
  }

  /** Sends the output. What the peer does not take stays, and the session is blocked until `onDrain`. */
  #send(): void {
    const output = this.#output;
    if (output === undefined) return;
    const length = this.#outputEnd - this.#outputStart;
    if (length > 0) {
      const taken = this.#transport.write(output, this.#outputStart, length);
      if (this.#isClosed()) return;
      this.#outputStart += taken;
      this.#blocked = taken < length;
      if (this.#blocked) return;
    }
    this.#outputStart = 0;
    this.#outputEnd = 0;
    this.#output = undefined;
    this.#pool.give(output);
  }

  #fail(error: unknown): void {
    const message = error instanceof Error ? error.message : String(error);
    this.#onEvent({ kind: "protocol_error", message });
    this.#close();
  }

  #close(): void {
    this.onClosed();
    this.#transport.close();
  }
}
