/**
 * Plays a server: listens at the TCP ports given, on every address, and at UDP addresses given as
 * `udp:ADDRESS:PORT` (an answer must come from the address that was asked). Answers with the peer's
 * address and prints `local-address:port peer-address` per question.
 */
for (const argument of process.argv.slice(2)) {
  const [, hostname, udpPort] = /^udp:([^:]+):(\d+)$/.exec(argument) ?? [];
  const port = Number(udpPort ?? argument);
  if (hostname !== undefined) {
    await Bun.udpSocket({
      hostname,
      port,
      socket: {
        // A client that went away before its answer came: no reason to stop serving.
        error(_socket, error) {
          console.error(`udp: ${error.message}`);
        },
        data(socket, _bytes, peerPort, peerAddress) {
          console.log(`${hostname}:${port} ${peerAddress}`);
          socket.send(peerAddress, peerPort, peerAddress);
        },
      },
    });
    continue;
  }
  Bun.listen({
    hostname: "0.0.0.0",
    port,
    socket: {
      open(socket) {
        console.log(`${socket.localAddress}:${port} ${socket.remoteAddress}`);
        socket.end(socket.remoteAddress);
      },
      data(socket) {
        socket.terminate();
      },
    },
  });
}
console.log("ready");
