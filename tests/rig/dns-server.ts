/**
 * Plays the node's name server: ADDRESS and names as `NAME=ADDRESS[,ADDRESS…]`; `NAME=-` exists without an
 * address, `NAME=fail` is answered with a server failure, unknown names with "no such name". Lines on the
 * standard input replace a name's addresses. Prints each question as `dns TYPE NAME`.
 */
const [address = "", ...zone] = process.argv.slice(2);
const names = new Map<string, string>();
const define = (line: string) => {
  const [name = "", value = ""] = line.split("=");
  names.set(name, value);
};
zone.forEach(define);

function reply(query: Buffer): Buffer {
  let at = 12;
  const labels: string[] = [];
  while (query[at] !== 0) {
    const length = query[at] ?? 0;
    labels.push(query.subarray(at + 1, at + 1 + length).toString("latin1"));
    at += length + 1;
  }
  const type = query.readUInt16BE(at + 1);
  const name = labels.join(".").toLowerCase();
  console.log(`dns ${type} ${name}`);
  const value = names.get(name);
  const addresses = type === 1 && value !== undefined && /^\d/.test(value) ? value.split(",") : [];
  const code = value === undefined ? 3 : value === "fail" ? 2 : 0;
  const head = Buffer.from(query.subarray(0, at + 5));
  head.writeUInt16BE(0x8180 | code, 2);
  head.writeUInt16BE(addresses.length, 6);
  head.writeUInt16BE(0, 10);
  const records = addresses.map((text) =>
    Buffer.from([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, ...text.split(".").map(Number)]),
  );
  return Buffer.concat([head, ...records]);
}

await Bun.udpSocket({
  hostname: address,
  port: 53,
  socket: {
    data(socket, bytes, port, peer) {
      socket.send(reply(Buffer.from(bytes)), port, peer);
    },
    error(_socket, error) {
      // Without an error: a client that went away before its answer came.
      if (error !== undefined) console.error(`dns: ${error.message}`);
    },
  },
});
console.log("ready");
for await (const line of console) define(line);
