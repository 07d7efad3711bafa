import { expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runCommand } from "../../lib/command.ts";
import { deriveSources, parseSources, renderSources, withoutBackports } from "./sources.ts";

const DEB822 = `# a comment
Types: deb deb-src
# inside a stanza, too
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBGPL0BUBEADmW5NdOOHwPIJlgPu6JDcKw/NZJPR8lsD3K87ZM18gzyQZJD+w
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
signed-by: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://vendor.example/repo
Suites: nodistro
Components: main
`;

test("deb822: several stanzas, comments, continuation lines, disabled entries", () => {
  const sources = parseSources("/etc/apt/sources.list.d/debian.sources", DEB822);
  expect(sources).toHaveLength(3);
  expect(sources[0]!.types).toEqual(["deb", "deb-src"]);
  expect(sources[0]!.uris).toEqual(["http://mirror.example/debian", "http://second.example/debian"]);
  expect(sources[0]!.options.get("Signed-By")).toContain("\n .\n mQINBGPL0BUBEADmW5");
  expect(sources[1]!.options.get("Signed-By")).toBe("/usr/share/keyrings/debian-archive-keyring.gpg");
  expect(sources[1]!.origin).toBe("/etc/apt/sources.list.d/debian.sources:13");
});

test("one-line: options, comments, cdrom", () => {
  const sources = parseSources(
    "/etc/apt/sources.list",
    [
      "# deb http://commented.example/debian bookworm main",
      "deb cdrom:[Debian GNU/Linux 12 _Bookworm_ - amd64]/ bookworm main",
      "deb [ arch=amd64,arm64 signed-by=/k.gpg trusted=yes check-valid-until=no ] http://mirror.example/debian bookworm main contrib # trailing",
      "deb-src http://mirror.example/debian bookworm main",
      "",
    ].join("\n"),
  );
  expect(sources.map((source) => source.uris[0])).toEqual([
    "cdrom:[Debian GNU/Linux 12 _Bookworm_ - amd64]/",
    "http://mirror.example/debian",
    "http://mirror.example/debian",
  ]);
  expect([...sources[1]!.options]).toEqual([
    ["Signed-By", "/k.gpg"],
    ["Trusted", "yes"],
    ["Check-Valid-Until", "no"],
  ]);
  expect(sources[1]!.components).toEqual(["main", "contrib"]);
});

test("malformed files are refused with file and line", () => {
  expect(() => parseSources("a.list", "deb http://x\n")).toThrow("a.list:1: names no suite");
  expect(() => parseSources("a.list", "\nrpm http://x y z\n")).toThrow("a.list:2");
  expect(() => parseSources("a.sources", "Types: deb\nURIs: http://x\n")).toThrow(
    "a.sources:1: the entry has no Suites",
  );
  expect(() => parseSources("a.sources", "rubbish\n")).toThrow("a.sources:1");
  expect(() => parseSources("a.sources", " lost continuation\n")).toThrow("a.sources:1");
});

test("the backports suite is derived once per mirror, with its keys; other vendors are left out", () => {
  const derived = deriveSources(parseSources("debian.sources", DEB822), "bookworm");
  expect(derived.map((source) => source.suites)).toEqual([
    ["bookworm", "bookworm-updates"],
    ["bookworm-security"],
    ["bookworm-backports"],
  ]);
  const backports = derived[2]!;
  expect(backports.uris).toEqual(["http://mirror.example/debian", "http://second.example/debian"]);
  expect(backports.types).toEqual(["deb"]);
  expect(backports.components).toEqual(["main"]);
  expect(backports.options.get("Signed-By")).toBe(derived[0]!.options.get("Signed-By"));
  expect(withoutBackports(derived)).toHaveLength(2);
});

test("configured backports are used as they are", () => {
  const list =
    "deb http://a.example/debian bookworm main\ndeb http://b.example/debian bookworm-backports main\n";
  const derived = deriveSources(parseSources("x.list", list), "bookworm");
  expect(derived.map((source) => [source.uris[0], source.suites])).toEqual([
    ["http://a.example/debian", ["bookworm"]],
    ["http://b.example/debian", ["bookworm-backports"]],
  ]);
});

test("suites named stable keep their name, sources of another release give nothing", () => {
  const stable = deriveSources(
    parseSources("x.list", "deb http://a.example/debian stable main\n"),
    "bookworm",
  );
  expect(stable.map((source) => source.suites)).toEqual([["stable"], ["stable-backports"]]);
  expect(
    deriveSources(parseSources("x.list", "deb http://a.example/debian trixie main\n"), "bookworm"),
  ).toEqual([]);
  expect(
    deriveSources(parseSources("x.list", "deb http://a.example/debian bookworm contrib\n"), "bookworm"),
  ).toEqual([]);
  expect(
    deriveSources(parseSources("x.list", "deb-src http://a.example/debian bookworm main\n"), "bookworm"),
  ).toEqual([]);
});

test("apt reads what is rendered", async () => {
  const derived = deriveSources(parseSources("debian.sources", DEB822), "bookworm");
  const text = renderSources([...derived, ...derived], "amd64");
  const dir = await mkdtemp(join(tmpdir(), "setup-sources-"));
  try {
    await writeFile(join(dir, "x.sources"), text);
    await mkdir(join(dir, "lists", "partial"), { recursive: true });
    const told = await runCommand([
      "apt-get",
      ...["-o", `Dir::Etc::sourcelist=${dir}/x.sources`, "-o", "Dir::Etc::sourceparts=/dev/null"],
      ...["-o", `Dir::State::lists=${dir}/lists`, "-o", "Debug::NoLocking=true"],
      ...["update", "--print-uris"],
    ]);
    const uris = [...told.matchAll(/^'([^']*)'/gm)].map((match) => match[1]!);
    const others = uris.filter((uri) => !uri.endsWith("/InRelease"));
    for (const uri of others) expect(uri).toMatch(/\/main\/binary-(amd64|all)\/Packages\.[a-z0-9]+$/);
    expect(uris.filter((uri) => !others.includes(uri)).sort()).toEqual(
      [
        "http://mirror.example/debian-security/dists/bookworm-security/InRelease",
        ...["bookworm", "bookworm-backports", "bookworm-updates"].flatMap((suite) => [
          `http://mirror.example/debian/dists/${suite}/InRelease`,
          `http://second.example/debian/dists/${suite}/InRelease`,
        ]),
      ].sort(),
    );
  } finally {
    await rm(dir, { recursive: true });
  }
});
