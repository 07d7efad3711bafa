import { expect, test } from "bun:test";
import { classify, parseSandboxHost } from "./classify.ts";

const ID = "01936f8e-72f5-7000-8000-000000000001";
const options = {
  domains: ["box.example", "deep.box.example"],
  isControlPath: (path: string) => path === "/health" || path.startsWith("/sandboxes") || path === "/metrics",
};
const run = (target: string, headers: Record<string, string> = {}) =>
  classify(target, Object.entries(headers), options);

test("the prefix routes by headers whatever the host, and is cut byte for byte", () => {
  expect(
    run("/proxy/a%2Fb//../c?x=%20", {
      host: `80-${ID}.box.example`,
      "x-agentenv-sandbox-id": ID,
      "x-agentenv-target-port": "3000",
    }),
  ).toEqual({
    plane: "data",
    style: "agentenv",
    sandboxId: ID,
    port: 3000,
    target: "/a%2Fb//../c?x=%20",
    source: "proxy_prefix",
  });
  expect(run("/proxy?q", { "e2b-sandbox-id": ID, "e2b-sandbox-port": "1" })).toMatchObject({
    target: "/?q",
    style: "e2b",
  });
  expect(run("/proxy/x")).toMatchObject({
    plane: "invalid",
    message: "missing sandbox routing header",
    needsApiKey: false,
  });
  expect(run("/proxyx")).toEqual({ plane: "control" });
});

test("a sandbox host owns every path and beats the headers", () => {
  expect(
    run("/sandboxes", { host: `8080-${ID.toUpperCase()}.BOX.example.:443`, "e2b-sandbox-id": "other" }),
  ).toMatchObject({
    plane: "data",
    sandboxId: ID,
    port: 8080,
    target: "/sandboxes",
    source: "proxy_host",
    style: "e2b",
  });
  expect(run("/health", { host: "box.example" })).toEqual({ plane: "control" });
});

test("malformed sandbox hosts are told apart", () => {
  const message = (host: string) => parseSandboxHost(host, options.domains);
  expect(message("80-.box.example")).toMatchObject({
    message: expect.stringContaining("sandbox id is empty"),
  });
  expect(message(`0-${ID}.box.example`)).toMatchObject({
    message: expect.stringContaining("port is invalid"),
  });
  expect(message(`99999-${ID}.box.example`)).toMatchObject({
    message: expect.stringContaining("port is invalid"),
  });
  expect(message("80-nope.box.example")).toMatchObject({
    message: expect.stringContaining("sandbox id is invalid"),
  });
  expect(message("www.box.example")).toEqual({ kind: "none" });
  expect(message(`80-${ID}.a.box.example`)).toEqual({ kind: "none" });
  expect(message(`80-${ID}.deep.box.example`)).toMatchObject({ kind: "sandbox", port: 80 });
});

test("health with routing headers is the sandbox's, other control paths are ours", () => {
  const headers = { "e2b-sandbox-id": ID, "e2b-sandbox-port": "49983" };
  expect(run("/health", headers)).toMatchObject({ plane: "data", port: 49983 });
  expect(run("/sandboxes", headers)).toEqual({ plane: "control" });
  expect(run("/files?path=a", headers)).toMatchObject({ plane: "data", target: "/files?path=a" });
  expect(run("/health")).toEqual({ plane: "control" });
  expect(run("/files", { "e2b-sandbox-id": ID })).toMatchObject({
    plane: "invalid",
    message: "missing target port routing header",
    needsApiKey: true,
  });
  expect(run("/nothing")).toEqual({ plane: "control" });
});

test("an absolute target brings its own authority", () => {
  expect(run(`http://80-${ID}.box.example/x?y`, { host: "ignored" })).toMatchObject({
    plane: "data",
    target: "/x?y",
  });
});
