import { describe, expect, test } from "bun:test";
import {
  BodyScanner,
  HttpParseError,
  headerTokens,
  headerValue,
  parseRequestHead,
  parseResponseHead,
  requestFraming,
  responseFraming,
} from "./http1.ts";

const bytes = (text: string) => Buffer.from(text, "latin1");
const requestOf = (text: string) => parseRequestHead(bytes(text))!;

describe("request head", () => {
  test("keeps order and spelling of the fields and leaves the body alone", () => {
    const head = requestOf("POST /a%2F..//b?c HTTP/1.1\r\nHoSt: x\r\nX-A: 1\r\nx-a: 2\r\n\r\nbody");
    expect(head.method).toBe("POST");
    expect(head.target).toBe("/a%2F..//b?c");
    expect(head.headers).toEqual([
      ["HoSt", "x"],
      ["X-A", "1"],
      ["x-a", "2"],
    ]);
    expect(head.lengthBytes).toBe(
      bytes("POST /a%2F..//b?c HTTP/1.1\r\nHoSt: x\r\nX-A: 1\r\nx-a: 2\r\n\r\n").length,
    );
  });

  test("is undefined until the empty line has come, at every cut", () => {
    const text = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    for (let cut = 0; cut < text.length; cut++)
      expect(parseRequestHead(bytes(text.slice(0, cut)))).toBeUndefined();
    expect(requestOf(text).method).toBe("GET");
  });

  test.each([
    ["GET  / HTTP/1.1\r\n\r\n", 400],
    ["GET / HTTP/2.0\r\n\r\n", 505],
    ["GE T / HTTP/1.1\r\n\r\n", 400],
    ["GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400],
    ["GET / HTTP/1.1\r\nname : x\r\n\r\n", 400],
    ["GET / HTTP/1.1\r\nname\r\n\r\n", 400],
    ["GET / HTTP/1.1\r\nname: a\nb\r\n\r\n", 400],
    ["GET / HTTP/1.1\r\nname: a\0b\r\n\r\n", 400],
  ])("refuses %j", (text, status) => {
    expect(() => requestOf(text)).toThrow(HttpParseError);
    try {
      requestOf(text);
    } catch (error) {
      expect((error as HttpParseError).status).toBe(status);
    }
  });

  test("refuses a head without end", () => {
    expect(() => parseRequestHead(Buffer.alloc(200_000, "a"))).toThrow(/larger than/);
  });
});

describe("framing", () => {
  test.each([
    ["Transfer-Encoding: chunked\r\nContent-Length: 5", 400],
    ["Transfer-Encoding: gzip, chunked", 501],
    ["Transfer-Encoding: chunked, identity", 501],
    ["Content-Length: 5\r\nContent-Length: 6", 400],
    ["Content-Length: +5", 400],
    ["Content-Length: 0x5", 400],
    ["Content-Length: -1", 400],
  ])("a request with %j is refused", (field, status) => {
    const head = requestOf(`POST / HTTP/1.1\r\n${field}\r\n\r\n`);
    try {
      requestFraming(head);
      throw new Error("accepted");
    } catch (error) {
      expect((error as HttpParseError).status).toBe(status);
    }
  });

  test("equal repeated lengths are one length", () => {
    expect(
      requestFraming(requestOf("POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n")),
    ).toEqual({
      kind: "length",
      bytes: 5,
    });
  });

  test("responses without a body have none whatever they say", () => {
    const head = parseResponseHead(bytes("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"))!;
    expect(responseFraming(head, "GET")).toEqual({ kind: "none" });
    const ok = parseResponseHead(bytes("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"))!;
    expect(responseFraming(ok, "HEAD")).toEqual({ kind: "none" });
    expect(responseFraming(ok, "GET")).toEqual({ kind: "length", bytes: 5 });
    const open = parseResponseHead(bytes("HTTP/1.0 200 \r\n\r\n"))!;
    expect(responseFraming(open, "GET")).toEqual({ kind: "close" });
  });
});

describe("body scanner", () => {
  const chunked = '4\r\nWiki\r\n6;ext="a"\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\nTrailer: yes\r\n\r\n';

  test("finds the end of a chunked body cut anywhere, and its content", () => {
    const all = bytes(`${chunked}NEXT`);
    for (let cut = 0; cut <= chunked.length; cut++) {
      const scanner = new BodyScanner({ kind: "chunked" }, 400);
      let content = "";
      const feed = (part: Buffer) =>
        scanner.scan(part, 0, (from, to) => {
          content += part.toString("latin1", from, to);
        });
      const first = all.subarray(0, cut);
      const second = all.subarray(cut);
      expect(feed(first)).toBe(first.length);
      expect(feed(second)).toBe(second.length - "NEXT".length);
      expect(scanner.done).toBe(true);
      expect(content).toBe("Wikipedia in \r\n\r\nchunks.");
    }
  });

  test.each(["g\r\n", "5\nhello", "5\r\nhelloX\r\n", "-1\r\n", "\r\n", "fffffffffffffffff\r\n"])(
    "refuses malformed chunks %j",
    (text) => {
      expect(() => new BodyScanner({ kind: "chunked" }, 400).scan(bytes(text), 0)).toThrow(HttpParseError);
    },
  );

  test("bounds the size of a chunk line and of trailers", () => {
    expect(() => new BodyScanner({ kind: "chunked" }, 400).scan(Buffer.alloc(5000, "1"), 0)).toThrow(
      /too long/,
    );
    const trailers = `0\r\n${"a: b\r\n".repeat(20_000)}`;
    expect(() => new BodyScanner({ kind: "chunked" }, 400).scan(bytes(trailers), 0)).toThrow(/too long/);
  });

  test("counts a length", () => {
    const scanner = new BodyScanner({ kind: "length", bytes: 5 }, 400);
    expect(scanner.scan(bytes("abc"), 0)).toBe(3);
    expect(scanner.done).toBe(false);
    expect(scanner.scan(bytes("deNEXT"), 0)).toBe(2);
    expect(scanner.done).toBe(true);
  });
});

test("tokens and values of repeated fields", () => {
  const { headers } = requestOf(
    "GET / HTTP/1.1\r\nConnection: Keep-Alive, X-Y\r\nconnection: close\r\nA: 1\r\na: 2\r\n\r\n",
  );
  expect(headerTokens(headers, "connection")).toEqual(["keep-alive", "x-y", "close"]);
  expect(headerValue(headers, "a")).toBeUndefined();
});
