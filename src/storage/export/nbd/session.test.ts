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
  readonly state: { capacity: number; paused: boolean; closed: boolean; fault: Error | undefined };
  /** Bytes in, in chunks of `chunkBytes`; deferred turns run, drains happen until all is done. */
  feed(bytes: Uint8Array, chunkBytes?: number): void;
}

/** A session over memory. The transport takes `capacity` bytes, then wants a drain. */
function rig(options: { readOnly?: boolean; capacityPerDrain?: number } = {}): Rig {
  const memory = new Uint8Array(SIZE);
  const reader = new AnswerReader();
  const events: NbdEvent[] = [];
  const calls: string[] = [];
  const perDrain = options.capacityPerDrain ?? Number.POSITIVE_INFINITY;
  const state: Rig["state"] = { capacity: perDrain, paused: false, closed: false, fault: undefined };
  const deferred: (() => void)[] = [];
  const failing = () => {
    if (state.fault !== undefined) throw state.fault;
  };
  const target: NbdTarget = {
    exportName: "disk",
    sizeBytes: SIZE,
    readOnly: options.readOnly ?? false,
    read(offset, into) {
      failing();
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
    flush() {
      failing();
      calls.push("flush");
    },
  };
  const session = new NbdSession({
    target,
    pool: new BufferPool(),
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
  const settle = () => {
    for (let turn = 0; turn < 1_000_000; turn++) {
      const step = deferred.shift();
      if (step !== undefined) step();
      else if (state.capacity === 0 && perDrain > 0) {
        state.capacity = perDrain;
        session.onDrain();
      } else return;
    }
    throw new Error("the session does not come to rest");
  };
  return {
    session,
    reader,
    memory,
    events,
    calls,
    state,
    feed(bytes, chunkBytes = bytes.length) {
      for (let at = 0; at < bytes.length && !state.closed; at += chunkBytes) {
        session.onData(bytes.subarray(at, at + chunkBytes));
        settle();
      }
    },
  };
}

function opened(structured: boolean, options: Parameters<typeof rig>[0] = {}): Rig {
  const made = rig(options);
  made.feed(openSession("disk", structured));
  expect(made.reader.greeting()?.magic).toBe("NBDMAGICIHAVEOPT");
  let last = made.reader.optionAnswer();
  while (made.reader.pendingBytes > 0) last = made.reader.optionAnswer();
  expect(last).toMatchObject({ option: Option.go, type: OptionReply.ack });
  return made;
}

function pattern(length: number, seed: number): Uint8Array {
  return Uint8Array.from({ length }, (_, i) => (i * 31 + seed * 7 + (i >> 8)) & 0xff);
}

test("greeting, request and info decode to what the protocol says", () => {
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

test("options: list, info, unknown name, unknown option, abort", () => {
  const { feed, reader, state } = rig();
  feed(
    Buffer.concat([
      clientFlags(),
      option(Option.list),
      option(Option.info, infoData("disk", [1])),
      option(Option.info, infoData("other")),
      option(Option.info, new Uint8Array(3)),
      option(Option.startTls),
      option(10, new Uint8Array(9)),
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

test("EXPORT_NAME answers without a header, with and without the reserved zeros", () => {
  for (const [flags, tail] of [
    [1, 134],
    [3, 10],
  ] as const) {
    const { feed, reader, state } = rig();
    feed(Buffer.concat([clientFlags(flags), option(Option.exportName, Buffer.from("disk"))]));
    reader.greeting();
    expect(reader.pendingBytes).toBe(tail);
    const answer = Buffer.from(reader.take(tail)!);
    expect(Number(answer.readBigUInt64BE(0))).toBe(SIZE);
    feed(request(Command.flush, 5, 0, 0));
    expect(reader.answer()).toMatchObject({ cookie: 5, error: 0 });
    expect(state.closed).toBe(false);
  }
  const refused = rig();
  refused.feed(Buffer.concat([clientFlags(), option(Option.exportName, Buffer.from("nope"))]));
  expect(refused.state.closed).toBe(true);
});

for (const structured of [true, false]) {
  const kind = structured ? "structured" : "simple";
  // 7 and 29 never meet a header's end, 1 cuts everywhere, the large ones hold many requests at once.
  for (const chunkBytes of [1, 7, 29, 4096, 1 << 20]) {
    test(`${kind} replies, input in chunks of ${chunkBytes} bytes, output in small pieces`, () => {
      const { feed, reader, memory } = opened(structured, { capacityPerDrain: 1000 });
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
      feed(Buffer.concat(input), chunkBytes);
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

test("a large structured read goes out in pieces, with DF in one", () => {
  const { feed, reader, memory } = opened(true);
  memory.set(pattern(SIZE, 3));
  feed(request(Command.read, 1, 512, 3 << 20));
  const pieces = reader.answer()!;
  expect(pieces.chunks.map((chunk) => chunk.offset)).toEqual([512, 512 + (1 << 20), 512 + (2 << 20)]);
  expect(
    Buffer.concat(pieces.chunks.map((chunk) => chunk.data)).equals(memory.subarray(512, 512 + (3 << 20))),
  ).toBe(true);
  feed(request(Command.read, 2, 0, 3 << 20, CommandFlag.df));
  expect(reader.answer()?.chunks.length).toBe(1);
});

test("nothing is executed and nothing read while the client takes no replies", () => {
  const { session, state, calls } = opened(true);
  state.capacity = 0;
  const reads = Buffer.concat(Array.from({ length: 64 }, (_, i) => request(Command.read, i, 0, 1 << 20)));
  session.onData(Buffer.concat([reads, request(Command.flush, 99, 0, 0)]));
  expect(state.paused).toBe(true);
  expect(calls).not.toContain("flush");
});

test("FUA flushes after the write; trim and zeroes reach the target", () => {
  const { feed, reader, calls } = opened(true);
  feed(
    Buffer.concat([
      request(Command.write, 1, 0, 512, CommandFlag.fua, pattern(512, 1)),
      request(Command.trim, 2, 0, 4096),
      request(Command.writeZeroes, 3, 0, 4096, CommandFlag.noHole | CommandFlag.fua),
      request(Command.flush, 4, 0, 0),
    ]),
  );
  for (const cookie of [1, 2, 3, 4]) expect(reader.answer()).toMatchObject({ cookie, error: 0 });
  expect(calls).toEqual(["write", "flush", "trim", "zero", "flush", "flush"]);
});

test("errors have the protocol's numbers and the session goes on", () => {
  const { feed, reader, state, events } = opened(true);
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
    feed(bytes, 11);
    expect(reader.answer()).toMatchObject({ cookie: 1, error });
  }
  state.fault = new AenvError({ code: "disk_full", message: "no space" });
  feed(request(Command.write, 2, 0, 512, 0, new Uint8Array(512)));
  expect(reader.answer()).toMatchObject({ cookie: 2, error: NbdErrno.ENOSPC });
  state.fault = new Error("broken");
  feed(Buffer.concat([request(Command.read, 3, 0, 512), request(Command.flush, 4, 0, 0)]));
  expect(reader.answer()).toMatchObject({ cookie: 3, error: NbdErrno.EIO, structured: true });
  expect(reader.answer()).toMatchObject({ cookie: 4, error: NbdErrno.EIO });
  expect(events.filter((event) => event.kind === "io_error").length).toBe(3);
  state.fault = undefined;
  feed(request(Command.flush, 5, 0, 0));
  expect(reader.answer()).toMatchObject({ cookie: 5, error: 0 });
});

test("a read-only export refuses changes with EPERM and stays in step", () => {
  const { feed, reader } = opened(false, { readOnly: true });
  feed(
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

test("what is not the protocol ends the connection and nothing else", () => {
  const garbage = pattern(4096, 77);
  const before: [string, () => Rig, Uint8Array][] = [
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
    const { feed, state, events } = make();
    feed(bytes);
    expect(state.closed).toBe(true);
    expect(events).toHaveLength(1);
    expect(events[0]!.kind).toBe("protocol_error");
  }
});

test("random bytes after a valid start never throw", () => {
  const seed = 20260101;
  let x = seed;
  const random = () => {
    x = (Math.imul(x, 1103515245) + 12345) >>> 0;
    return x / 2 ** 32;
  };
  for (let round = 0; round < 300; round++) {
    const { feed } = round % 2 === 0 ? rig() : opened(round % 4 === 1);
    const bytes = request(Command.write, 1, 0, 64, 0, new Uint8Array(64)).slice();
    for (let flips = 0; flips < 3; flips++)
      bytes[Math.floor(random() * bytes.length)] = Math.floor(random() * 256);
    feed(bytes, 1 + Math.floor(random() * 40));
  }
  expect(x).not.toBe(seed);
});

test("storage errors map to the protocol's numbers", () => {
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
