import { describe, expect, test } from "bun:test";
import { connect } from "node:tls";
import { clientHello } from "../../../tests/support/client-hello.ts";
import { MAX_PREFACE_BYTES, readPreface } from "./preface.ts";

const text = (value: string) => readPreface(Buffer.from(value, "latin1"));
const nameOf = (bytes: Uint8Array) => {
  const result = readPreface(bytes);
  return result.kind === "name" ? result.name : result.kind;
};
const http = (...lines: string[]) => text([...lines, "", ""].join("\r\n"));

/** What the TLS library of this runtime really sends. */
async function realClientHello(servername: string): Promise<Buffer> {
  const { promise, resolve } = Promise.withResolvers<Buffer>();
  using listener = Bun.listen({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      data(socket, bytes) {
        resolve(Buffer.from(bytes));
        socket.terminate();
      },
    },
  });
  const client = connect({ host: "127.0.0.1", port: listener.port, servername });
  client.on("error", () => client.destroy());
  return await promise;
}

describe("TLS", () => {
  test("the name of a real client", async () => {
    expect(nameOf(await realClientHello("Real.Example.com"))).toBe("real.example.com");
  });

  test("every beginning of a hello is incomplete, every cut into records is read", () => {
    const whole = clientHello("a.example");
    expect(nameOf(whole)).toBe("a.example");
    for (let length = 0; length < whole.length; length++) {
      expect(nameOf(whole.subarray(0, length))).toBe("incomplete");
    }
    for (const recordBytes of [1, 2, 3, 4, 5, 17, 100]) {
      const cut = clientHello("a.example", { recordBytes });
      expect(nameOf(cut)).toBe("a.example");
      expect(nameOf(cut.subarray(0, cut.length - 1))).toBe("incomplete");
    }
    expect(nameOf(Buffer.concat([whole, Buffer.from("what follows")]))).toBe("a.example");
  });

  test("large hellos up to the bound", () => {
    expect(nameOf(clientHello("a.example", { padding: 50_000 }))).toBe("a.example");
    expect(nameOf(clientHello("a.example", { padding: 65_000, recordBytes: 16384 }).subarray(0, 100))).toBe(
      "incomplete",
    );
    const long = clientHello("a.example", { padding: 65_410 });
    expect(nameOf(long)).toBe("refused");
    const trickle = clientHello("a.example", { padding: 60_000, recordBytes: 20 });
    expect(nameOf(trickle.subarray(0, MAX_PREFACE_BYTES))).toBe("refused");
  });

  test.each([
    undefined,
    "",
    "192.0.2.1",
    "under_score.example",
    "a..example",
    "*.example",
    "a.example\0.evil.example",
  ])("server name %p is refused", (name) => expect(nameOf(clientHello(name))).toBe("refused"));

  test("a changed or cut byte never throws and never gives another name", () => {
    const whole = clientHello("a.example");
    const seen = new Set<string>();
    for (let at = 0; at < whole.length; at++) {
      for (const value of [0, 1, 22, 127, 255]) {
        const changed = Buffer.from(whole);
        changed[at] = value;
        const result = readPreface(changed);
        if (result.kind === "name") seen.add(result.name);
      }
    }
    for (const name of seen) expect(name).toMatch(/^[a-z0-9.-]+$/);
    expect(seen.has("a.example")).toBe(true);
  });
});

describe("HTTP", () => {
  test("the Host, with or without a port", () => {
    expect(http("GET / HTTP/1.1", "Host: a.example")).toEqual({ kind: "name", name: "a.example" });
    expect(http("POST /x?y HTTP/1.0", "X: 1", "hOsT:A.Example:8080 ", "Z: 2")).toEqual({
      kind: "name",
      name: "a.example",
    });
    expect(http("GET http://a.example:80/x HTTP/1.1", "Host: A.example")).toEqual({
      kind: "name",
      name: "a.example",
    });
    expect(http("OPTIONS * HTTP/1.1", "Host: a.example.")).toEqual({ kind: "name", name: "a.example" });
  });

  test("a request is read when its header is complete", () => {
    const whole = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    for (let length = 0; length < whole.length; length++)
      expect(text(whole.slice(0, length)).kind).toBe("incomplete");
    expect(text(`GET / HTTP/1.1\r\nX: ${"x".repeat(MAX_PREFACE_BYTES)}`).kind).toBe("refused");
  });

  test.each([
    ["no Host", ["GET / HTTP/1.1", "X: 1"]],
    ["two Hosts", ["GET / HTTP/1.1", "Host: a.example", "Host: a.example"]],
    ["an address", ["GET / HTTP/1.1", "Host: 192.0.2.1"]],
    ["an IPv6 address", ["GET / HTTP/1.1", "Host: [2001:db8::1]"]],
    ["an empty Host", ["GET / HTTP/1.1", "Host: "]],
    ["two names", ["GET / HTTP/1.1", "Host: a.example, b.example"]],
    ["a user", ["GET / HTTP/1.1", "Host: x@a.example"]],
    ["another target", ["GET http://b.example/ HTTP/1.1", "Host: a.example"]],
    ["a user in the target", ["GET http://b.example@a.example/ HTTP/1.1", "Host: a.example"]],
    ["CONNECT", ["CONNECT a.example:443 HTTP/1.1", "Host: a.example"]],
    ["a folded line", ["GET / HTTP/1.1", "X: 1", " Host: a.example", "Host: b.example"]],
    ["a space before the colon", ["GET / HTTP/1.1", "Host : a.example"]],
    ["a bare line feed", ["GET / HTTP/1.1", "X: 1\nHost: b.example", "Host: a.example"]],
    ["HTTP/2", ["PRI * HTTP/2.0", "", "SM"]],
    ["too many words", ["GET / x HTTP/1.1", "Host: a.example"]],
  ])("%s is refused", (_what, lines) => expect(http(...lines).kind).toBe("refused"));

  test("what is neither TLS nor HTTP is refused at once", () => {
    for (const bytes of ["SSH-2.0-x\r\n", "\x00\x00", "get / HTTP/1.1", "{}", "\x80\x2e\x01"]) {
      expect([bytes, text(bytes).kind]).toEqual([bytes, "refused"]);
    }
  });
});
