/** A DNS query with one question as bytes. */
export function dnsQuery(name: string, type = 1, id = 0x1234): Buffer {
  const labels = name.split(".").map((label) => Buffer.concat([Buffer.of(label.length), Buffer.from(label)]));
  const head = Buffer.alloc(12);
  head.writeUInt16BE(id, 0);
  head.writeUInt16BE(0x0100, 2);
  head.writeUInt16BE(1, 4);
  return Buffer.concat([head, ...labels, Buffer.of(0, type >> 8, type & 255, 0, 1)]);
}

/** Response code and IPv4 addresses of an answer as this repository's name server writes them. */
export function readDnsAnswer(bytes: Uint8Array): { code: number; addresses: string[] } {
  const view = Buffer.from(bytes);
  let at = 12;
  while (view[at] !== 0) at += view[at]! + 1;
  at += 5;
  const addresses: string[] = [];
  for (let i = view.readUInt16BE(6); i > 0; i--, at += 16)
    addresses.push([...view.subarray(at + 12, at + 16)].join("."));
  return { code: view.readUInt16BE(2) & 15, addresses };
}
