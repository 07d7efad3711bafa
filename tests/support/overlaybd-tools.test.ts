import { expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { findOverlaybdTools, planOverlaybdApply } from "./overlaybd-tools.ts";

/* How the benchmark calls the overlaybd tools. The tools themselves have not been run with it: see docs/performance.md. */

const tools = { create: "/x/overlaybd-create", apply: "/x/overlaybd-apply" };

test("a new image with a file system, and the layer into it: data file before index file, all below one directory", () => {
  const { files, commands } = planOverlaybdApply(tools, {
    layerFile: "/in/layer.tar.gz",
    workDir: "/w",
    virtualSizeGiB: 64,
  });
  expect(commands).toEqual([
    ["/x/overlaybd-create", "-s", "--mkfs", "/w/overlaybd.data", "/w/overlaybd.index", "64"],
    [
      "/x/overlaybd-apply",
      "--service_config_path",
      "/w/overlaybd.service.json",
      "/in/layer.tar.gz",
      "/w/overlaybd.image.json",
    ],
    ["sync", "-f", "/w"],
  ]);
  const image: unknown = JSON.parse(files.get("/w/overlaybd.image.json")!);
  expect(image).toMatchObject({
    lowers: [],
    upper: { index: "/w/overlaybd.index", data: "/w/overlaybd.data" },
  });
  // Every file that a command or another file names is written or made by the tools, below the directory.
  for (const [path, content] of files) {
    expect(path).toStartWith("/w/");
    for (const [named] of content.matchAll(/"\/[^"]*"/g)) expect(named).toStartWith('"/w/');
  }
});

test("both tools are needed", () => {
  const dir = mkdtempSync("/tmp/overlaybd-tools-");
  try {
    const make = (name: string) => {
      writeFileSync(join(dir, name), "#!/bin/false\n");
      chmodSync(join(dir, name), 0o755);
      return join(dir, name);
    };
    const create = make("overlaybd-create");
    const installed = Bun.which("overlaybd-apply", { PATH: "/opt/overlaybd/bin" });
    expect(findOverlaybdTools(dir)).toEqual(installed === null ? undefined : { create, apply: installed });
    const apply = make("overlaybd-apply");
    expect(findOverlaybdTools(dir)).toEqual({ create, apply });
  } finally {
    rmSync(dir, { recursive: true });
  }
});
