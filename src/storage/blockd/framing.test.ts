import { expect, test } from "bun:test";
import { encodeFrame, FrameDecoder, FrameWriter, FramingError } from "./framing.ts";
import { BLOCKD_MAX_MESSAGE_BYTES } from "./protocol.ts";

test("messages survive any cut", () => {
  const messages = [{ id: 1, text: "ä" }, { id: 2 }, [], "x".repeat(5000)];
  const stream = Buffer.concat(messages.map(encodeFrame));
  for (const size of [1, 3, 5, 1000, stream.length]) {
    const decoder = new FrameDecoder();
    const got: unknown[] = [];
    for (let at = 0; at < stream.length; at += size)
      got.push(...decoder.feed(stream.subarray(at, at + size)));
    expect(got).toEqual(messages);
  }
});

test("a length out of bounds and a body that is not JSON are errors", () => {
  const frame = (length: number, body: string) => {
    const head = Buffer.alloc(4);
    head.writeUInt32LE(length);
    return Buffer.concat([head, Buffer.from(body)]);
  };
  for (const bad of [
    frame(0, ""),
    frame(BLOCKD_MAX_MESSAGE_BYTES + 1, "x"),
    frame(0xffffffff, ""),
    frame(3, "{a}"),
  ]) {
    expect(() => [...new FrameDecoder().feed(bad)]).toThrow(FramingError);
  }
  expect(() => encodeFrame("x".repeat(BLOCKD_MAX_MESSAGE_BYTES))).toThrow(FramingError);
});

test("short writes go on where they stopped; a peer that never reads is cut off", () => {
  const sent: number[] = [];
  let capacity = 5;
  let cut = false;
  const writer = new FrameWriter({
    write(data) {
      const bytes = (data as Uint8Array).subarray(0, capacity);
      sent.push(...bytes);
      capacity -= bytes.length;
      return bytes.length;
    },
    terminate: () => {
      cut = true;
    },
  });
  const frames = [encodeFrame({ a: 1 }), encodeFrame({ b: 2 })];
  for (const frame of frames) writer.send(frame);
  expect(writer.idle).toBe(false);
  while (!writer.idle) {
    capacity = 3;
    writer.drain();
  }
  expect(Buffer.from(sent).equals(Buffer.concat(frames))).toBe(true);
  expect(cut).toBe(false);
  capacity = 0;
  for (let i = 0; i < 40; i++) writer.send(new Uint8Array(512 << 10));
  expect(cut).toBe(true);
});
