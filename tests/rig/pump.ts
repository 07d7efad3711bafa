/**
 * Sends as fast as it can: `pump.ts ADDRESS PORT MILLISECONDS [HOST]`, first an HTTP request to HOST if given.
 * The other side is `sink` of echo-server.ts. Prints the bytes that arrived and the milliseconds it took.
 */
const [address = "", port = "", milliseconds = "", host] = process.argv.slice(2);
const zeros = Buffer.alloc(1024 * 1024);
const started = performance.now();
const end = started + Number(milliseconds);
let said = "";

function send(socket: Bun.Socket<unknown>): void {
  for (;;) {
    if (performance.now() >= end) {
      socket.shutdown();
      return;
    }
    if (socket.write(zeros) < zeros.length) return;
  }
}

await Bun.connect({
  hostname: address,
  port: Number(port),
  allowHalfOpen: true,
  socket: {
    open(socket) {
      if (host !== undefined) socket.write(`GET / HTTP/1.1\r\nHost: ${host}\r\n\r\n`);
      send(socket);
    },
    drain: send,
    data(_socket, bytes) {
      said += Buffer.from(bytes).toString();
    },
    close() {
      console.log(`${said.trim()} ${performance.now() - started}`);
      process.exit(0);
    },
  },
});
