import { describe, expect, test } from "bun:test";
import { formatReference, parseReference, type ReferenceRules } from "./reference.ts";

const DIGEST = `sha256:${"a".repeat(64)}`;
const rules: ReferenceRules = { searchRegistries: ["docker.io", "ghcr.io/team"], allowLocalPaths: true };

function candidates(reference: string, more: Partial<ReferenceRules> = {}): string[] {
  const parsed = parseReference(reference, { ...rules, ...more });
  if (parsed.kind !== "registry") throw new Error("not a registry reference");
  return parsed.candidates.map(formatReference);
}

describe("completion", () => {
  test.each([
    ["debian", ["docker.io/library/debian:latest", "ghcr.io/team/debian:latest"]],
    [" debian:12 ", ["docker.io/library/debian:12", "ghcr.io/team/debian:12"]],
    ["team/app:1", ["docker.io/team/app:1", "ghcr.io/team/team/app:1"]],
    ["docker.io/debian", ["docker.io/library/debian:latest"]],
    ["index.docker.io/debian:12", ["docker.io/library/debian:12"]],
    ["localhost/a:b", ["localhost/a:b"]],
    ["localhost:5000/a/b", ["localhost:5000/a/b:latest"]],
    ["[::1]:5000/a", ["[::1]:5000/a:latest"]],
    ["registry:5000/a__b/c.d-e:v1.0_x", ["registry:5000/a__b/c.d-e:v1.0_x"]],
    [`quay.io/x/y@${DIGEST}`, [`quay.io/x/y@${DIGEST}`]],
    [`quay.io/x/y:tag@${DIGEST}`, [`quay.io/x/y:tag@${DIGEST}`]],
  ])("%s", (reference, expected) => {
    expect(candidates(reference)).toEqual(expected);
  });

  test("duplicates are dropped and only allowed registries stay", () => {
    expect(candidates("x", { searchRegistries: ["a.b", "a.b"] })).toEqual(["a.b/x:latest"]);
    expect(candidates("x", { allowedRegistries: ["ghcr.io"] })).toEqual(["ghcr.io/team/x:latest"]);
    expect(() => candidates("x", { allowedRegistries: [] })).toThrow("is not allowed");
    expect(() => candidates("a.b:1/x", { allowedRegistries: ["a.b"] })).toThrow(
      "registry a.b:1 is not allowed",
    );
  });
});

describe("layouts", () => {
  test("path, tag, digest", () => {
    const layout = (text: string) => parseReference(text, rules);
    expect(layout("oci-layout:/a/b")).toEqual({ kind: "layout", layout: { layoutPath: "/a/b" } });
    expect(layout("oci-layout:/a/b:v1")).toEqual({
      kind: "layout",
      layout: { layoutPath: "/a/b", tag: "v1" },
    });
    expect(layout("oci-layout:/a:b/c")).toEqual({ kind: "layout", layout: { layoutPath: "/a:b/c" } });
    expect(layout(`oci-layout:/a@${DIGEST}`)).toEqual({
      kind: "layout",
      layout: { layoutPath: "/a", digest: DIGEST },
    });
  });
});

test.each([
  ["", "empty"],
  ["   ", "empty"],
  ["UPPER", "lower case"],
  ["a//b", "empty part"],
  ["docker.io/", "empty"],
  ["a:bad tag", "not a tag"],
  ["a@sha256:123", "64 lower-case hex"],
  ["a@md5:123", "sha256"],
  ["https://docker.io/x", "transport"],
  ["docker-daemon:/x.tar", "transport"],
  ["docker-archive:relative", "absolute"],
  ["docker-archive:/x.tar:", "empty"],
  ["bad_host.:1/x", "not a registry host"],
  [`a.b/${"x/".repeat(200)}y`, "longer than"],
  ["oci-layout:relative", "absolute"],
])("%j is refused", (reference, words) => {
  expect(() => parseReference(reference, rules)).toThrow(words);
  try {
    parseReference(reference, rules);
  } catch (error) {
    expect(error).toMatchObject({ code: "image_invalid_reference", status: 400 });
  }
});

test("no search registries, no local paths", () => {
  expect(() => candidates("debian", { searchRegistries: [] })).toThrow("no search registries");
  expect(() => parseReference("oci-layout:/a", { ...rules, allowLocalPaths: false })).toThrow("not allowed");
});
