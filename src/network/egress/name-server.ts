import { parseIpv4 } from "../../lib/ipv4.ts";
import type { Logger } from "../../lib/log.ts";
import {
  DNS_CLASS_IN,
  DNS_TYPE_A,
  DnsCode,
  type DnsQuery,
  MAX_UDP_ANSWERS,
  readQuery,
  writeAnswer,
} from "./dns-message.ts";
import type { Ledgers } from "./ledger.ts";
import type { Names } from "./names.ts";
import type { FindGuest } from "./types.ts";

export interface NameServerOptions {
  readonly address: string;
  readonly port: number;
  readonly names: Names;
  readonly findGuest: FindGuest;
  readonly ledgers: Ledgers;
  readonly log: Logger;
}

export interface NameServerCounters {
  answered: number;
  refused: number;
  failed: number;
}

/** Questions of one guest that wait for an answer; more are dropped (the guest asks again). */
const MAX_WAITING_PER_GUEST = 64;
/** Each try takes one report of an unreachable port off the socket. */
const MAX_SENDS = 16;
const MAX_TCP_PER_GUEST = 16;
const TCP_IDLE_SECONDS = 10;
const MAX_TCP_PENDING_BYTES = 4096;
const MAX_TCP_ANSWERS = 256;

interface TcpState {
  readonly guest: number;
  pending: Buffer;
  busy: boolean;
}

type TcpSocket = Bun.Socket<TcpState | undefined>;

/**
 * Answers restricted guests: address queries for names their policy allows, with what {@link Names} found.
 * Everything else gets an empty answer or a refusal and causes no packet, so that nothing can be carried out
 * in a question. Not answered at all: what does not come from a guest.
 */
export class NameServer implements Disposable {
  readonly counters: NameServerCounters = { answered: 0, refused: 0, failed: 0 };
  readonly #options: NameServerOptions;
  readonly #waiting = new Map<number, number>();
  readonly #tcpOf = new Map<number, number>();
  readonly #sockets = new DisposableStack();

  private constructor(options: NameServerOptions) {
    this.#options = options;
  }

  /** Listens by UDP and TCP; throws (EADDRINUSE) when the port is taken. */
  static async listen(options: NameServerOptions): Promise<NameServer> {
    using undo = new DisposableStack();
    const server = undo.use(new NameServer(options));
    server.#listenTcp();
    await server.#listenUdp();
    undo.move();
    return server;
  }

  /** Undefined: not to be answered. */
  async answer(guestAddress: number, message: Uint8Array, maxAnswers: number): Promise<Buffer | undefined> {
    const query = readQuery(message);
    const guest = this.#options.findGuest(guestAddress);
    if (query === undefined || guest === undefined) return undefined;
    if (query.class !== DNS_CLASS_IN || !guest.allowsQuery(query.name)) {
      this.counters.refused++;
      this.#options.ledgers.refusal(guestAddress, "nameRefused", `the name ${query.name} is not allowed`);
      return writeAnswer(query, DnsCode.refused);
    }
    // Guests have IPv4 only; other kinds of record could carry anything.
    if (query.type !== DNS_TYPE_A) return writeAnswer(query, DnsCode.ok);
    if ((this.#waiting.get(guestAddress) ?? 0) >= MAX_WAITING_PER_GUEST) return undefined;
    enter(this.#waiting, guestAddress);
    try {
      return await this.#lookUp(guestAddress, query, maxAnswers);
    } finally {
      leave(this.#waiting, guestAddress);
    }
  }

  [Symbol.dispose](): void {
    this.#sockets.dispose();
  }

  async #lookUp(guest: number, query: DnsQuery, maxAnswers: number): Promise<Buffer> {
    try {
      const { addresses, ttlSeconds } = await this.#options.names.resolve(query.name, guest);
      this.counters.answered++;
      this.#options.ledgers.count(guest, "nameAnswered");
      return writeAnswer(query, DnsCode.ok, addresses.slice(0, maxAnswers), ttlSeconds);
    } catch (error) {
      this.counters.failed++;
      this.#options.ledgers.count(guest, "nameFailed");
      this.#options.log.debug({ err: error, name: query.name }, "a guest's name cannot be looked up");
      return writeAnswer(query, DnsCode.serverFailure);
    }
  }

  async #listenUdp(): Promise<void> {
    const { address, port, log } = this.#options;
    const udp = await Bun.udpSocket({
      hostname: address,
      port,
      socket: {
        data: async (socket, bytes, peerPort, peer) => {
          try {
            const answer = await this.answer(parseIpv4(peer) ?? 0, bytes, MAX_UDP_ANSWERS);
            if (answer !== undefined && !socket.closed) sendTo(socket, answer, peerPort, peer, log);
          } catch (error) {
            log.error({ err: error }, "answering a guest's DNS query failed");
          }
        },
        // A guest that went away before its answer came.
        error: (_socket, error) => log.debug({ err: error }, "name server: UDP"),
      },
    });
    this.#sockets.defer(() => udp.close());
  }

  /** Questions over TCP, one after the other on each connection, each behind its length (RFC 7766). */
  #listenTcp(): void {
    const listener = Bun.listen<TcpState | undefined>({
      hostname: this.#options.address,
      port: this.#options.port,
      socket: {
        open: (socket) => {
          const guest = parseIpv4(socket.remoteAddress) ?? 0;
          const connections = this.#tcpOf.get(guest) ?? 0;
          if (connections >= MAX_TCP_PER_GUEST || this.#options.findGuest(guest) === undefined) {
            socket.terminate();
            return;
          }
          enter(this.#tcpOf, guest);
          socket.data = { guest, pending: Buffer.alloc(0), busy: false };
          socket.timeout(TCP_IDLE_SECONDS);
        },
        timeout: (socket) => {
          socket.terminate();
        },
        data: (socket, bytes) => {
          const state = socket.data;
          if (state === undefined) return;
          state.pending = Buffer.concat([state.pending, bytes]);
          if (state.pending.length > MAX_TCP_PENDING_BYTES) socket.terminate();
          else if (!state.busy) void this.#serveTcp(socket, state);
        },
        close: (socket) => {
          if (socket.data !== undefined) leave(this.#tcpOf, socket.data.guest);
        },
        error: (_socket, error) => this.#options.log.debug({ err: error }, "name server: TCP"),
      },
    });
    this.#sockets.defer(() => listener.stop(true));
  }

  async #serveTcp(socket: TcpSocket, state: TcpState): Promise<void> {
    state.busy = true;
    try {
      while (state.pending.length >= 2) {
        const end = 2 + state.pending.readUInt16BE(0);
        if (state.pending.length < end) break;
        const query = state.pending.subarray(2, end);
        state.pending = state.pending.subarray(end);
        const answer = await this.answer(state.guest, query, MAX_TCP_ANSWERS);
        const size = Buffer.alloc(2);
        size.writeUInt16BE(answer?.length ?? 0);
        // An answer is small: what does not fit the socket's buffer belongs to a client that never reads.
        if (answer === undefined || socket.write(Buffer.concat([size, answer])) < answer.length + 2) {
          socket.terminate();
          return;
        }
      }
    } catch (error) {
      this.#options.log.error({ err: error }, "answering a guest's DNS query failed");
      socket.terminate();
    } finally {
      state.busy = false;
    }
  }
}

/**
 * A guest that closed its socket answers with "port unreachable", which the kernel reports at the next send,
 * to whomever that is: then nothing was sent, and it is tried again.
 */
function sendTo(
  socket: Bun.udp.Socket<"buffer">,
  answer: Buffer,
  port: number,
  address: string,
  log: Logger,
): void {
  for (let tries = 1; ; tries++) {
    try {
      socket.send(answer, port, address);
      return;
    } catch (error) {
      if (tries < MAX_SENDS) continue;
      log.debug({ err: error }, "name server: an answer could not be sent");
      return;
    }
  }
}

function enter(counts: Map<number, number>, key: number): void {
  counts.set(key, (counts.get(key) ?? 0) + 1);
}

function leave(counts: Map<number, number>, key: number): void {
  const left = (counts.get(key) ?? 1) - 1;
  if (left === 0) counts.delete(key);
  else counts.set(key, left);
}
