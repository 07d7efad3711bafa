import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makeTar } from "../../tests/support/oci.ts";
import { BuildContext, type ContextArchive, compressed } from "./build-context.ts";
import { parseDockerfile } from "./dockerfile.ts";
import { requestOf } from "./dockerfile-build.ts";

let root: string;

beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), "image6-context-"));
  for (const dir of ["src/sub", "docs", "logs/keep", "empty"])
    mkdirSync(join(root, dir), { recursive: true });
  const files = [
    "a.txt",
    "b.txt",
    "src/main.py",
    "src/sub/x",
    "src/secret.env",
    "docs/a.md",
    "docs/README.md",
  ];
  for (const file of [...files, "logs/1.log", "logs/keep/2.log"]) writeFileSync(join(root, file), file);
  chmodSync(join(root, "src/main.py"), 0o755);
  symlinkSync("main.py", join(root, "src/link"));
  symlinkSync("src", join(root, "alias"));
  symlinkSync("/etc", join(root, "outside"));
  writeFileSync(
    join(root, ".dockerignore"),
    "# comment\n**/*.env\ndocs/*.md\n!docs/README.md\nlogs\n!logs/keep\n",
  );
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

const open = (dockerfile = "Dockerfile") => BuildContext.open(root, join(root, dockerfile));

async function archive(sources: string[], more: Partial<Parameters<BuildContext["archive"]>[0]> = {}) {
  return (await open()).archive({ sources, inline: [], exclude: [], ...more }, "Dockerfile:7");
}
const paths = ({ entries }: ContextArchive) => entries.map(({ path }) => path);

/** Listing of the uploaded bytes by the system's tar. */
async function listed(made: ContextArchive): Promise<string[]> {
  const chunks: Uint8Array[] = [];
  for await (const chunk of compressed(made)) chunks.push(chunk);
  const tar = Bun.spawn(["tar", "--utc", "--quoting-style=literal", "-tzvf", "-"], {
    stdin: new Blob([Buffer.concat(chunks)]),
    stdout: "pipe",
  });
  const text = await new Response(tar.stdout).text();
  expect(await tar.exited).toBe(0);
  return text
    .trim()
    .split("\n")
    .map((line) => line.replace(/ +\d+ \d{4}-\d\d-\d\d \d\d:\d\d /, " "));
}

describe("what a COPY takes", () => {
  test("a file by its name, a directory as such, several together", async () => {
    const file = await archive(["src/main.py"]);
    expect(file.source).toBe("main.py");
    expect(await listed(file)).toEqual(["-rwxr-xr-x 0/0 main.py"]);

    const directory = await archive(["src"]);
    expect(directory.source).toBe("content");
    expect(await listed(directory)).toEqual([
      "drwxr-xr-x 0/0 content/",
      "lrwxrwxrwx 0/0 content/link -> main.py",
      "-rwxr-xr-x 0/0 content/main.py",
      "drwxr-xr-x 0/0 content/sub/",
      "-rw-r--r-- 0/0 content/sub/x",
    ]);

    const several = await archive(["a.txt", "src/", "./b.txt"]);
    expect(several.source).toBe(".");
    expect(paths(several)).toEqual([".", "a.txt", "link", "main.py", "sub", "sub/x", "b.txt"]);
    expect(paths(await archive(["empty"]))).toEqual(["content"]);
  });

  test("patterns, links to directories, the whole context without what .dockerignore leaves out", async () => {
    expect(paths(await archive(["*.txt"]))).toEqual([".", "a.txt", "b.txt"]);
    expect(paths(await archive(["src/m*.p[xyz]"]))).toEqual(["main.py"]);
    expect(paths(await archive(["alias"]))).toEqual(paths(await archive(["src"])));
    const all = paths(await archive(["."]));
    expect(all).toContain("docs/README.md");
    expect(all).toContain("logs/keep/2.log");
    expect(all).toContain(".dockerignore");
    for (const gone of ["docs/a.md", "logs/1.log", "src/secret.env"]) expect(all).not.toContain(gone);
    expect(paths(await archive(["src"], { exclude: ["src/sub"] }))).toEqual([
      "content",
      "content/link",
      "content/main.py",
    ]);
  });

  test("here-documents, alone and beside files", async () => {
    const inline = [{ name: "EOF", content: "text\n" }];
    expect((await archive([], { inline })).source).toBe("EOF");
    expect(paths(await archive(["a.txt"], { inline }))).toEqual([".", "a.txt", "EOF"]);
  });

  test("a Dockerfile's own .dockerignore counts in place of the context's", async () => {
    writeFileSync(join(root, "other.dockerignore"), "*\n!a.txt\n");
    const context = await open("other");
    const made = await context.archive({ sources: ["."], inline: [], exclude: [] }, "other:1");
    expect(paths(made)).toEqual([".", "a.txt"]);
    rmSync(join(root, "other.dockerignore"));
  });

  test("the hash follows names, modes and contents, not times", async () => {
    const before = await archive(["src"]);
    utimesSync(join(root, "src/main.py"), 1, 1);
    expect((await archive(["src"])).hash).toBe(before.hash);
    chmodSync(join(root, "src/main.py"), 0o700);
    expect((await archive(["src"])).hash).not.toBe(before.hash);
    chmodSync(join(root, "src/main.py"), 0o755);
    writeFileSync(join(root, "src/main.py"), "SRC/main.py");
    expect((await archive(["src"])).hash).not.toBe(before.hash);
    writeFileSync(join(root, "src/main.py"), "src/main.py");
    expect((await archive(["src"])).hash).toBe(before.hash);
  });

  test("long names and large content arrive as they are", async () => {
    const long = `${"d".repeat(120)}/${"e".repeat(120)}`;
    mkdirSync(join(root, "long", long), { recursive: true });
    writeFileSync(join(root, "long", long, "näme"), "x".repeat(1_000_000));
    const made = await archive(["long"]);
    expect((await listed(made)).at(-1)).toBe(`-rw-r--r-- 0/0 content/${long}/näme`);
    rmSync(join(root, "long"), { recursive: true });
  });
});

test("ADD: each file that may be an archive is a step of its own below the target, the others go together", async () => {
  const made = join(root, "added");
  mkdirSync(join(made, "d.tar"), { recursive: true });
  const tar = makeTar([{ path: "x", content: "x" }]);
  for (const [name, bytes] of Object.entries({
    "a.tar": tar,
    "b.tar": "no archive",
    "c.tar": "neither",
    "e[1].tar": Bun.gzipSync(new Uint8Array(tar)),
    "f.tar": "at the end",
    "g.tar": Bun.zstdCompressSync(tar),
    "d.tar/in": tar,
  }))
    writeFileSync(join(made, name), bytes);
  expect(await Bun.spawn(["mkfifo", join(made, "z.tar")]).exited).toBe(0);
  writeFileSync(join(root, "add.dockerignore"), "added/z.tar\n");
  try {
    const steps = async (text: string) => {
      const options = { file: "add", buildArgs: new Map<string, string>(), architecture: "amd64" };
      const request = await requestOf(
        parseDockerfile(`FROM x\n${text}\n`, options),
        await open("add"),
        "add",
      );
      return request.stages[0]!.steps.map(({ type, args, filesHash }) => [
        `${type} ${args.join("|")}`,
        paths(request.archives.get(filesHash!)!).join(" "),
      ]);
    };
    const each = [
      ["a.tar", "a.tar"],
      [".", ". b.tar c.tar in"],
      ["e[1].tar", "e[1].tar"],
      ["f.tar", "f.tar"],
      ["g.tar", "g.tar"],
    ];
    expect(await steps("ADD added/*.tar /dst/")).toEqual(
      each.map(([from, all]) => [`ADD ${from}|/dst/||`, all!]),
    );
    expect(await steps('ADD added/[aeg]*.tar a.txt "$X"')).toEqual([
      ['ADD a.tar|"$X"/||', "a.tar"],
      ['ADD e[1].tar|"$X"/||', "e[1].tar"],
      ['ADD g.tar|"$X"/||', "g.tar"],
      ['ADD a.txt|"$X"/||', "a.txt"],
    ]);
    expect(await steps("ADD a.txt b.txt /dst/")).toEqual([["ADD .|/dst/||", ". a.txt b.txt"]]);
    expect(await steps("ADD added/a*.tar /dst")).toEqual([["ADD a.tar|/dst||", "a.tar"]]);
    expect(await steps("ADD added/a.tar <<EOF /dst/\ntext\nEOF")).toEqual([
      ["ADD a.tar|/dst/||", "a.tar"],
      ["ADD EOF|/dst/||", "EOF"],
    ]);
    expect(await steps("COPY added/[ag].tar /dst/")).toEqual([["COPY .|/dst/||", ". a.tar g.tar"]]);
  } finally {
    rmSync(made, { recursive: true });
    rmSync(join(root, "add.dockerignore"));
  }
});

test("what is not there, is left out or leads away is refused with the line", async () => {
  await expect(archive(["nothing"])).rejects.toThrow("Dockerfile:7: the context has no nothing");
  await expect(archive(["*.zip"])).rejects.toThrow("Dockerfile:7: the context has no *.zip");
  await expect(archive(["src/secret.env"])).rejects.toThrow("the context has no src/secret.env");
  await expect(archive(["outside"])).rejects.toThrow("outside is a link that leads out of the context");
  await expect(archive(["../../etc/passwd"])).rejects.toThrow("the context has no");
  await expect(archive(["src", "docs"])).resolves.toBeDefined();
  await expect(BuildContext.open("https://x/y", "D")).rejects.toThrow(/must be a local directory/);
  await expect(BuildContext.open(join(root, "a.txt"), "D")).rejects.toThrow(/is not a directory/);
});
