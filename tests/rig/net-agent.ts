/**
 * Plays a guest's programs: takes orders as JSON lines on its standard input, answers with JSON lines.
 * See `GuestOrder` in tests/support/network-rig.ts.
 */
import type { GuestAnswer, GuestOrder } from "../support/network-rig.ts";

function tcp(order: Extract<GuestOrder, { op: "tcp" }>): Promise<Partial<GuestAnswer>> {
  const { promise, resolve } = Promise.withResolvers<Partial<GuestAnswer>>();
  let received = "";
  let connected = false;
  const bytes = Buffer.from(order.sendHex ?? "", "hex");
  const finish = (outcome: GuestAnswer["outcome"]) => resolve({ outcome, received });
  const timer = setTimeout(() => finish(connected ? "open" : "timeout"), order.timeoutMs);
  const done = (outcome: GuestAnswer["outcome"]) => {
    clearTimeout(timer);
    finish(outcome);
  };
  const pieces = order.pieces ?? 1;
  const size = Math.max(Math.ceil(bytes.length / pieces), 1);
  let sent = 0;
  let ended = false;
  const send = (socket: Bun.Socket<unknown>) => {
    while (sent < bytes.length) {
      const taken = socket.write(bytes.subarray(sent, (Math.floor(sent / size) + 1) * size));
      if (taken <= 0) return;
      sent += taken;
      if (pieces > 1 && sent < bytes.length) {
        setTimeout(() => send(socket), 2);
        return;
      }
    }
    if (order.end && !ended) socket.shutdown();
    ended = true;
  };
  Bun.connect({
    hostname: order.address,
    port: order.port,
    allowHalfOpen: true,
    socket: {
      open(socket) {
        connected = true;
        if (order.stall) socket.pause();
        send(socket);
      },
      drain: send,
      data(socket, chunk) {
        received += Buffer.from(chunk).toString("latin1");
        if (order.until !== undefined && received.includes(order.until)) {
          done("open");
          socket.end();
        }
      },
      end: () => done("ended"),
      close: (_socket, error) => done(error == null ? "ended" : "reset"),
    },
  }).catch((error: unknown) => {
    const code = error instanceof Error && "code" in error ? String(error.code) : "";
    done(code === "ECONNREFUSED" ? "refused" : "unreachable");
  });
  return promise;
}

const kept = new Map<string, { socket: Bun.Socket<unknown>; received: string; closed: boolean }>();

/** A connection that stays: opened by the first order of its name, used by the later ones. */
async function flow(order: Extract<GuestOrder, { op: "flow" }>): Promise<Partial<GuestAnswer>> {
  let entry = kept.get(order.name);
  if (entry === undefined) {
    const state = { received: "", closed: false };
    const socket = await Bun.connect({
      hostname: order.address,
      port: order.port,
      socket: {
        data(_socket, chunk) {
          state.received += Buffer.from(chunk).toString("latin1");
        },
        close() {
          state.closed = true;
        },
      },
    });
    entry = Object.assign(state, { socket });
    kept.set(order.name, entry);
  }
  const before = entry.received.length;
  entry.socket.write(Buffer.from(order.sendHex ?? "", "hex"));
  for (let i = 0; i < 40 && !entry.closed && !entry.received.slice(before).includes(order.until); i++) {
    await Bun.sleep(25);
  }
  const answered = entry.received.slice(before).includes(order.until);
  return {
    outcome: entry.closed ? "ended" : answered ? "open" : "timeout",
    received: entry.received.slice(before),
  };
}

async function udp(order: Extract<GuestOrder, { op: "udp" }>): Promise<Partial<GuestAnswer>> {
  const { promise, resolve } = Promise.withResolvers<Partial<GuestAnswer>>();
  const timer = setTimeout(() => resolve({ outcome: "timeout", received: "" }), order.timeoutMs);
  try {
    const socket = await Bun.udpSocket({
      connect: { hostname: order.address, port: order.port },
      socket: {
        data(_socket, bytes) {
          resolve({ outcome: "open", received: Buffer.from(bytes).toString("hex") });
        },
        error() {
          resolve({ outcome: "refused", received: "" });
        },
      },
    });
    socket.send(Buffer.from(order.sendHex, "hex"));
    const answer = await promise;
    socket.close();
    return answer;
  } finally {
    clearTimeout(timer);
  }
}

async function many(order: Extract<GuestOrder, { op: "many" }>): Promise<Partial<GuestAnswer>> {
  const results = await Promise.all(
    Array.from({ length: order.count }, () =>
      tcp({ ...order, op: "tcp" }).then(({ received }) => received?.includes(order.until) ?? false),
    ),
  );
  return { outcome: "open", received: String(results.filter(Boolean).length) };
}

function perform(order: GuestOrder): Promise<Partial<GuestAnswer>> {
  switch (order.op) {
    case "tcp":
      return tcp(order);
    case "udp":
      return udp(order);
    case "flow":
      return flow(order);
    case "many":
      return many(order);
  }
}

console.log(JSON.stringify({ id: -1 }));
for await (const line of console) {
  const order = JSON.parse(line) as GuestOrder & { readonly id: number };
  perform(order).then(
    (answer) => console.log(JSON.stringify({ id: order.id, ...answer })),
    (error: unknown) =>
      console.log(JSON.stringify({ id: order.id, outcome: "failed", received: String(error) })),
  );
}
process.exit(0);
