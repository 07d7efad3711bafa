/**
 * Plays the internet's servers: `tcp:PORT` on every address greets with its own and the client's address,
 * repeats what it hears (or on "X-Pump" sends zeros without end), says "bye" at the client's end; `udp:ADDRESS:PORT` answers with the client's address.
 * Prints `tcp|udp ADDRESS:PORT CLIENT` per connection or packet. `silent:PORT` accepts and says nothing;
 * `pump:PORT` sends zeros as fast as they are taken; `sink:PORT` swallows, and says how much at the end.
 */
const zeros = Buffer.alloc(256 * 1024);

function listen(port: number, kind: "tcp" | "silent" | "pump" | "sink"): void {
  const pump = (socket: Bun.Socket<unknown>) => {
    while (socket.write(zeros) === zeros.length);
  };
  interface State {
    heard: number;
    /** Not taken by the socket yet. */
    rest: Buffer;
    ended: boolean;
    pumping: boolean;
  }
  const write = (socket: Bun.Socket<State>, bytes: Uint8Array | string) => {
    socket.data.rest = Buffer.concat([socket.data.rest, Buffer.from(bytes as string)]);
    flush(socket);
  };
  const flush = (socket: Bun.Socket<State>) => {
    const taken = Math.max(socket.write(socket.data.rest), 0);
    socket.data.rest = socket.data.rest.subarray(taken);
    if (socket.data.ended && socket.data.rest.length === 0) socket.end();
  };
  Bun.listen<State>({
    hostname: "0.0.0.0",
    port,
    allowHalfOpen: true,
    socket: {
      open(socket) {
        socket.data = { heard: 0, rest: Buffer.alloc(0), ended: false, pumping: kind === "pump" };
        console.log(`tcp ${socket.localAddress}:${port} ${socket.remoteAddress}`);
        if (kind === "tcp") write(socket, `hello ${socket.localAddress}:${port}\n`);
        if (kind === "pump") pump(socket);
      },
      data(socket, bytes) {
        socket.data.heard += bytes.length;
        if (Buffer.from(bytes).includes("X-Pump")) socket.data.pumping = true;
        if (socket.data.pumping) pump(socket);
        else if (kind === "tcp") write(socket, bytes);
      },
      drain(socket) {
        if (socket.data.pumping) pump(socket);
        else flush(socket);
      },
      end(socket) {
        socket.data.ended = true;
        write(socket, kind === "tcp" ? "bye\n" : kind === "sink" ? `${socket.data.heard}\n` : "");
      },
    },
  });
}

for (const argument of process.argv.slice(2)) {
  const [kind, first = "", second] = argument.split(":");
  if (kind === "udp") {
    const port = Number(second);
    await Bun.udpSocket({
      hostname: first,
      port,
      socket: {
        data(socket, _bytes, peerPort, peer) {
          console.log(`udp ${first}:${port} ${peer}`);
          socket.send(peer, peerPort, peer);
        },
        error(_socket, error) {
          console.error(`udp: ${error.message}`);
        },
      },
    });
  } else if (kind === "tcp" || kind === "silent" || kind === "pump" || kind === "sink") {
    listen(Number(first), kind);
  } else {
    throw new Error(`what is ${argument}?`);
  }
}
console.log("ready");
