/**
 * The bill of materials of the executable as CycloneDX 1.6 JSON: npm packages that are bundled, the runtime, the
 * C libraries that are linked in, and what `agentenv setup` fetches.
 *   sbom.ts EXECUTABLE VERSION > bom.cdx.json
 */
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, join } from "node:path";
import { Enums, Models, Serialize, Spec } from "@cyclonedx/cyclonedx-library";
import { parse } from "smol-toml";
import pkg from "../package.json" with { type: "json" };

interface Manifest {
  readonly name: string;
  readonly version: string;
  readonly description?: string;
  readonly license?: string;
  readonly dependencies?: Readonly<Record<string, string>>;
  readonly peerDependencies?: Readonly<Record<string, string>>;
}

const [executable, version] = process.argv.slice(2);
if (executable === undefined || version === undefined) {
  process.stderr.write("usage: sbom.ts EXECUTABLE VERSION\n");
  process.exit(2);
}

const root = join(import.meta.dir, "..");
const purlName = (name: string) => name.split("/").map(encodeURIComponent).join("/");

/** The package that an import of `name` from `from` finds, as the bundler does. */
function packageDir(name: string, from: string): string | undefined {
  for (const dir of createRequire(join(from, "x.js")).resolve.paths(name) ?? []) {
    if (existsSync(join(dir, name, "package.json"))) return join(dir, name);
  }
  return undefined;
}

function license(id: string | undefined): Models.LicenseRepository {
  if (id === undefined) return new Models.LicenseRepository();
  return new Models.LicenseRepository([
    / (OR|AND|WITH) /.test(id) ? new Models.LicenseExpression(id) : new Models.SpdxLicense(id),
  ]);
}

const bom = new Models.Bom();
const product = new Models.Component(Enums.ComponentType.Application, pkg.name, {
  version,
  description: pkg.description,
  licenses: license(pkg.license),
  bomRef: `${pkg.name}@${version}`,
});
product.hashes.set(
  Enums.HashAlgorithm["SHA-256"],
  new Bun.CryptoHasher("sha256").update(readFileSync(executable)).digest("hex"),
);
bom.metadata.component = product;

/** Components by bom-ref: a package that two others need is one. */
const known = new Map<string, Models.Component>();
function add(component: Models.Component, owner: Models.Component): Models.Component {
  const present = known.get(component.bomRef.value!);
  const used = present ?? component;
  owner.dependencies.add(used.bomRef);
  if (present === undefined) {
    known.set(used.bomRef.value!, used);
    bom.components.add(used);
  }
  return used;
}

function addPackage(name: string, from: string, owner: Models.Component): void {
  const dir = packageDir(name, from);
  if (dir === undefined) throw new Error(`${name}, a dependency of ${from}, is not installed`);
  const manifest = JSON.parse(readFileSync(join(dir, "package.json"), "utf8")) as Manifest;
  const purl = `pkg:npm/${purlName(manifest.name)}@${manifest.version}`;
  const seen = known.has(purl);
  const component = add(
    new Models.Component(Enums.ComponentType.Library, manifest.name, {
      version: manifest.version,
      bomRef: purl,
      purl,
      licenses: license(manifest.license),
      ...(manifest.description === undefined ? {} : { description: manifest.description }),
    }),
    owner,
  );
  if (seen) return;
  for (const needed of Object.keys(manifest.dependencies ?? {})) addPackage(needed, dir, component);
  // A peer counts where it is there: the bundler takes it then.
  for (const peer of Object.keys(manifest.peerDependencies ?? {})) {
    if (peer !== "typescript" && packageDir(peer, dir) !== undefined) addPackage(peer, dir, component);
  }
}
for (const name of Object.keys(pkg.dependencies)) addPackage(name, root, product);

add(
  new Models.Component(Enums.ComponentType.Platform, "bun", {
    version: Bun.version,
    bomRef: `pkg:npm/bun@${Bun.version}`,
    purl: `pkg:npm/bun@${Bun.version}`,
    licenses: license("MIT"),
  }),
  product,
);

/** Static libraries of the C parts, by their Debian packages on the machine that builds. */
const LINKED: readonly (readonly [debianPackage: string, license: string])[] = [
  ["liburing-dev", "LGPL-2.1-only OR MIT"],
  ["libzstd-dev", "BSD-3-Clause OR GPL-2.0-only"],
  ["liblz4-dev", "BSD-2-Clause"],
  ["libext2fs-dev", "LGPL-2.0-only"],
  ["comerr-dev", "MIT"],
  ["musl-dev", "MIT"],
];
for (const [name, terms] of LINKED) {
  // biome-ignore lint/suspicious/noTemplateCurlyInString: dpkg-query's own placeholders.
  const query = Bun.spawnSync(["dpkg-query", "-W", "-f", "${source:Package} ${Version}", name]);
  if (query.exitCode !== 0)
    throw new Error(`the package ${name} is not installed: which library was linked?`);
  const [source, debianVersion] = query.stdout.toString().split(" ");
  const purl = `pkg:deb/debian/${name}@${encodeURIComponent(debianVersion!)}`;
  add(
    new Models.Component(Enums.ComponentType.Library, name, {
      version: debianVersion!,
      bomRef: purl,
      purl,
      description: `linked from Debian's ${source}`,
      licenses: license(terms),
    }),
    product,
  );
}

/** What setup fetches: not in the executable, named by its pins. */
type Pins = Readonly<
  Record<
    string,
    | {
        readonly pinned?: readonly {
          readonly package: string;
          readonly version: string;
          readonly sha256: string;
        }[];
      }
    | number
  >
>;
for (const section of Object.values(parse(readFileSync(join(root, "config/deps.toml"), "utf8")) as Pins)) {
  if (typeof section === "number") continue;
  for (const pin of section.pinned ?? []) {
    const purl = `pkg:deb/debian/${pin.package}@${encodeURIComponent(pin.version)}`;
    const fetched = new Models.Component(Enums.ComponentType.Application, pin.package, {
      version: pin.version,
      bomRef: purl,
      purl,
      scope: Enums.ComponentScope.Optional,
      description: `fetched by agentenv setup; ${basename(executable)} does not hold it`,
    });
    fetched.hashes.set(Enums.HashAlgorithm["SHA-256"], pin.sha256);
    add(fetched, product);
  }
}

const serializer = new Serialize.JsonSerializer(new Serialize.JSON.Normalize.Factory(Spec.Spec1dot6));
process.stdout.write(`${serializer.serialize(bom, { sortLists: true, space: 2 })}\n`);
