/**
 * Rooms import downwards only, and reach another room through its index.ts (or its shared type files).
 * The order of the list is the order of the floors: a room may import the rooms below it.
 */
const floors = [
  ["server"],
  ["api"],
  ["proxy"],
  ["observability"],
  ["orchestrator"],
  ["template"],
  ["snapshot"],
  ["sandbox"],
  ["image"],
  ["vmm"],
  ["memory"],
  ["network"],
  ["storage/blockd"],
  ["storage/export"],
  ["storage/overlaybd"],
  ["storage/io"],
];

const room = (name) => (name === "server" ? "^src/server\\.ts$" : `^src/${name}/`);

// Seams: plain type files that any room may name.
const seams = "(types|protocol)\\.ts$";

const upward = floors.flatMap(([lower], i) =>
  floors
    .slice(0, i)
    .filter(([upper]) => upper !== lower)
    .map(([upper]) => ({
      name: `${lower}-not-up-to-${upper}`,
      severity: "error",
      from: { path: room(lower), pathNot: "\\.test\\.ts$" },
      to: { path: room(upper), pathNot: seams },
    })),
);

module.exports = {
  forbidden: [
    ...upward,
    {
      name: "no-circular",
      severity: "error",
      from: {},
      to: { circular: true, viaOnly: { dependencyTypesNot: ["type-only"] } },
    },
    {
      name: "cli-talks-http-only",
      comment: "The command line works against a server, so it must not contain one.",
      severity: "error",
      from: { path: "^src/cli/", pathNot: "\\.test\\.ts$" },
      to: { path: "^(src/(?!cli/|lib/|version\\.ts)|ffi/)" },
    },
    {
      name: "lib-is-the-ground",
      severity: "error",
      from: { path: "^src/lib/", pathNot: "\\.test\\.ts$" },
      to: { path: "^src/(?!lib/)" },
    },
    {
      name: "ffi-only-from-the-engine",
      comment: "bun:ffi is imported by ffi/ alone.",
      severity: "error",
      from: { pathNot: ["^(ffi/|node_modules)", "\\.test\\.ts$"] },
      to: { path: "^bun:ffi$" },
    },
    {
      name: "through-the-front-door",
      comment: "A room's public face is its index.ts.",
      severity: "error",
      from: { path: "^src/([^/]+)/", pathNot: "\\.test\\.ts$" },
      to: { path: "^src/(?!lib/|storage/)[^/]+/", pathNot: ["^src/$1/", "index\\.ts$", seams] },
    },
    {
      name: "through-the-front-door-storage",
      severity: "error",
      from: { path: "^src/", pathNot: ["\\.test\\.ts$", "^src/storage/"] },
      to: { path: "^src/storage/", pathNot: ["index\\.ts$", seams] },
    },
  ],
  options: {
    doNotFollow: { path: "node_modules" },
    exclude: { path: "(^build/|\\.so$)" },
    tsConfig: { fileName: "tsconfig.json" },
    tsPreCompilationDeps: "specify",
    enhancedResolveOptions: { extensions: [".ts", ".js", ".json"] },
  },
};
