import { Reader, Writer } from "protobufjs/minimal.js";

/*
 * The messages of the sandbox agent (protocol buffers, packages `process` and `filesystem`) that the command
 * line needs. Written field by field: a shell must come up at once, and a schema compiler would cost more
 * time than all the rest of the start.
 */

export interface TerminalSize {
  readonly cols: number;
  readonly rows: number;
}

export interface StartRequest {
  readonly cmd: string;
  readonly args: readonly string[];
  readonly envs?: Readonly<Record<string, string>>;
  readonly cwd?: string;
  /** A terminal of this size; absent: pipes. */
  readonly pty?: TerminalSize;
  /** False: standard input is empty. */
  readonly stdin?: boolean;
}

export interface ProcessEnd {
  readonly exitCode: number;
  /** False when a signal ended the process; `status` tells which. */
  readonly exited: boolean;
  /** `exit status 3` or `signal: killed`. */
  readonly status: string;
}

export type ProcessEvent =
  | { readonly kind: "start"; readonly pid: number }
  | { readonly kind: "stdout" | "stderr" | "pty"; readonly bytes: Uint8Array }
  | { readonly kind: "end"; readonly end: ProcessEnd }
  | { readonly kind: "keepalive" };

const SIGNAL_NUMBERS = { SIGTERM: 15, SIGKILL: 9 } as const;

const bytesField = (field: number) => (field << 3) | 2;
const numberField = (field: number) => field << 3;

function message(writer: Writer, field: number, write: (writer: Writer) => void): void {
  writer.uint32(bytesField(field)).fork();
  write(writer);
  writer.ldelim();
}

function encode(write: (writer: Writer) => void): Uint8Array {
  const writer = Writer.create();
  write(writer);
  return writer.finish();
}

/** ProcessSelector in field 1: which process a request is about. */
function select(writer: Writer, pid: number): void {
  message(writer, 1, (selector) => selector.uint32(numberField(1)).uint32(pid));
}

/** PTY in field 2. */
function pty(writer: Writer, { cols, rows }: TerminalSize): void {
  message(writer, 2, (terminal) =>
    message(terminal, 1, (size) => {
      size.uint32(numberField(1)).uint32(cols).uint32(numberField(2)).uint32(rows);
    }),
  );
}

/** ProcessInput in field 2: bytes for the process's terminal. */
function input(writer: Writer, bytes: Uint8Array): void {
  message(writer, 2, (data) => data.uint32(bytesField(2)).bytes(bytes));
}

export const encodeEmpty = (): Uint8Array => new Uint8Array(0);

export function encodeStart(request: StartRequest): Uint8Array {
  return encode((writer) => {
    message(writer, 1, (config) => {
      config.uint32(bytesField(1)).string(request.cmd);
      for (const arg of request.args) config.uint32(bytesField(2)).string(arg);
      for (const [name, value] of Object.entries(request.envs ?? {})) {
        message(config, 3, (entry) =>
          entry.uint32(bytesField(1)).string(name).uint32(bytesField(2)).string(value),
        );
      }
      if (request.cwd !== undefined) config.uint32(bytesField(4)).string(request.cwd);
    });
    if (request.pty !== undefined) pty(writer, request.pty);
    if (request.stdin !== undefined) writer.uint32(numberField(4)).bool(request.stdin);
  });
}

/** ConnectRequest: the events of a process that runs. */
export function encodeConnect(pid: number): Uint8Array {
  return encode((writer) => select(writer, pid));
}

export function encodeResize(pid: number, size: TerminalSize): Uint8Array {
  return encode((writer) => {
    select(writer, pid);
    pty(writer, size);
  });
}

export function encodeSignal(pid: number, signal: keyof typeof SIGNAL_NUMBERS): Uint8Array {
  return encode((writer) => {
    select(writer, pid);
    writer.uint32(numberField(2)).int32(SIGNAL_NUMBERS[signal]);
  });
}

/** SendInputRequest: keys for a process in one call. */
export function encodeInput(pid: number, bytes: Uint8Array): Uint8Array {
  return encode((writer) => {
    select(writer, pid);
    input(writer, bytes);
  });
}

/** First message of a StreamInput. */
export function encodeInputStart(pid: number): Uint8Array {
  return encode((writer) => message(writer, 1, (start) => select(start, pid)));
}

export function encodeInputData(bytes: Uint8Array): Uint8Array {
  return encode((writer) => message(writer, 2, (data) => input(data, bytes)));
}

export function encodeInputKeepalive(): Uint8Array {
  return encode((writer) => message(writer, 3, () => undefined));
}

/** A message of a StreamInput: bytes for a process without a terminal. */
export function encodeStdinData(bytes: Uint8Array): Uint8Array {
  return encode((writer) =>
    message(writer, 2, (data) => message(data, 2, (stdin) => stdin.uint32(bytesField(1)).bytes(bytes))),
  );
}

/** CloseStdinRequest. */
export const encodeCloseStdin = encodeConnect;

/** ListDirRequest. */
export function encodeListDir(path: string, depth: number): Uint8Array {
  return encode((writer) => writer.uint32(bytesField(1)).string(path).uint32(numberField(2)).uint32(depth));
}

/** MoveRequest. */
export function encodeMove(source: string, destination: string): Uint8Array {
  return encode((writer) =>
    writer.uint32(bytesField(1)).string(source).uint32(bytesField(2)).string(destination),
  );
}

/** StatRequest, MakeDirRequest, RemoveRequest. */
export function encodePath(path: string): Uint8Array {
  return encode((writer) => writer.uint32(bytesField(1)).string(path));
}

/** Calls `visit` with each field's number; a field it does not read (returns false) is skipped. */
function eachField(reader: Reader, end: number, visit: (field: number) => boolean): void {
  while (reader.pos < end) {
    const tag = reader.uint32();
    if (!visit(tag >>> 3)) reader.skipType(tag & 7);
  }
}

/** End of the embedded message that begins here. */
function embedded(reader: Reader): number {
  const length = reader.uint32();
  return reader.pos + length;
}

function decodeEnd(reader: Reader, limit: number): ProcessEnd {
  let exitCode = 0;
  let exited = false;
  let status = "";
  eachField(reader, limit, (field) => {
    if (field === 1) exitCode = reader.sint32();
    else if (field === 2) exited = reader.bool();
    else if (field === 3) status = reader.string();
    else return false;
    return true;
  });
  return { exitCode, exited, status };
}

export interface RemoteEntry {
  readonly name: string;
  readonly type: "file" | "directory" | "symlink" | "other";
  /** Absolute. */
  readonly path: string;
  readonly size: number;
  /** Where a symbolic link leads; `type` is the type of what is there. */
  readonly symlinkTarget: string | undefined;
}

const FILE_TYPES = { 1: "file", 2: "directory", 3: "symlink" } as const;

function decodeEntryInfo(reader: Reader, limit: number): RemoteEntry {
  let name = "";
  let type: RemoteEntry["type"] = "other";
  let path = "";
  let size = 0;
  let symlinkTarget: string | undefined;
  eachField(reader, limit, (field) => {
    if (field === 1) name = reader.string();
    else if (field === 2) type = FILE_TYPES[reader.int32() as 1 | 2 | 3] ?? "other";
    else if (field === 3) path = reader.string();
    // A number, or an object that knows how to become one.
    else if (field === 4) size = Number(reader.int64());
    else if (field === 10) symlinkTarget = reader.string();
    else return false;
    return true;
  });
  return { name, type, path, size, symlinkTarget };
}

/** StatResponse, MakeDirResponse (one entry), ListDirResponse (any number). */
export function decodeEntries(bytes: Uint8Array): RemoteEntry[] {
  const reader = Reader.create(bytes);
  const entries: RemoteEntry[] = [];
  eachField(reader, reader.len, (field) => {
    if (field !== 1) return false;
    entries.push(decodeEntryInfo(reader, embedded(reader)));
    return true;
  });
  return entries;
}

export interface RemoteProcess {
  readonly pid: number;
  readonly cmd: string;
  readonly args: readonly string[];
}

/** ListResponse: what was started over the agent and runs. */
export function decodeProcesses(bytes: Uint8Array): RemoteProcess[] {
  const reader = Reader.create(bytes);
  const processes: RemoteProcess[] = [];
  eachField(reader, reader.len, (field) => {
    if (field !== 1) return false;
    let pid = 0;
    let cmd = "";
    const args: string[] = [];
    eachField(reader, embedded(reader), (info) => {
      if (info === 2) {
        pid = reader.uint32();
        return true;
      }
      if (info !== 1) return false;
      eachField(reader, embedded(reader), (config) => {
        if (config === 1) cmd = reader.string();
        else if (config === 2) args.push(reader.string());
        else return false;
        return true;
      });
      return true;
    });
    processes.push({ pid, cmd, args });
    return true;
  });
  return processes;
}

const STREAMS = { 1: "stdout", 2: "stderr", 3: "pty" } as const;

/** One StartResponse or ConnectResponse; undefined for an event this program does not know. */
export function decodeEvent(bytes: Uint8Array): ProcessEvent | undefined {
  const reader = Reader.create(bytes);
  let event: ProcessEvent | undefined;
  const inEvent = (field: number): boolean => {
    if (field < 1 || field > 4) return false;
    const end = embedded(reader);
    if (field === 1) {
      let pid = 0;
      eachField(reader, end, (inner) => {
        if (inner !== 1) return false;
        pid = reader.uint32();
        return true;
      });
      event = { kind: "start", pid };
    } else if (field === 2) {
      eachField(reader, end, (inner) => {
        if (inner !== 1 && inner !== 2 && inner !== 3) return false;
        event = { kind: STREAMS[inner], bytes: reader.bytes() };
        return true;
      });
    } else if (field === 3) {
      event = { kind: "end", end: decodeEnd(reader, end) };
    } else {
      event = { kind: "keepalive" };
      reader.pos = end;
    }
    return true;
  };
  eachField(reader, reader.len, (field) => {
    if (field !== 1) return false;
    eachField(reader, embedded(reader), inEvent);
    return true;
  });
  return event;
}
