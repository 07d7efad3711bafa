import { expect, test } from "bun:test";
import { moduleName, orderModules, readModuleInfo } from "./modules.ts";
import { makeElf, makeModule } from "./testing.ts";

const graph = (edges: Readonly<Record<string, readonly string[]>>) => async (name: string) => edges[name];

test("modules come after what they need, each once", async () => {
  const asked: string[] = [];
  const edges = {
    net: ["net_failover"],
    net_failover: ["failover"],
    failover: [],
    blk: [],
    both: ["net", "blk"],
  };
  const order = await orderModules(
    ["both", "net", "blk"],
    async (name) => {
      asked.push(name);
      return graph(edges)(name);
    },
    new Set(),
  );
  expect(order).toEqual(["failover", "net_failover", "net", "blk", "both"]);
  expect(asked.length).toBe(5);
});

test("what is built in is left out, spelled either way", async () => {
  const order = await orderModules(
    ["virtio-rng", "a"],
    graph({ a: ["crc16"] }),
    new Set(["virtio_rng", "crc16"]),
  );
  expect(order).toEqual(["a"]);
});

test("missing modules and cycles are errors", async () => {
  await expect(orderModules(["a"], graph({ a: ["gone"] }), new Set())).rejects.toThrow(
    "no module gone (needed by a)",
  );
  await expect(orderModules(["a"], graph({ a: ["b"], b: ["a"] }), new Set())).rejects.toThrow("needs itself");
});

test("a module tells name, needs and kernel", () => {
  expect(
    readModuleInfo("x.ko", makeModule("virtio_net", ["net_failover", "virtio-x"], "6.12.1-test")),
  ).toEqual({
    name: "virtio_net",
    depends: ["net_failover", "virtio_x"],
    vermagic: "6.12.1-test SMP mod_unload ",
  });
  expect(moduleName("kernel/drivers/char/hw_random/virtio-rng.ko.xz")).toBe("virtio_rng");
});

test("damaged modules are refused, never read past their end", () => {
  const good = makeModule("m", [], "6.12.1");
  expect(() => readModuleInfo("m.ko", Buffer.from("no elf"))).toThrow("m.ko is not a kernel module");
  expect(() => readModuleInfo("m.ko", makeElf({ ".text": Buffer.from("x") }))).toThrow("no .modinfo");
  for (let length = 0; length < good.length; length++) {
    expect(() => readModuleInfo("m.ko", good.subarray(0, length))).toThrow("is not a kernel module");
  }
});
