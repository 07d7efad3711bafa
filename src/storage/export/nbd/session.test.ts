import { expect, test } from "bun:test";
import { AenvError } from "../../../lib/errors.ts";
import {
  Command,
  CommandFlag,
  decodeInfoRequest,
  decodeOptionHeader,
  decodeRequest,
  encodeGreeting,
  MAX_PAYLOAD_BYTES,
  NbdErrno,
  NbdProtocolError,
  newRequest,
  Option,
  OptionReply,
  TransmissionFlag,
} from "./codec.ts";
import { nbdErrnoOf } from "./errors.ts";
import { BufferPool } from "./pool.ts";
import { NbdSession } from "./session.ts";
import { AnswerReader, clientFlags, infoData, openSession, option, request } from "./testing.ts";
import type { NbdEvent, NbdTarget } from "./types.ts";

const SIZE = 4 << 20;

interface Rig {
  readonly session: NbdSession;
  readonly reader: AnswerReader;
  readonly memory: Uint8Array;
  readonly events: NbdEvent[];
  readonly calls: string[];
  readonly pool: BufferPool;
  readonly state: {
    capacity: number;
    paused: boolean;
    closed: boolean;
    fault: Error | undefined;
    /** Nothing is in memory; reads wait for `disk`, where it is set. */
    cold: boolean;
    disk: PromiseWithResolvers<void> | undefined;
    /** The client takes no more than `capacity`. */
    stuck: boolean;
    /** Flushes wait for it. */
    sync: PromiseWithResolvers<void> | undefined;
  };
  /** Bytes in, in chunks of `chunkBytes`; deferred turns run, drains happen until all is done. */
  feed(bytes: Uint8Array, chunkBytes?: number): Promise<void>;
  /** Runs what is ready to run. */
  settle(): Promise<void>;
}

/** A session over memory. The transport takes `capacity` bytes, then wants a drain. */
function rig(options: { readOnly?: boolean; capacityPerDrain?: number } = {}): Rig {
  const memory = new Uint8Array(SIZE);
  const reader = new AnswerReader();
  const events: NbdEvent[] = [];
  const calls: string[] = [];
  const pool = new BufferPool();
  const perDrain = options.capacityPerDrain ?? Number.POSITIVE_INFINITY;
  const state: Rig["state"] = {
    capacity: perDrain,
    paused: false,
    closed: false,
    fault: undefined,
    cold: false,
    disk: undefined,
    stuck: false,
    sync: undefined,
  };
  const deferred: (() => void)[] = [];
  const failing = () => {
    if (state.fault !== undefined) throw state.fault;
  };
  const target: NbdTarget = {
    exportName: "disk",
    sizeBytes: SIZE,
    readOnly: options.readOnly ?? false,
    tryRead(offset, into) {
      failing();
      if (state.cold) return false;
      into.set(memory.subarray(offset, offset + into.length));
      return true;
    },
    async read(offset, into) {
      failing();
      await state.disk?.promise;
      into.set(memory.subarray(offset, offset + into.length));
    },
    write(offset, source) {
      failing();
      calls.push("write");
      memory.set(source, offset);
    },
    trim(offset, length) {
      calls.push("trim");
      memory.fill(0, offset, offset + length);
    },
    writeZeroes(offset, length) {
      calls.push("zero");
      memory.fill(0, offset, offset + length);
    },
    async flush() {
      failing();
      calls.push("flush");
      await state.sync?.promise;
    },
    extents(offset, length, limit) {
      // The first quarter holds data, the rest nothing.
      const data = Math.max(0, Math.min(length, SIZE / 4 - offset));
      const extents = [
        { lengthBytes: data, kind: "data" as const },
        { lengthBytes: length - data, kind: "hole" as const },
      ];
      return extents.filter((extent) => extent.lengthBytes > 0).slice(0, limit);
    },
  };
  const session = new NbdSession({
    target,
    pool,
    onEvent: (event) => events.push(event),
    transport: {
      write(bytes, offset, length) {
        const taken = Math.min(length, state.capacity);
        state.capacity -= taken;
        reader.feed(bytes.slice(offset, offset + taken));
        return taken;
      },
      pause() {
        state.paused = true;
      },
      resume() {
        state.paused = false;
      },
      close() {
        state.closed = true;
      },
      defer: (step) => deferred.push(step),
    },
  });
  session.start();
  const turns = () => {
    for (let turn = 0; turn < 1_000_000; turn++) {
      const step = deferred.shift();
      if (step !== undefined) step();
      else if (state.capacity === 0 && perDrain > 0 && !state.stuck) {
        state.capacity = perDrain;
        session.onDrain();
      } else return;
    }
    throw new Error("the session does not come to rest");
  };
  const settle = async () => {
    for (let i = 0; i < 20; i++) {
      await Promise.resolve();
      turns();
    }
  };
  return {
    session,
    reader,
    memory,
    events,
    calls,
    pool,
    state,
    settle,
    async feed(bytes, chunkBytes = bytes.length) {
      for (let at = 0; at < bytes.length && !state.closed; at += chunkBytes) {
        session.onData(bytes.subarray(at, at + chunkBytes));
        turns();
      }
      await settle();
    },
  };
}

async function opened(structured: boolean, options: Parameters<typeof rig>[0] = {}): Promise<Rig> {
  const made = rig(options);
  await made.feed(openSession("disk", structured));
  expect(made.reader.greeting()?.magic).toBe("NBDMAGICIHAVEOPT");
  let last = made.reader.optionAnswer();
  while (made.reader.pendingBytes > 0) last = made.reader.optionAnswer();
  expect(last).toMatchObject({ option: Option.go, type: OptionReply.ack });
  return made;
}

function pattern(length: number, seed: number): Uint8Array {
  return Uint8Array.from({ length }, (_, i) => (i * 31 + seed * 7 + (i >> 8)) & 0xff);
}

test("greeting, request and info decode to what the protocol says", async () => {
  expect(Buffer.from(encodeGreeting()).toString("hex")).toBe("4e42444d4147494349484156454f50540003");
  const decoded = newRequest();
  decodeRequest(request(Command.write, 0x1234, 0x1_0000_0200n, 512, CommandFlag.fua), 0, decoded);
  expect(decoded).toEqual({
    flags: 1,
    command: 1,
    cookieHi: 0,
    cookieLo: 0x1234,
    offsetBytes: 0x1_0000_0200,
    lengthBytes: 512,
  });
  expect(decodeInfoRequest(infoData("näme", [1, 3]))).toEqual({ name: "näme", wants: [1, 3] });
  for (const cut of [0, 3, 5, 8])
    expect(decodeInfoRequest(infoData("name", [3]).subarray(0, cut))).toBeUndefined();
  expect(() => decodeRequest(new Uint8Array(28), 0, decoded)).toThrow(NbdProtocolError);
  expect(() => decodeOptionHeader(new Uint8Array(16), 0)).toThrow(NbdProtocolError);
});

test("options: list, info, unknown name, unknown option, abort", async () => {
  const { feed, reader, state } = rig();
  await feed(
    Buffer.concat([
      clientFlags(),
      option(Option.list),
      option(Option.info, infoData("disk", [1])),
      option(Option.info, infoData("other")),
      option(Option.info, new Uint8Array(3)),
      option(Option.startTls),
      option(99, new Uint8Array(9)),
      option(Option.abort),
    ]),
    3,
  );
  expect(reader.greeting()?.flags).toBe(3);
  const answers: { option: number; type: number; data: Uint8Array }[] = [];
  for (let next = reader.optionAnswer(); next !== undefined; next = reader.optionAnswer()) answers.push(next);
  expect(answers.map(({ type }) => type)).toEqual([
    OptionReply.server,
    OptionReply.ack,
    OptionReply.info,
    OptionReply.info,
    OptionReply.info,
    OptionReply.ack,
    OptionReply.errUnknown,
    OptionReply.errInvalid,
    OptionReply.errUnsupported,
    OptionReply.errUnsupported,
    OptionReply.ack,
  ]);
  const general = Buffer.from(answers[2]!.data);
  expect(Number(general.readBigUInt64BE(2))).toBe(SIZE);
  const { hasFlags, sendFlush, sendFua, sendTrim, sendWriteZeroes, canMultiConn } = TransmissionFlag;
  expect(general.readUInt16BE(10)).toBe(
    hasFlags | sendFlush | sendFua | sendTrim | sendWriteZeroes | canMultiConn,
  );
  expect(Buffer.from(answers[3]!.data).toString("hex")).toBe("00030000020000001000" + "02000000");
  expect(state.closed).toBe(true);
});

test("EXPORT_NAME answers without a header, with and without the reserved zeros", async () => {
  for (const [flags, tail] of [
    [1, 134],
    [3, 10],
  ] as const) {
    const { feed, reader, state } = rig();
    await feed(Buffer.concat([clientFlags(flags), option(Option.exportName, Buffer.from("disk"))]));
    reader.greeting();
    expect(reader.pendingBytes).toBe(tail);
    const answer = Buffer.from(reader.take(tail)!);
    expect(Number(answer.readBigUInt64BE(0))).toBe(SIZE);
    await feed(request(Command.flush, 5, 0, 0));
    expect(reader.answer()).toMatchObject({ cookie: 5, error: 0 });
    expect(state.closed).toBe(false);
  }
  const refused = rig();
  await refused.feed(Buffer.concat([clientFlags(), option(Option.exportName, Buffer.from("nope"))]));
  expect(refused.state.closed).toBe(true);
});

for (const structured of [true, false]) {
  const kind = structured ? "structured" : "simple";
  // 7 and 29 never meet a header's end, 1 cuts everywhere, the large ones hold many requests at once.
  for (const chunkBytes of [1, 7, 29, 4096, 1 << 20]) {
    test(`${kind} replies, input in chunks of ${chunkBytes} bytes, output in small pieces`, async () => {
      const { feed, reader, memory } = await opened(structured, { capacityPerDrain: 1000 });
      const expected = new Uint8Array(SIZE);
      const input: Uint8Array[] = [];
      for (let i = 0; i < 40; i++) {
        const length = 1 + ((i * 977) % 9000);
        const offset = (i * 7919) % (SIZE - length);
        const data = pattern(length, i);
        expected.set(data, offset);
        input.push(request(Command.write, i, offset, length, 0, data));
        input.push(request(Command.read, 1000 + i, offset, length));
        reader.readLengths.set(1000 + i, length);
      }
      await feed(Buffer.concat(input), chunkBytes);
      for (let i = 0; i < 40; i++) {
        expect(reader.answer()).toMatchObject({ cookie: i, error: 0, structured: false });
        const read = reader.answer();
        expect(read).toMatchObject({ cookie: 1000 + i, error: 0, structured });
        expect(Buffer.concat(read!.chunks.map((chunk) => chunk.data))).toEqual(
          Buffer.from(pattern(1 + ((i * 977) % 9000), i)),
        );
      }
      expect(Buffer.from(memory).equals(expected)).toBe(true);
      expect(reader.pendingBytes).toBe(0);
    });
  }
}

test("a large structured read goes out in pieces, with DF in one", async () => {
  const { feed, reader, memory } = await opened(true);
  memory.set(pattern(SIZE, 3));
  await feed(request(Command.read, 1, 512, 3 << 20));
  const pieces = reader.answer()!;
  expect(pieces.chunks.map((chunk) => chunk.offset)).toEqual([512, 512 + (1 << 20), 512 + (2 << 20)]);
  expect(
    Buffer.concat(pieces.chunks.map((chunk) => chunk.data)).equals(memory.subarray(512, 512 + (3 << 20))),
  ).toBe(true);
  await feed(request(Command.read, 2, 0, 3 << 20, CommandFlag.df));
  expect(reader.answer()?.chunks.length).toBe(1);
});

test("nothing is executed and nothing read while the client takes no replies", async () => {
  const { session, state, calls } = await opened(true);
  state.capacity = 0;
  const reads = Buffer.concat(Array.from({ length: 64 }, (_, i) => request(Command.read, i, 0, 1 << 20)));
  session.onData(Buffer.concat([reads, request(Command.flush, 99, 0, 0)]));
  expect(state.paused).toBe(true);
  expect(calls).not.toContain("flush");
});

for (const structured of [true, false]) {
  test(`reads of what is not in memory are answered late, others go on (${structured ? "structured" : "simple"})`, async () => {
    const { feed, settle, reader, memory, state } = await opened(structured, { capacityPerDrain: 50_000 });
    memory.set(pattern(SIZE, 5));
    state.cold = true;
    state.disk = Promise.withResolvers();
    const lengths = [512, 100_000, 3 << 20, 4096];
    for (const [i, length] of lengths.entries()) reader.readLengths.set(i, length);
    await feed(Buffer.concat(lengths.map((length, i) => request(Command.read, i, 512 * i, length))));
    expect(reader.answer()).toBeUndefined();
    state.cold = false;
    reader.readLengths.set(10, 4096);
    await feed(
      Buffer.concat([
        request(Command.read, 10, 8192, 4096),
        request(Command.write, 11, 0, 512, 0, pattern(512, 9)),
      ]),
    );
    expect(reader.answer()).toMatchObject({ cookie: 10, error: 0 });
    expect(reader.answer()).toMatchObject({ cookie: 11, error: 0 });
    expect(reader.answer()).toBeUndefined();
    state.disk.resolve();
    await settle();
    const seen = new Set<number>();
    for (let answer = reader.answer(); answer !== undefined; answer = reader.answer()) {
      const offset = 512 * answer.cookie;
      const data = Buffer.concat(answer.chunks.map((chunk) => chunk.data));
      expect(data.equals(memory.subarray(offset, offset + lengths[answer.cookie]!))).toBe(true);
      seen.add(answer.cookie);
    }
    expect([...seen].sort()).toEqual([0, 1, 2, 3]);
    expect(reader.pendingBytes).toBe(0);
  });
}

test("not more than 64 requests wait for a disk at once; a late failure is that request's alone", async () => {
  const { feed, settle, reader, state, events } = await opened(true);
  state.cold = true;
  state.disk = Promise.withResolvers();
  await feed(Buffer.concat(Array.from({ length: 200 }, (_, i) => request(Command.read, i, i * 512, 512))));
  expect(state.paused).toBe(true);
  const { disk } = state;
  state.disk = undefined;
  disk.reject(new Error("the disk is broken"));
  for (let i = 0; i < 5; i++) await settle();
  const errors: number[] = [];
  for (let answer = reader.answer(); answer !== undefined; answer = reader.answer()) {
    errors[answer.cookie] = answer.error;
  }
  expect(errors.length).toBe(200);
  expect(errors.filter((error) => error === NbdErrno.EIO).length).toBe(64);
  expect(errors.filter((error) => error === 0).length).toBe(136);
  expect(events.length).toBe(64);
  expect(state.paused).toBe(false);
});

test("a flush under way holds up nobody; goodbye waits for what is pending", async () => {
  const { feed, settle, reader, state, calls } = await opened(true);
  state.sync = Promise.withResolvers();
  await feed(
    Buffer.concat([
      request(Command.flush, 1, 0, 0),
      request(Command.write, 2, 0, 512, 0, pattern(512, 1)),
      request(Command.read, 3, 0, 512),
      request(Command.disconnect, 4, 0, 0),
    ]),
  );
  expect(reader.answer()).toMatchObject({ cookie: 2, error: 0 });
  expect(reader.answer()).toMatchObject({ cookie: 3, error: 0 });
  expect(reader.answer()).toBeUndefined();
  expect(state.closed).toBe(false);
  state.sync.resolve();
  await settle();
  expect(reader.answer()).toMatchObject({ cookie: 1, error: 0 });
  expect(state.closed).toBe(true);
  expect(calls).toEqual(["flush", "write"]);
});

test("a connection that ends while requests wait gives every buffer back once", async () => {
  for (const when of ["waiting", "ready", "half sent"] as const) {
    const { feed, settle, session, state, pool } = await opened(true);
    state.cold = true;
    state.disk = Promise.withResolvers();
    state.stuck = true;
    await feed(Buffer.concat(Array.from({ length: 8 }, (_, i) => request(Command.read, i, 0, 200_000))));
    if (when !== "waiting") {
      state.capacity = when === "ready" ? 0 : 300_000;
      state.disk.resolve();
      await settle();
    }
    session.onClosed();
    state.disk.resolve();
    await settle();
    session.onDrain();
    await settle();
    const taken = Array.from({ length: 64 }, (_, i) => pool.take(i % 2 === 0 ? 200_000 : 1));
    expect(new Set(taken).size).toBe(taken.length);
  }
});

test("block status: only with the context, in order, one piece if asked for", async () => {
  const query = (name: string) => Buffer.concat([Buffer.from([0, 0, 0, name.length]), Buffer.from(name)]);
  const contexts = (exportName: string, ...names: string[]) =>
    Buffer.concat([query(exportName), Buffer.from([0, 0, 0, names.length]), ...names.map(query)]);
  const made = rig();
  await made.feed(
    Buffer.concat([
      clientFlags(),
      option(Option.setMetaContext, contexts("disk", "base:allocation")),
      option(Option.structuredReply),
      option(Option.listMetaContext, contexts("disk")),
      option(Option.listMetaContext, contexts("disk", "other:")),
      option(Option.setMetaContext, contexts("nope", "base:allocation")),
      option(Option.setMetaContext, new Uint8Array(3)),
      option(Option.setMetaContext, contexts("disk", "x:y", "base:allocation")),
      option(Option.go, infoData("disk")),
    ]),
  );
  const { reader } = made;
  reader.greeting();
  const types: number[] = [];
  for (let next = reader.optionAnswer(); next !== undefined; next = reader.optionAnswer())
    types.push(next.type);
  const { ack, info, metaContext, errInvalid, errUnknown } = OptionReply;
  expect(types).toEqual([
    errInvalid,
    ack,
    ...[metaContext, ack],
    ack,
    errUnknown,
    errInvalid,
    ...[metaContext, ack],
    ...[info, info, ack],
  ]);
  const quarter = SIZE / 4;
  await made.feed(request(Command.blockStatus, 7, quarter - 4096, 8192));
  expect(reader.answer()).toMatchObject({
    cookie: 7,
    error: 0,
    extents: [
      { lengthBytes: 4096, state: 0 },
      { lengthBytes: 4096, state: 3 },
    ],
  });
  await made.feed(request(Command.blockStatus, 8, quarter - 4096, 8192, CommandFlag.reqOne));
  expect(reader.answer()?.extents).toEqual([{ lengthBytes: 4096, state: 0 }]);
  await made.feed(request(Command.blockStatus, 9, SIZE - 512, 1024));
  expect(reader.answer()).toMatchObject({ cookie: 9, error: NbdErrno.EINVAL, structured: true });
});

test("FUA flushes after the write; trim and zeroes reach the target", async () => {
  const { feed, reader, calls } = await opened(true);
  await feed(
    Buffer.concat([
      request(Command.write, 1, 0, 512, CommandFlag.fua, pattern(512, 1)),
      request(Command.trim, 2, 0, 4096),
      request(Command.writeZeroes, 3, 0, 4096, CommandFlag.noHole | CommandFlag.fua),
      request(Command.flush, 4, 0, 0),
    ]),
  );
  // Who waits for the disk is answered later.
  for (const cookie of [2, 1, 3, 4]) expect(reader.answer()).toMatchObject({ cookie, error: 0 });
  expect(calls).toEqual(["write", "flush", "trim", "zero", "flush", "flush"]);
});

test("a large write reaches the device in blocks as it arrives, and one that fails half-way answers once", async () => {
  const { feed, reader, memory, state, calls } = await opened(true);
  for (const [offset, length, chunk] of [
    [100, 1_000_001, 65_000],
    [4096, 300_000, 4096],
    [8191, 9000, 777],
  ] as const) {
    const data = pattern(length, chunk);
    await feed(request(Command.write, 1, offset, length, 0, data), chunk);
    expect(reader.answer()).toMatchObject({ cookie: 1, error: 0 });
    expect(reader.answer()).toBeUndefined();
    expect(Buffer.compare(memory.subarray(offset, offset + length), data)).toBe(0);
  }
  calls.length = 0;
  const whole = request(Command.write, 2, 0, 1 << 20, CommandFlag.fua, pattern(1 << 20, 3));
  await feed(whole.subarray(0, 400_000));
  expect(calls).toEqual(["write"]);
  state.fault = new AenvError({ code: "disk_full", message: "no space" });
  await feed(whole.subarray(400_000, 800_000));
  state.fault = undefined;
  await feed(whole.subarray(800_000));
  expect(reader.answer()).toMatchObject({ cookie: 2, error: NbdErrno.ENOSPC });
  expect(calls).toEqual(["write"]);
  await feed(request(Command.flush, 3, 0, 0));
  expect(reader.answer()).toMatchObject({ cookie: 3, error: 0 });
});

test("errors have the protocol's numbers and the session goes on", async () => {
  const { feed, reader, state, events } = await opened(true);
  const huge = 2n ** 64n - 512n;
  const cases: [Uint8Array, number][] = [
    [request(Command.read, 1, SIZE - 512, 1024), NbdErrno.EINVAL],
    [request(Command.read, 1, huge, 512), NbdErrno.EINVAL],
    [request(Command.read, 1, 0, 0), NbdErrno.EINVAL],
    [request(Command.write, 1, SIZE - 512, 1024, 0, new Uint8Array(1024)), NbdErrno.ENOSPC],
    [request(Command.writeZeroes, 1, SIZE, 512), NbdErrno.ENOSPC],
    [request(Command.trim, 1, SIZE, 512), NbdErrno.EINVAL],
    [request(5, 1, 0, 512), NbdErrno.EINVAL],
    [request(7, 1, 0, 512), NbdErrno.EINVAL],
    [request(99, 1, 0, 512), NbdErrno.EINVAL],
    [request(Command.write, 1, 0, 512, 1 << 9, new Uint8Array(512)), NbdErrno.EINVAL],
  ];
  for (const [bytes, error] of cases) {
    await feed(bytes, 11);
    expect(reader.answer()).toMatchObject({ cookie: 1, error });
  }
  state.fault = new AenvError({ code: "disk_full", message: "no space" });
  await feed(request(Command.write, 2, 0, 512, 0, new Uint8Array(512)));
  expect(reader.answer()).toMatchObject({ cookie: 2, error: NbdErrno.ENOSPC });
  state.fault = new Error("broken");
  await feed(Buffer.concat([request(Command.read, 3, 0, 512), request(Command.flush, 4, 0, 0)]));
  expect(reader.answer()).toMatchObject({ cookie: 3, error: NbdErrno.EIO, structured: true });
  expect(reader.answer()).toMatchObject({ cookie: 4, error: NbdErrno.EIO });
  expect(events.filter((event) => event.kind === "io_error").length).toBe(3);
  state.fault = undefined;
  await feed(request(Command.flush, 5, 0, 0));
  expect(reader.answer()).toMatchObject({ cookie: 5, error: 0 });
});

test("a read-only export refuses changes with EPERM and stays in step", async () => {
  const { feed, reader } = await opened(false, { readOnly: true });
  await feed(
    Buffer.concat([
      request(Command.write, 1, 0, 5000, 0, pattern(5000, 9)),
      request(Command.trim, 2, 0, 512),
      request(Command.writeZeroes, 3, 0, 512),
      request(Command.flush, 4, 0, 0),
    ]),
    100,
  );
  for (const cookie of [1, 2, 3]) expect(reader.answer()).toMatchObject({ cookie, error: NbdErrno.EPERM });
  expect(reader.answer()).toMatchObject({ cookie: 4, error: 0 });
});

test("what is not the protocol ends the connection and nothing else", async () => {
  const garbage = pattern(4096, 77);
  const before: [string, () => Rig | Promise<Rig>, Uint8Array][] = [
    ["instead of client flags", () => rig(), garbage],
    ["instead of an option", () => rig(), Buffer.concat([clientFlags(), garbage])],
    [
      "an option of 4 GiB",
      () => rig(),
      Buffer.concat([clientFlags(), option(Option.go).subarray(0, 12), garbage]),
    ],
    ["instead of a request", () => opened(true), garbage],
    ["a write over the limit", () => opened(true), request(Command.write, 1, 0, MAX_PAYLOAD_BYTES + 1)],
  ];
  for (const [, make, bytes] of before) {
    const { feed, state, events } = await make();
    await feed(bytes);
    expect(state.closed).toBe(true);
    expect(events).toHaveLength(1);
    expect(events[0]!.kind).toBe("protocol_error");
  }
});

test("random bytes after a valid start never throw", async () => {
  const seed = 20260101;
  let x = seed;
  const random = () => {
    x = (Math.imul(x, 1103515245) + 12345) >>> 0;
    return x / 2 ** 32;
  };
  for (let round = 0; round < 300; round++) {
    const { feed } = round % 2 === 0 ? rig() : await opened(round % 4 === 1);
    const bytes = request(Command.write, 1, 0, 64, 0, new Uint8Array(64)).slice();
    for (let flips = 0; flips < 3; flips++)
      bytes[Math.floor(random() * bytes.length)] = Math.floor(random() * 256);
    await feed(bytes, 1 + Math.floor(random() * 40));
  }
  expect(x).not.toBe(seed);
});

test("storage errors map to the protocol's numbers", async () => {
  const wrapped = new AenvError({
    code: "x",
    message: "x",
    cause: Object.assign(new Error("e"), { code: "ENOSPC" }),
  });
  expect(nbdErrnoOf(wrapped)).toBe(NbdErrno.ENOSPC);
  expect(nbdErrnoOf(new AenvError({ code: "os_enomem", message: "x" }))).toBe(NbdErrno.ENOMEM);
  expect(nbdErrnoOf(new AenvError({ code: "os_eio", message: "x" }))).toBe(NbdErrno.EIO);
  expect(nbdErrnoOf("text")).toBe(NbdErrno.EIO);
});
