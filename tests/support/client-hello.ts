/** A TLS 1.2/1.3 ClientHello as a client would send it, cut into records of `recordBytes`. */
export function clientHello(
  serverName: string | undefined,
  options: { padding?: number; recordBytes?: number } = {},
): Buffer {
  const u16 = (value: number) => Buffer.from([value >> 8, value & 255]);
  const vector16 = (bytes: Uint8Array) => Buffer.concat([u16(bytes.length), bytes]);
  const extension = (type: number, data: Uint8Array) => Buffer.concat([u16(type), vector16(data)]);
  const name = Buffer.from(serverName ?? "", "latin1");
  const extensions = Buffer.concat([
    extension(0x0a0a, Buffer.alloc(0)),
    extension(21, Buffer.alloc(options.padding ?? 0)),
    ...(serverName === undefined
      ? []
      : [extension(0, vector16(Buffer.concat([Buffer.of(0), vector16(name)])))]),
    extension(43, Buffer.of(2, 3, 4)),
  ]);
  const body = Buffer.concat([
    Buffer.of(3, 3),
    Buffer.alloc(32, 7),
    Buffer.of(32),
    Buffer.alloc(32, 9),
    vector16(Buffer.of(0x13, 0x01, 0x13, 0x02)),
    Buffer.of(1, 0),
    vector16(extensions),
  ]);
  const message = Buffer.concat([
    Buffer.of(1, body.length >> 16, (body.length >> 8) & 255, body.length & 255),
    body,
  ]);
  const size = options.recordBytes ?? 16384;
  const records: Buffer[] = [];
  for (let at = 0; at < message.length; at += size) {
    const piece = message.subarray(at, at + size);
    records.push(Buffer.concat([Buffer.of(22, 3, 1), vector16(piece)]));
  }
  return Buffer.concat(records);
}
