import { afterAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  deriveEnvdToken,
  deriveTrafficToken,
  loadApiKey,
  loadPreviousApiKey,
  loadTokenSeed,
  managedApiKeyPath,
  managedSeedPath,
} from "./index.ts";

const root = mkdtempSync(join(tmpdir(), "network-secrets-"));
afterAll(() => rmSync(root, { recursive: true, force: true }));

const mountedPath = join(root, "mounted");
const KEY = "k".repeat(32);

function newHome(): string {
  return mkdtempSync(join(root, "home-"));
}

function secretsDir(home: string): string {
  const dir = join(home, "secrets");
  mkdirSync(dir, { mode: 0o700 });
  return dir;
}

function writeSecret(path: string, text: string, mode = 0o600): void {
  writeFileSync(path, text);
  chmodSync(path, mode);
}

function apiKey(homePath: string, generate = true, env: Record<string, string> = {}) {
  return loadApiKey({ homePath, env, generate, mountedPath });
}

describe("API key", () => {
  test("environment beats mounted file beats managed file", () => {
    const home = newHome();
    writeSecret(join(secretsDir(home), "api-key"), `${"m".repeat(32)}\n`);
    expect(apiKey(home)).toMatchObject({ value: "m".repeat(32), source: "managed_file", generated: false });
    const real = join(root, "real-key");
    writeSecret(real, `${"r".repeat(256)}\r\n`, 0o644);
    symlinkSync(real, mountedPath);
    try {
      expect(apiKey(home)).toMatchObject({ value: "r".repeat(256), source: "mounted_file" });
      expect(apiKey(home, true, { AENV_API_KEY: KEY })).toMatchObject({ value: KEY, source: "environment" });
    } finally {
      rmSync(mountedPath);
    }
  });

  test.each(["", "short", "k".repeat(257), `${KEY} `, `${KEY}\n`, `${KEY}ü`])(
    "a set but invalid one is an error: %j",
    (value) => {
      expect(() => apiKey(newHome(), true, { AENV_API_KEY: value })).toThrow("AENV_API_KEY");
    },
  );

  test.each([
    ["a directory", (path: string) => mkdirSync(path)],
    ["a fifo", (path: string) => Bun.spawnSync(["mkfifo", path])],
    ["too long", (path: string) => writeFileSync(path, "k".repeat(300))],
    ["two lines", (path: string) => writeFileSync(path, `${KEY}\n\n`)],
  ])("a mounted file that is %s is an error, not skipped", (_, make) => {
    make(mountedPath);
    try {
      expect(() => apiKey(newHome())).toThrow(mountedPath);
    } finally {
      rmSync(mountedPath, { recursive: true });
    }
  });

  test("the key before it: the same sources and rules, and never made", () => {
    const home = newHome();
    const previous = (env: Record<string, string> = {}) =>
      loadPreviousApiKey({ homePath: home, env, mountedPath });
    expect(previous()).toBeUndefined();
    expect(readdirSync(home)).toEqual([]);
    const path = join(secretsDir(home), "api-key-previous");
    writeSecret(path, `${"o".repeat(32)}\n`);
    expect(previous()).toMatchObject({ value: "o".repeat(32), source: "managed_file", path });
    writeFileSync(`${mountedPath}-previous`, "p".repeat(32));
    try {
      expect(previous()).toMatchObject({ value: "p".repeat(32), source: "mounted_file" });
      expect(previous({ AENV_API_KEY_PREVIOUS: KEY })).toMatchObject({ value: KEY, source: "environment" });
    } finally {
      rmSync(`${mountedPath}-previous`);
    }
    expect(() => previous({ AENV_API_KEY_PREVIOUS: "short" })).toThrow("AENV_API_KEY_PREVIOUS");
    writeSecret(path, "short");
    expect(() => previous()).toThrow(path);
    // The key itself is another one.
    expect(apiKey(home)?.value).toMatch(/^e2b_/);
  });

  test("is generated once, private, and only when asked", () => {
    const home = newHome();
    expect(apiKey(home, false)).toBeUndefined();
    expect(readdirSync(home)).toEqual([]);
    const made = apiKey(home);
    expect(made?.generated).toBe(true);
    expect(made?.value).toMatch(/^e2b_[0-9a-f]{64}$/);
    expect(readFileSync(managedApiKeyPath(home), "utf8")).toBe(`${made?.value}\n`);
    expect(statSync(managedApiKeyPath(home)).mode & 0o7777).toBe(0o600);
    expect(statSync(join(home, "secrets")).mode & 0o7777).toBe(0o700);
    expect(readdirSync(join(home, "secrets"))).toEqual(["api-key"]);
    expect(apiKey(home)).toEqual({ ...made!, generated: false });
  });

  test("racing processes end with one value", async () => {
    const home = newHome();
    const program = `import { loadApiKey } from ${JSON.stringify(join(import.meta.dir, "index.ts"))};
      console.log(loadApiKey({ homePath: process.argv.at(-1), env: {}, generate: true, mountedPath: process.argv.at(-1) + "/none" }).value);`;
    const script = join(root, "race.ts");
    writeFileSync(script, program);
    const racers = Array.from({ length: 4 }, () =>
      Bun.spawn([process.execPath, script, home], { stdout: "pipe" }),
    );
    const values = await Promise.all(racers.map((racer) => new Response(racer.stdout).text()));
    expect(values[0]).toMatch(/^e2b_/);
    expect(new Set(values).size).toBe(1);
    expect(readdirSync(join(home, "secrets"))).toEqual(["api-key"]);
  }, 120_000);
});

describe("managed files are refused when they are not ours alone", () => {
  const cases: [what: string, spoil: (home: string) => void, says: string][] = [
    ["directory mode", (home) => chmodSync(secretsDir(home), 0o755), "0755, expected 0700"],
    [
      "directory is a link",
      (home) => symlinkSync(mkdtempSync(join(root, "target-")), join(home, "secrets")),
      "symbolic link",
    ],
    ["directory is a file", (home) => writeFileSync(join(home, "secrets"), ""), "not a real directory"],
    [
      "file mode",
      (home) => writeSecret(join(secretsDir(home), "api-key"), KEY, 0o640),
      "0640, expected 0600",
    ],
    [
      "file is a link",
      (home) => {
        writeSecret(join(home, "elsewhere"), KEY);
        symlinkSync(join(home, "elsewhere"), join(secretsDir(home), "api-key"));
      },
      "symbolic link",
    ],
    [
      "file is a fifo",
      (home) => Bun.spawnSync(["mkfifo", "-m", "600", join(secretsDir(home), "api-key")]),
      "not a regular file",
    ],
    [
      "file is too long",
      (home) => writeSecret(join(secretsDir(home), "api-key"), "k".repeat(259)),
      "larger than the 258 bytes",
    ],
    ["content", (home) => writeSecret(join(secretsDir(home), "api-key"), "no key"), "32 to 256 characters"],
  ];
  test.each(cases)("%s", (_, spoil, says) => {
    const home = newHome();
    spoil(home);
    expect(() => apiKey(home)).toThrow(says);
  });

  test("another owner", () => {
    const home = newHome();
    writeSecret(join(secretsDir(home), "api-key"), KEY);
    if (process.geteuid?.() !== 0) {
      expect(apiKey(home)?.value).toBe(KEY);
      return;
    }
    Bun.spawnSync(["chown", "12345", managedApiKeyPath(home)]);
    expect(() => apiKey(home)).toThrow("uid 12345, expected 0");
  });
});

describe("token seed", () => {
  test("a configured one is used and makes no file", () => {
    const home = newHome();
    const seed = loadTokenSeed({
      homePath: home,
      configured: " test-seed ",
      neededByPersisted: true,
      clustered: true,
    });
    expect(seed).toEqual({ value: "test-seed", source: "configured", generated: false, warnings: [] });
    expect(readdirSync(home)).toEqual([]);
  });

  test("a managed one is made once; clusters are warned", () => {
    const home = newHome();
    const seed = loadTokenSeed({ homePath: home, neededByPersisted: false, clustered: true });
    expect(seed.value).toMatch(/^[0-9a-f]{64}$/);
    expect(seed.generated).toBe(true);
    expect(seed.warnings).toHaveLength(1);
    const again = loadTokenSeed({ homePath: home, neededByPersisted: true });
    expect(again).toMatchObject({ value: seed.value, generated: false, warnings: [] });
  });

  test("a lost one is not replaced while it is needed", () => {
    const home = newHome();
    expect(() => loadTokenSeed({ homePath: home, neededByPersisted: true })).toThrow(managedSeedPath(home));
    expect(readdirSync(home)).toEqual([]);
  });

  test("other content is an error", () => {
    for (const text of ["A".repeat(64), "a".repeat(63), `${"a".repeat(64)}\r`, ""]) {
      const home = newHome();
      writeSecret(join(secretsDir(home), "sandbox-access-token-hash-seed"), text);
      expect(() => loadTokenSeed({ homePath: home, neededByPersisted: false })).toThrow("64 lower-case hex");
    }
  });

  test("tokens: the given vectors", () => {
    const id = "01936f8e-72f5-7000-8000-000000000001";
    const envd = "4f00f2a93a87c37161ae01c59b6d4f84506668113441277e9f6272dd4bfae1a7";
    expect(deriveEnvdToken("test-seed", id)).toBe(envd);
    expect(deriveTrafficToken("test-seed", id)).toBe(
      "586547d7c10facb0f4871297fdbfd9d2b4376f4b02b2e1487646c1c87a293bd8",
    );
  });
});
