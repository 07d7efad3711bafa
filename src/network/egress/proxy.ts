import { originalDestination } from "../../../ffi/netns.ts";
import { formatIpv4, parseIpv4 } from "../../lib/ipv4.ts";
import type { Logger } from "../../lib/log.ts";
import type { Ledgers } from "./ledger.ts";
import type { Names } from "./names.ts";
import { readPreface } from "./preface.ts";
import type { FindGuest, GuestView } from "./types.ts";

export interface ProxyLimits {
  /** Connections of one guest and of all guests at a time; more are reset. */
  readonly connectionsPerGuest: number;
  readonly connections: number;
  /** What every guest may still have when others have taken more than half of all. */
  readonly reservedPerGuest: number;
  /** Bytes that wait in this process, of one guest and of all; more ends the connection. */
  readonly waitingBytesPerGuest: number;
  readonly waitingBytes: number;
  /** From accept to a readable host name, and from there to an open connection. */
  readonly prefaceTimeoutMs: number;
  readonly connectTimeoutMs: number;
}

export const PROXY_LIMITS: ProxyLimits = {
  connectionsPerGuest: 2048,
  connections: 16_384,
  reservedPerGuest: 64,
  waitingBytesPerGuest: 32 * 1024 * 1024,
  waitingBytes: 256 * 1024 * 1024,
  prefaceTimeoutMs: 10_000,
  connectTimeoutMs: 10_000,
};

export interface ProxyOptions {
  /** Where to listen, and the address connections are made from. */
  readonly address: string;
  readonly port: number;
  readonly names: Names;
  readonly isDenied: (address: number) => boolean;
  readonly findGuest: FindGuest;
  readonly ledgers: Ledgers;
  readonly log: Logger;
  readonly limits?: ProxyLimits;
}

export interface ProxyCounters {
  open: number;
  relayed: number;
  refused: number;
}

/** What came so far is read again with every piece: this bounds the work a byte-by-byte sender can cause. */
const MAX_PREFACE_PIECES = 256;
/** A dead peer is noticed after this long without a packet. */
const KEEP_ALIVE_MS = 60_000;

/** The descriptor is there though the types do not say so. */
type Side = Bun.Socket<Connection | undefined> & { readonly fd?: number };

/** One guest's connection and, once its name is judged, the connection to where it goes. */
class Connection {
  readonly guest: number;
  readonly view: GuestView;
  readonly inner: Side;
  readonly destination: { readonly address: number; readonly port: number };
  outer: Side | undefined;
  /** `reading` the preface, `deciding`, `connecting`, `relaying`, `closed`. */
  state: "reading" | "deciding" | "connecting" | "relaying" | "closed" = "reading";
  /** Bytes for the outer and the inner side that it has not taken yet. */
  toOuter: Buffer[] = [];
  toInner: Buffer[] = [];
  waitingBytes = 0;
  /** Has sent its end; has been told the other's end; is closed. */
  readonly ended = { inner: false, outer: false };
  readonly told = { inner: false, outer: false };
  readonly gone = { inner: false, outer: false };
  /** Pieces that the preface came in. */
  pieces = 0;
  timer: Timer | undefined;

  constructor(
    inner: Side,
    guest: number,
    view: GuestView,
    destination: { readonly address: number; readonly port: number },
  ) {
    this.inner = inner;
    this.guest = guest;
    this.view = view;
    this.destination = destination;
  }
}

interface GuestConnections {
  readonly open: Set<Connection>;
  waitingBytes: number;
}

/**
 * The node's one egress proxy: takes the web connections that the host's rules divert from guests with domain
 * rules, reads which host they are for, and joins them to their destination if the policy allows the host and
 * the destination is an address of it. Nothing is decrypted or changed. Whatever cannot be read, judged,
 * looked up or reached is reset.
 */
export class EgressProxy implements Disposable {
  readonly counters: ProxyCounters = { open: 0, relayed: 0, refused: 0 };
  readonly #options: ProxyOptions;
  readonly #limits: ProxyLimits;
  readonly #byGuest = new Map<number, GuestConnections>();
  readonly #listener: { stop(force?: boolean): void };
  #waitingBytes = 0;

  /** Listens; throws (EADDRINUSE) when the port is taken. */
  constructor(options: ProxyOptions) {
    this.#options = options;
    this.#limits = options.limits ?? PROXY_LIMITS;
    this.#listener = Bun.listen<Connection | undefined>({
      hostname: options.address,
      port: options.port,
      allowHalfOpen: true,
      socket: {
        open: (socket) => this.#accept(socket),
        data: (socket, bytes) => this.#innerData(socket.data, bytes),
        drain: (socket) => this.#flush(socket.data, "inner"),
        end: (socket) => this.#innerEnd(socket.data),
        close: (socket, error) => this.#gone(socket.data, "inner", error),
        error: (socket, error) => this.#fail(socket.data, error),
      },
    });
  }

  /** Bytes that wait for slow readers at this moment. */
  get waitingBytes(): number {
    return this.#waitingBytes;
  }

  /** Ends the guest's connections: its slot is given back. */
  closeGuest(guest: number): void {
    for (const connection of [...(this.#byGuest.get(guest)?.open ?? [])]) this.#close(connection);
  }

  openConnections(guest: number): number {
    return this.#byGuest.get(guest)?.open.size ?? 0;
  }

  [Symbol.dispose](): void {
    this.#listener.stop(true);
    for (const guest of [...this.#byGuest.keys()]) this.closeGuest(guest);
  }

  // ---- before the decision ---------------------------------------------------------------------------

  #accept(socket: Side): void {
    const guest = parseIpv4(socket.remoteAddress) ?? 0;
    const view = this.#options.findGuest(guest);
    const destination = originalDestination(socket.fd ?? -1);
    if (view === undefined || destination === undefined || !this.#hasRoom(guest)) {
      this.counters.refused++;
      if (view !== undefined && destination !== undefined) {
        this.#options.ledgers.refusal(guest, "connectionRefused", "too many connections at a time");
      }
      socket.terminate();
      return;
    }
    const connection = new Connection(socket, guest, view, destination);
    socket.data = connection;
    this.counters.open++;
    const others = this.#byGuest.get(guest) ?? { open: new Set(), waitingBytes: 0 };
    others.open.add(connection);
    this.#byGuest.set(guest, others);
    // Allowed since the rules diverted it: the name does not matter, and the server may be the first to speak.
    if (view.allowsAddress(destination.address) && !this.#options.isDenied(destination.address)) {
      this.#connect(connection);
      return;
    }
    connection.timer = setTimeout(
      () => this.#refuse(connection, "it did not name its host in time"),
      this.#limits.prefaceTimeoutMs,
    );
  }

  #hasRoom(guest: number): boolean {
    const { connectionsPerGuest, connections, reservedPerGuest } = this.#limits;
    const { open } = this.counters;
    const scarce = open >= connections / 2;
    return (
      open < connections && this.openConnections(guest) < (scarce ? reservedPerGuest : connectionsPerGuest)
    );
  }

  /** Bytes begin or (negative) cease to wait. */
  #wait(connection: Connection, bytes: number): void {
    connection.waitingBytes += bytes;
    this.#waitingBytes += bytes;
    const others = this.#byGuest.get(connection.guest);
    if (others !== undefined) others.waitingBytes += bytes;
  }

  #innerData(connection: Connection | undefined, bytes: Uint8Array): void {
    if (connection === undefined || connection.state === "closed") return;
    if (connection.state === "relaying") {
      this.#relay(connection, "outer", bytes);
      return;
    }
    if (!this.#hold(connection, connection.toOuter, bytes)) return;
    if (connection.state !== "reading") {
      connection.inner.pause();
      return;
    }
    if (++connection.pieces > MAX_PREFACE_PIECES) {
      this.#refuse(connection, "its host name comes in too many pieces");
      return;
    }
    const preface = Buffer.concat(connection.toOuter);
    connection.toOuter = [preface];
    const found = readPreface(preface);
    if (found.kind === "refused") this.#refuse(connection, found.reason);
    else if (found.kind === "name") void this.#decide(connection, found.name);
  }

  #innerEnd(connection: Connection | undefined): void {
    if (connection === undefined || connection.state === "closed") return;
    connection.ended.inner = true;
    if (connection.state === "reading") this.#refuse(connection, "it ended without naming its host");
    else this.#passEnds(connection);
  }

  async #decide(connection: Connection, name: string): Promise<void> {
    connection.state = "deciding";
    connection.inner.pause();
    clearTimeout(connection.timer);
    const { address } = connection.destination;
    try {
      if (!connection.view.allowsWeb(name)) this.#refuse(connection, `${name} is not allowed`);
      else if (this.#options.isDenied(address))
        this.#refuse(connection, "its address is denied on this node");
      else if (!(await this.#options.names.owns(name, address, connection.guest))) {
        this.#refuse(connection, `${name} does not have the address ${formatIpv4(address)}`);
      } else this.#connect(connection);
    } catch (error) {
      this.#refuse(connection, `${name} cannot be looked up`, error);
    }
  }

  // ---- the other side --------------------------------------------------------------------------------

  #connect(connection: Connection): void {
    // The guest may have gone while its name was looked up.
    if (connection.state === "closed") return;
    connection.state = "connecting";
    connection.timer = setTimeout(
      () => this.#refuse(connection, "its destination did not answer in time"),
      this.#limits.connectTimeoutMs,
    );
    const options: Bun.TCPSocketConnectOptions<Connection | undefined> & { localAddress: string } = {
      hostname: formatIpv4(connection.destination.address),
      port: connection.destination.port,
      // The host's rules refuse this address what they refuse every guest, whatever is decided here.
      localAddress: this.#options.address,
      allowHalfOpen: true,
      data: connection,
      socket: {
        open: (socket) => this.#connected(connection, socket),
        data: (_socket, bytes) => this.#relay(connection, "inner", bytes),
        drain: () => this.#flush(connection, "outer"),
        end: () => this.#outerEnd(connection),
        close: (_socket, error) => this.#gone(connection, "outer", error),
        error: (_socket, error) => this.#fail(connection, error),
        connectError: (_socket, error) => this.#fail(connection, error),
      },
    };
    // A failure is told to connectError as well; the promise must still be watched.
    Bun.connect(options).catch((error: unknown) => this.#fail(connection, error));
  }

  #connected(connection: Connection, outer: Side): void {
    if (connection.state !== "connecting") {
      outer.terminate();
      return;
    }
    clearTimeout(connection.timer);
    connection.outer = outer;
    connection.state = "relaying";
    this.counters.relayed++;
    this.#options.ledgers.count(connection.guest, "relayed");
    for (const side of [connection.inner, outer]) {
      side.setKeepAlive(true, KEEP_ALIVE_MS);
      side.setNoDelay(true);
    }
    this.#flush(connection, "outer");
    if (connection.toOuter.length === 0) connection.inner.resume();
  }

  #outerEnd(connection: Connection): void {
    if (connection.state === "closed") return;
    connection.ended.outer = true;
    this.#passEnds(connection);
  }

  // ---- relay -----------------------------------------------------------------------------------------

  #relay(connection: Connection, to: "inner" | "outer", bytes: Uint8Array): void {
    if (connection.state !== "relaying") return;
    const [target, queue] =
      to === "outer"
        ? [connection.outer as Side, connection.toOuter]
        : [connection.inner, connection.toInner];
    const taken = queue.length > 0 ? 0 : target.write(bytes);
    if (taken === bytes.length) return;
    if (taken < 0) {
      this.#close(connection);
      return;
    }
    if (!this.#hold(connection, queue, bytes.subarray(taken))) return;
    (to === "outer" ? connection.inner : (connection.outer as Side)).pause();
  }

  /** Keeps a copy for later (the caller's buffer is used again); false: too much, the connection is gone. */
  #hold(connection: Connection, queue: Buffer[], bytes: Uint8Array): boolean {
    const own = this.#byGuest.get(connection.guest)?.waitingBytes ?? 0;
    if (
      own + bytes.length > this.#limits.waitingBytesPerGuest ||
      this.#waitingBytes + bytes.length > this.#limits.waitingBytes
    ) {
      this.#refuse(connection, "too many bytes wait for slow readers");
      return false;
    }
    queue.push(Buffer.from(bytes));
    this.#wait(connection, bytes.length);
    return true;
  }

  #flush(connection: Connection | undefined, to: "inner" | "outer"): void {
    if (connection?.state !== "relaying") return;
    const queue = to === "outer" ? connection.toOuter : connection.toInner;
    const target = to === "outer" ? (connection.outer as Side) : connection.inner;
    while (queue.length > 0) {
      const bytes = queue[0]!;
      const taken = target.write(bytes);
      if (taken < 0) {
        this.#close(connection);
        return;
      }
      this.#wait(connection, -taken);
      if (taken < bytes.length) {
        queue[0] = bytes.subarray(taken);
        return;
      }
      queue.shift();
    }
    (to === "outer" ? connection.inner : (connection.outer as Side)).resume();
    this.#passEnds(connection);
  }

  /** An end on one side becomes an end on the other when all before it is through; two ends are a close. */
  #passEnds(connection: Connection): void {
    if (connection.state !== "relaying") return;
    const { ended, told, gone } = connection;
    if (ended.inner && connection.toOuter.length === 0 && !told.outer) {
      told.outer = true;
      if (!gone.outer) connection.outer?.shutdown();
    }
    if (ended.outer && connection.toInner.length === 0 && !told.inner) {
      told.inner = true;
      if (!gone.inner) connection.inner.shutdown();
    }
    if (told.inner && told.outer) this.#close(connection, "gently");
  }

  /**
   * A side is closed: by a reset (`error`), or because both its directions have ended, in which case the last
   * end is not told apart and what it sent before may still be on its way to the other side.
   */
  #gone(connection: Connection | undefined, side: "inner" | "outer", error: unknown): void {
    if (connection === undefined || connection.state === "closed") return;
    connection.gone[side] = true;
    if (error !== undefined && error !== null) {
      this.#fail(connection, error);
    } else if (connection.state !== "relaying" || !connection.told[side]) {
      this.#close(connection);
    } else {
      connection.ended[side] = true;
      this.#passEnds(connection);
    }
  }

  // ---- ends ------------------------------------------------------------------------------------------

  #refuse(connection: Connection, reason: string, error?: unknown): void {
    if (connection.state === "closed") return;
    this.counters.refused++;
    const { slotIndex } = connection.view;
    const to = `${formatIpv4(connection.destination.address)}:${connection.destination.port}`;
    this.#options.ledgers.refusal(connection.guest, "connectionRefused", `${to}: ${reason}`);
    this.#options.log.debug({ slot: slotIndex, to, reason, err: error }, "egress connection refused");
    this.#close(connection);
  }

  #fail(connection: Connection | undefined, error: unknown): void {
    if (connection === undefined || connection.state === "closed") return;
    this.#options.log.debug({ err: error, slot: connection.view.slotIndex }, "egress connection failed");
    this.#close(connection);
  }

  #close(connection: Connection | undefined, how: "gently" | "reset" = "reset"): void {
    if (connection === undefined || connection.state === "closed") return;
    connection.state = "closed";
    clearTimeout(connection.timer);
    this.counters.open--;
    this.#wait(connection, -connection.waitingBytes);
    connection.toInner = [];
    connection.toOuter = [];
    const others = this.#byGuest.get(connection.guest);
    others?.open.delete(connection);
    if (others?.open.size === 0) this.#byGuest.delete(connection.guest);
    for (const name of ["inner", "outer"] as const) {
      if (connection.gone[name]) continue;
      if (how === "gently") connection[name]?.end();
      else connection[name]?.terminate();
    }
  }
}
