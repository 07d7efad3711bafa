import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { sha256 } from "../../tests/support/oci.ts";
import { type AenvError, errorChain } from "../lib/errors.ts";
import { Reach } from "./reach.ts";
import { createRegistrySource, hostLocality, parseChallenge, parseRetryAfter } from "./registry.ts";

let directory: string;
let count = 0;

beforeAll(async () => {
  directory = await mkdtemp(join(tmpdir(), "image-registry-"));
});
afterAll(() => rm(directory, { recursive: true, force: true }));

const CONTENT = Buffer.from(crypto.getRandomValues(new Uint8Array(60_000)));
const BLOB = { digest: sha256(CONTENT), size: CONTENT.length };

/** A registry made of one handler; requests are kept. */
function faulty(handler: (request: Request, nth: number) => Response | Promise<Response>) {
  const requests: Request[] = [];
  const server = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    development: false,
    error: () => new Response("", { status: 500 }),
    fetch: (request) => {
      // A copy: the runtime forgets what was not read of it in time.
      requests.push(new Request(request.url, { headers: request.headers }));
      return handler(request, requests.length);
    },
  });
  return {
    requests,
    host: `127.0.0.1:${server.port}`,
    url: `http://127.0.0.1:${server.port}`,
    [Symbol.asyncDispose]: () => server.stop(true),
  };
}

/** Servers of one test are of one party: `strict` is what a server does that is told nothing. */
const FRIENDS = new Reach({ internalHosts: ["127.0.0.1"] });

function source(
  host: string,
  login?: { username: string; password: string },
  idleTimeoutMs = 15_000,
  reach: Reach | undefined = FRIENDS,
) {
  return createRegistrySource({
    reach,
    reference: { registry: host, repository: "a/b", tag: "t" },
    ...(login === undefined ? {} : { login: { kind: "basic", ...login } as const }),
    retry: { attempts: 3, baseDelayMs: 5, maxDelayMs: 300, idleTimeoutMs },
  });
}

async function download(host: string, descriptor = BLOB, idleTimeoutMs?: number): Promise<Buffer> {
  const target = join(directory, `blob-${count++}`);
  await source(host, undefined, idleTimeoutMs).blob(
    descriptor,
    target,
    new AbortController().signal,
    () => undefined,
  );
  return readFile(target);
}

async function rejection(work: Promise<unknown>): Promise<AenvError> {
  return work.then(
    () => {
      throw new Error("expected an error");
    },
    (error: AenvError) => error,
  );
}

/** A body that ends early: the length is promised, the connection breaks. */
function brokenBody(bytes: Uint8Array, headers: Record<string, string>, status = 200): Response {
  return new Response(
    new ReadableStream({
      async start(controller) {
        controller.enqueue(bytes);
        await Bun.sleep(20);
        controller.error(new Error("broken"));
      },
    }),
    { status, headers },
  );
}

function rangeStart(request: Request): number {
  return Number(/bytes=(\d+)-/.exec(request.headers.get("range") ?? "bytes=0-")?.[1]);
}

describe("downloads", () => {
  test("FR-72: go on by range where a connection broke off", async () => {
    await using server = faulty((request, nth) => {
      const start = rangeStart(request);
      const rest = CONTENT.subarray(start);
      const headers =
        start > 0 ? { "content-range": `bytes ${start}-${CONTENT.length - 1}/${CONTENT.length}` } : {};
      const status = start > 0 ? 206 : 200;
      return nth <= 4
        ? brokenBody(rest.subarray(0, 10_000), headers as Record<string, string>, status)
        : new Response(rest, { status, headers });
    });
    expect((await download(server.host)).equals(CONTENT)).toBe(true);
    expect(server.requests.length).toBe(5);
    expect(server.requests.map((request) => rangeStart(request))).toEqual([
      0, 10_000, 20_000, 30_000, 40_000,
    ]);
  });

  test("start over where the registry knows no ranges", async () => {
    await using server = faulty((_request, nth) =>
      nth === 1 ? brokenBody(CONTENT.subarray(0, 9_999), {}) : new Response(CONTENT),
    );
    expect((await download(server.host)).equals(CONTENT)).toBe(true);
  });

  test("a content that is too short, too long or different is told apart", async () => {
    await using short = faulty(
      (request) =>
        new Response(CONTENT.subarray(rangeStart(request), 50_000), {
          status: rangeStart(request) > 0 ? 206 : 200,
          headers:
            rangeStart(request) > 0 ? { "content-range": `bytes ${rangeStart(request)}-49999/50000` } : {},
        }),
    );
    const truncatedError = await rejection(download(short.host));
    expect(truncatedError).toMatchObject({ code: "image_truncated", status: 502 });
    expect(truncatedError.message).toContain("50000 of 60000 bytes");
    await using long = faulty(() => new Response(Buffer.concat([CONTENT, Buffer.from("x")])));
    expect(await rejection(download(long.host))).toMatchObject({ code: "image_digest_mismatch" });
    const changed = Buffer.from(CONTENT);
    changed[5] = changed[5]! ^ 1;
    await using other = faulty(() => new Response(changed));
    expect(await rejection(download(other.host))).toMatchObject({
      code: "image_digest_mismatch",
      status: 502,
    });
    expect(other.requests.length).toBe(1);
  });

  test("FR-72: a stalled connection is given up and tried again", async () => {
    await using server = faulty((_request, nth) =>
      nth === 1
        ? new Response(
            new ReadableStream({ start: (controller) => controller.enqueue(CONTENT.subarray(0, 100)) }),
          )
        : new Response(CONTENT),
    );
    expect((await download(server.host, BLOB, 300)).equals(CONTENT)).toBe(true);
  });

  test("an abort ends at once", async () => {
    await using server = faulty(
      () =>
        new Response(
          new ReadableStream({ start: (controller) => controller.enqueue(CONTENT.subarray(0, 100)) }),
        ),
    );
    const controller = new AbortController();
    const target = join(directory, `blob-${count++}`);
    const work = source(server.host).blob(BLOB, target, controller.signal, () =>
      controller.abort(new Error("stop")),
    );
    expect((await rejection(work)).message).toBe("stop");
  });

  test("a token that expires in mid-pull is renewed and the download goes on where it was", async () => {
    let issued = 0;
    await using tokens = faulty(() => Response.json({ token: `t${++issued}`, expires_in: 1 }));
    const starts: number[] = [];
    await using server = faulty((request) => {
      const token = request.headers.get("authorization");
      const start = rangeStart(request);
      // The first token is good for the first half only.
      const good = token === (start === 0 ? "Bearer t1" : "Bearer t2");
      if (!good) {
        const challenge = `Bearer realm="${tokens.url}/token",service="s"`;
        return new Response("", { status: 401, headers: { "www-authenticate": challenge } });
      }
      starts.push(start);
      if (start === 0) return brokenBody(CONTENT.subarray(0, 40_000), {});
      return new Response(CONTENT.subarray(start), {
        status: 206,
        headers: { "content-range": `bytes ${start}-${CONTENT.length - 1}/${CONTENT.length}` },
      });
    });
    expect((await download(server.host)).equals(CONTENT)).toBe(true);
    expect(issued).toBe(2);
    expect(starts[0]).toBe(0);
    expect(starts.at(-1)).toBeGreaterThan(0);
  });

  test("proxies of the environment are used, and not for registries of this machine", async () => {
    await using server = faulty(() => new Response(CONTENT));
    const asked: string[] = [];
    const proxy = createServer((socket) => {
      socket.on("error", () => socket.destroy());
      socket.once("data", (data) => {
        asked.push(data.toString());
        socket.end("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n");
      });
    });
    await new Promise<void>((resolve) => proxy.listen(0, "127.0.0.1", resolve));
    const names = ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"] as const;
    const before = names.map((name) => process.env[name]);
    try {
      for (const name of names) delete process.env[name];
      const { port } = proxy.address() as { port: number };
      process.env.HTTP_PROXY = process.env.HTTPS_PROXY = `http://me:secret@127.0.0.1:${port}`;
      expect((await download(server.host)).equals(CONTENT)).toBe(true);
      expect(asked).toEqual([]);
      const error = await rejection(download("registry.example.invalid"));
      expect(error).toMatchObject({ code: "image_registry_unreachable" });
      expect(asked).toHaveLength(3);
      expect(asked[0]).toStartWith("CONNECT registry.example.invalid:443 HTTP/1.1\r\n");
      expect(asked[0]).toContain(`Proxy-Authorization: Basic ${btoa("me:secret")}`);
      expect(error.message).not.toContain("secret");
      delete process.env.no_proxy;
      process.env.NO_PROXY = "example.invalid";
      expect((await download(server.host)).equals(CONTENT)).toBe(true);
      expect(await rejection(download("registry.example.invalid"))).toMatchObject({
        remediation: "this host cannot resolve registry.example.invalid (DNS or proxy)",
      });
      expect(asked).toHaveLength(3);
    } finally {
      for (const [i, name] of names.entries()) {
        if (before[i] === undefined) delete process.env[name];
        else process.env[name] = before[i];
      }
      await new Promise((resolve) => proxy.close(resolve));
    }
  });

  test("a registry that is not there is told in one short line", async () => {
    const error = await rejection(source("127.0.0.1:1").manifest("t", new AbortController().signal));
    expect(errorChain(error)).toEqual([
      "127.0.0.1:1/a/b:t: cannot get manifest t from 127.0.0.1:1: ECONNREFUSED",
    ]);
  });

  test("redirects are followed without the registry's credentials", async () => {
    await using storage = faulty(() => new Response(CONTENT));
    await using server = faulty((request) => {
      if (request.headers.get("authorization") === null) {
        return new Response("", { status: 401, headers: { "www-authenticate": 'Basic realm="r"' } });
      }
      return new Response("", { status: 307, headers: { location: `${storage.url}/store?sig=1` } });
    });
    const target = join(directory, `blob-${count++}`);
    const login = { username: "u", password: "p" };
    await source(server.host, login).blob(BLOB, target, new AbortController().signal, () => undefined);
    expect(storage.requests.map((request) => request.headers.get("authorization"))).toEqual([null]);
    await using loop = faulty(() => new Response("", { status: 302, headers: { location: "/again" } }));
    expect((await rejection(download(loop.host))).message).toContain("redirects");
  });
});

describe("manifests", () => {
  const manifest = Buffer.from('{"schemaVersion":2}');
  const get = (host: string, wanted = "t", login?: { username: string; password: string }) =>
    source(host, login).manifest(wanted, new AbortController().signal);

  test("FR-72: busy registries are asked again after Retry-After, a bounded number of times", async () => {
    const times: number[] = [];
    await using server = faulty((_request, nth) => {
      times.push(performance.now());
      return nth < 3
        ? new Response("", { status: nth === 1 ? 503 : 429, headers: { "retry-after": "1" } })
        : new Response(manifest);
    });
    expect((await get(server.host)).digest).toBe(sha256(manifest));
    // Retry-After of a second is cut to the policy's 300 ms.
    expect(times[1]! - times[0]!).toBeGreaterThan(280);
    await using down = faulty(() => new Response("<html>", { status: 500 }));
    const error = await rejection(get(down.host));
    expect(error).toMatchObject({ code: "image_registry_unreachable", status: 502 });
    expect(error.message).toContain("HTTP 500");
    expect(down.requests.length).toBe(3);
  });

  test("not found is not retried; the registry's words are kept", async () => {
    await using server = faulty(() =>
      Response.json({ errors: [{ code: "MANIFEST_UNKNOWN", message: "no such" }] }, { status: 404 }),
    );
    const error = await rejection(get(server.host));
    expect(error).toMatchObject({ code: "image_not_found", status: 404 });
    expect(error.message).toContain("MANIFEST_UNKNOWN: no such");
    expect(server.requests.length).toBe(1);
  });

  test("digests are checked: the one asked for and the one the registry names", async () => {
    await using server = faulty(
      (request) =>
        new Response(manifest, {
          headers: request.url.endsWith("/t") ? { "docker-content-digest": `sha256:${"1".repeat(64)}` } : {},
        }),
    );
    expect(await rejection(get(server.host))).toMatchObject({ code: "image_digest_mismatch" });
    expect(await rejection(get(server.host, `sha256:${"2".repeat(64)}`))).toMatchObject({
      code: "image_digest_mismatch",
    });
    expect((await get(server.host, sha256(manifest))).bytes.length).toBe(manifest.length);
  });

  test("token login: realm, service, scope, the password only to the token server; an expired token is renewed", async () => {
    let issued = 0;
    await using tokens = faulty((request) => {
      const url = new URL(request.url);
      if (request.headers.get("authorization") !== `Basic ${btoa("u:p:w")}`)
        return new Response("", { status: 401 });
      return Response.json({
        token: `${url.searchParams.get("service")}|${url.searchParams.get("scope")}|${++issued}`,
      });
    });
    let valid = 1;
    await using server = faulty((request) => {
      if (request.headers.get("authorization") === `Bearer svc|repository:a/b:pull|${valid}`)
        return new Response(manifest);
      const challenge = `Bearer realm="${tokens.url}/token",service="svc",scope="repository:a/b:pull"`;
      return new Response("", { status: 401, headers: { "www-authenticate": challenge } });
    });
    const registry = source(server.host, { username: "u", password: "p:w" });
    const signal = new AbortController().signal;
    await registry.manifest("t", signal);
    await registry.manifest("t", signal);
    expect(issued).toBe(1);
    valid = 2;
    await registry.manifest("t", signal);
    expect(issued).toBe(2);
    expect(
      server.requests.every((request) => !request.headers.get("authorization")?.startsWith("Basic")),
    ).toBe(true);
    expect(await rejection(get(server.host))).toMatchObject({ code: "image_unauthorized", status: 400 });
    const wrong = get(server.host, "t", { username: "u", password: "x" });
    expect(await rejection(wrong)).toMatchObject({ code: "image_unauthorized" });
  });

  test("HTTPS on loopback is found behind the plain port's answer", async () => {
    await using server = faulty(
      () => new Response("Client sent an HTTP request to an HTTPS server.\n", { status: 400 }),
    );
    const error = await rejection(get(server.host));
    expect(error).toMatchObject({ code: "image_registry_unreachable" });
    expect(error.message).toContain("it speaks HTTPS, not HTTP");
  });
});

describe("rules", () => {
  test.each([
    ["localhost:5000", "loopback"],
    ["127.0.0.1", "loopback"],
    ["x.localhost", "loopback"],
    ["[::1]:5000", "loopback"],
    ["10.1.2.3:5000", "private"],
    ["172.31.0.1", "private"],
    ["192.168.0.1", "private"],
    ["169.254.1.1", "private"],
    ["[fd00::1]:1", "private"],
    ["registry:5000", "private"],
    ["172.32.0.1", "public"],
    ["8.8.8.8", "public"],
    ["127.0.0.1.example.com", "public"],
    ["docker.io", "public"],
    ["[2001:db8::1]", "public"],
  ] as const)("%s is %s", (host, locality) => {
    expect(hostLocality(host)).toBe(locality);
  });

  test("challenges", () => {
    expect(parseChallenge('Bearer realm="https://a/t?x=1,2",service=s, scope="a b"')).toEqual({
      scheme: "bearer",
      parameters: { realm: "https://a/t?x=1,2", service: "s", scope: "a b" },
    });
    expect(parseChallenge("Basic")).toEqual({ scheme: "basic", parameters: {} });
    expect(parseChallenge('Negotiate, Basic realm="x"')).toEqual({
      scheme: "basic",
      parameters: { realm: "x" },
    });
    expect(parseChallenge("Digest realm=x")).toBeUndefined();
    expect(parseChallenge(null)).toBeUndefined();
  });

  test("Retry-After", () => {
    expect(parseRetryAfter("2", 0)).toBe(2000);
    expect(parseRetryAfter("Thu, 01 Jan 1970 00:00:10 GMT", 4000)).toBe(6000);
    expect(parseRetryAfter("soon", 0)).toBeUndefined();
    expect(parseRetryAfter(null, 0)).toBeUndefined();
  });
});

describe("where a registry may send this server", () => {
  const strict = new Reach();
  const signal = new AbortController().signal;
  const login = { username: "alice", password: "secret" };
  const blob = (host: string, reach: Reach) =>
    source(host, login, undefined, reach).blob(
      BLOB,
      join(directory, `blob-${count++}`),
      signal,
      () => undefined,
    );

  test("storage behind a redirect that asks for a login gets none, and neither does its token server", async () => {
    await using storage = faulty(
      () =>
        new Response("words of the storage", {
          status: 401,
          headers: { "www-authenticate": `Bearer realm="${storage.url}/token"` },
        }),
    );
    await using server = faulty(() => Response.redirect(`${storage.url}/store`, 307));
    const error = await rejection(blob(server.host, FRIENDS));
    expect(error).toMatchObject({ code: "image_unauthorized" });
    expect(error.message).not.toContain("words of the storage");
    expect(storage.requests.map(({ url }) => new URL(url).pathname)).toEqual(["/store"]);
    expect(storage.requests[0]!.headers.get("authorization")).toBeNull();
  });

  test("a redirect back to the registry carries no credentials either", async () => {
    await using storage = faulty(() => Response.redirect(`${server.url}/back`, 307));
    await using server = faulty((request) => {
      if (request.url.endsWith("/back")) return new Response(CONTENT);
      if (request.headers.get("authorization") === null)
        return new Response("", { status: 401, headers: { "www-authenticate": 'Basic realm="r"' } });
      return Response.redirect(`${storage.url}/store`, 307);
    });
    await blob(server.host, FRIENDS);
    expect(server.requests.map((request) => request.headers.get("authorization") !== null)).toEqual([
      false,
      true,
      false,
    ]);
  });

  test("a token server that redirects gets the password, what it redirects to does not", async () => {
    await using other = faulty(() => Response.json({ token: "t" }));
    await using tokens = faulty(() => Response.redirect(`${other.url}/token`, 307));
    await using server = faulty((request) =>
      request.headers.get("authorization") === "Bearer t"
        ? new Response(CONTENT)
        : new Response("", {
            status: 401,
            headers: { "www-authenticate": `Bearer realm="${tokens.url}/token"` },
          }),
    );
    await blob(server.host, FRIENDS);
    expect(tokens.requests[0]!.headers.get("authorization")).toStartWith("Basic ");
    expect(other.requests.map((request) => request.headers.get("authorization"))).toEqual([null]);
  });

  test("internal addresses are not asked: not by a redirect, not as a token server, not by a name", async () => {
    await using internal = faulty(() => Response.json({ access_token: "INTERNAL" }));
    for (const host of [internal.host, internal.host.replace("127.0.0.1", "localhost")]) {
      await using redirects = faulty(() => Response.redirect(`http://${host}/admin`, 302));
      await using challenges = faulty(
        () =>
          new Response("", {
            status: 401,
            headers: { "www-authenticate": `Bearer realm="http://${host}/token"` },
          }),
      );
      for (const server of [redirects, challenges]) {
        const error = await rejection(
          source(server.host, undefined, undefined, strict).manifest("t", signal),
        );
        expect(error).toMatchObject({ code: "image_redirect_refused", status: 400 });
        expect(error.remediation).toContain(`"${host}" to image.resolver.internal_hosts`);
        expect(server.requests).toHaveLength(1);
      }
    }
    expect(internal.requests).toEqual([]);
  });

  test("the registry's own host and port, and hosts of the configuration, may be internal", async () => {
    await using server = faulty((request) => {
      if (request.url.includes("/token")) return Response.json({ token: "t" });
      if (request.url.endsWith("/store")) return new Response(CONTENT);
      return request.headers.get("authorization") === "Bearer t"
        ? Response.redirect("/store", 307)
        : new Response("", {
            status: 401,
            headers: { "www-authenticate": `Bearer realm="${server.url}/token"` },
          });
    });
    await blob(server.host, strict);
    await using storage = faulty(() => new Response(CONTENT));
    await using front = faulty(() => Response.redirect(`${storage.url}/store`, 307));
    await blob(front.host, new Reach({ internalHosts: [storage.host] }));
    expect(await rejection(blob(front.host, new Reach({ internalHosts: [front.host] })))).toMatchObject({
      code: "image_redirect_refused",
    });
  });

  test("words of an error are shown of the registry itself only", async () => {
    await using storage = faulty(() => new Response("INTERNAL SECRET", { status: 403 }));
    await using server = faulty(() => Response.redirect(`${storage.url}/store`, 302));
    const error = await rejection(source(server.host).manifest("t", signal));
    expect(errorChain(error).join()).not.toContain("SECRET");
    await using challenges = faulty(
      () =>
        new Response("", {
          status: 401,
          headers: { "www-authenticate": `Bearer realm="${storage.url}/token"` },
        }),
    );
    const refused = await rejection(source(challenges.host).manifest("t", signal));
    expect(refused.message).toContain("HTTP 403");
    expect(errorChain(refused).join()).not.toContain("SECRET");
  });

  test("answers that are no blob are read up to a bound", async () => {
    let sent = 0;
    const endless = (status: number, headers: Record<string, string> = {}) =>
      new Response(
        new ReadableStream({
          async pull(controller) {
            sent += 65_536;
            controller.enqueue(new Uint8Array(65_536).fill(0x61));
            await Bun.sleep(0);
            if (sent > 1 << 30) controller.close();
          },
        }),
        { status, headers },
      );
    await using missing = faulty(() => endless(404));
    expect((await rejection(source(missing.host).manifest("t", signal))).message).toContain("aaa");
    await using tokens = faulty((request) =>
      request.url.includes("/token")
        ? endless(200)
        : new Response("", {
            status: 401,
            headers: { "www-authenticate": `Bearer realm="http://${request.headers.get("host")}/token"` },
          }),
    );
    expect((await rejection(source(tokens.host).manifest("t", signal))).message).toContain("gave no token");
    await using redirects = faulty((_request, nth) =>
      nth < 2 ? endless(302, { location: "/next" }) : new Response("{}"),
    );
    await source(redirects.host).manifest("t", signal);
    // What was under way when the reader left is not counted exactly.
    expect(sent).toBeLessThan(100 << 20);
  });

  test("addresses", () => {
    const reach = new Reach({ deniedCidrs: ["203.0.113.0/24"] });
    const internal = [
      ...["0.0.0.0", "10.9.9.9", "100.64.0.1", "127.9.9.9", "169.254.169.254", "172.31.0.1", "192.168.1.1"],
      ...["224.0.0.1", "255.255.255.255", "203.0.113.9", "::", "::1", "fd00::1", "fe80::1%eth0", "ff02::1"],
      ...["::ffff:10.0.0.1", "::7f00:1", "64:ff9b::a9fe:a9fe", "2002:a00:1::1"],
    ];
    expect(internal.filter((address) => !reach.isInternal(address))).toEqual([]);
    const world = [
      "8.8.8.8",
      "172.32.0.1",
      "100.128.0.1",
      "2606:4700::1",
      "::ffff:8.8.8.8",
      "2002:808:808::1",
    ];
    expect(world.filter((address) => reach.isInternal(address))).toEqual([]);
  });
});
