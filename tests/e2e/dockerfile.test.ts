// biome-ignore-all lint/suspicious/noTemplateCurlyInString: these are Dockerfiles.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { CommandExitError, Sandbox } from "e2b";
import { runCommand } from "../../src/lib/command.ts";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/* `aenv build` against the executable, a real registry and real VMs. */

let server: TestServer;
let registry: LocalRegistry;
let connection: { apiKey: string; apiUrl: string; sandboxUrl: string };
let context: string;

beforeAll(async () => {
  server = await TestServer.create({ toml: "[image.cache]\nvirtual_size_gib = 4\n" });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  connection = await server.connection();
  await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);
  context = mkdtempSync(join(tmpdir(), "image6-dockerfile-"));
  mkdirSync(join(context, "src/sub"), { recursive: true });
  writeFileSync(join(context, "src/main.py"), "print('main')\n");
  writeFileSync(join(context, "src/sub/data"), "data");
  writeFileSync(join(context, "src/secret.env"), "no");
  chmodSync(join(context, "src/main.py"), 0o755);
  symlinkSync("sub/data", join(context, "src/link"));
  writeFileSync(join(context, ".dockerignore"), "**/*.env\n");
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
  if (context !== undefined) rmSync(context, { recursive: true, force: true });
}, 180_000);

async function build(name: string, dockerfile: string, ...flags: string[]) {
  const file = join(context, "Dockerfile");
  writeFileSync(file, dockerfile);
  const shape = ["--cpu", "1", "--memory", "384"];
  return server.run(["build", context, "--name", name, ...shape, ...flags]);
}

async function inside<T>(template: string, use: (sandbox: Sandbox) => Promise<T>): Promise<T> {
  const sandbox = await Sandbox.create(template, { ...connection, timeoutMs: 300_000 });
  try {
    return await use(sandbox);
  } finally {
    await sandbox.kill();
  }
}

const sh = async (sandbox: Sandbox, script: string): Promise<string> =>
  (await sandbox.commands.run(script, { user: "root" })).stdout.trim();

test("FR-57: stages, COPY --from, ARG and ENV, SHELL, here-documents, owners, HEALTHCHECK as readiness", async () => {
  const dockerfile = `# syntax=docker/dockerfile:1
ARG BASE
FROM \${BASE} AS build
ARG VERSION=1
ENV OUT=/out
RUN mkdir -p $OUT/bin $OUT/lib && echo "v$VERSION" > $OUT/bin/version && ln $OUT/bin/version $OUT/bin/again \\
 && chown 1234:1235 $OUT/bin/version && mkfifo $OUT/lib/pipe && ln -s version $OUT/bin/link \\
 && echo one > $OUT/lib/a.so && echo two > $OUT/lib/b.so && echo no > $OUT/lib/c.txt && chmod 4711 $OUT/lib/a.so

FROM \${BASE} AS unused
RUN exit 9

FROM \${BASE}
ARG VERSION
ARG PORT=8080
ENV PATH=/opt/app/bin:$PATH PORT=\${PORT:-1} WHO="the $PORT port"
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
RUN <<EOF
# pipefail and bash are the SHELL's
[[ -n $BASH_VERSION ]]
echo "$VERSION $PORT $0" > /said
EOF
RUN ["/usr/bin/touch", "/exec form"]
RUN useradd -m app
WORKDIR /opt/app
COPY --from=build /out/bin bin/
COPY --from=build --chown=app /out/lib/*.so /out/bin/version lib/
COPY --chown=app:app src/ ./src/
COPY --chmod=640 <<CONF conf/app.conf
port=$PORT home=\\$HOME
CONF
USER app
WORKDIR logs
EXPOSE $PORT
LABEL version="$VERSION"
ENTRYPOINT ["python3", "-m", "http.server"]
CMD ["8080", "--directory", "/opt/app/conf"]
HEALTHCHECK --interval=2s CMD exec 3<>/dev/tcp/127.0.0.1/$PORT
`;
  const args = ["--build-arg", `BASE=${registry.debian}`, "--build-arg", "VERSION=2.5"];
  const first = await build("stages", dockerfile, ...args);
  expect(first).toMatchObject({ exitCode: 0 });
  expect(first.stdout).toMatch(/^Created template \S+ \(build \S+\)\nTemplate \S+ is ready\.\n$/);
  expect(first.stderr).toContain("[build 3/3] RUN mkdir -p");
  expect(first.stderr).not.toContain("exit 9");
  expect(first.stderr).toContain("start command: python3 -m http.server 8080 --directory /opt/app/conf");
  await inside("stages", async (sandbox) => {
    const defaults = await sandbox.commands.run('id -un; pwd; echo "$PORT|$WHO|$VERSION"');
    expect(defaults.stdout).toBe("app\n/opt/app/logs\n8080|the 8080 port|\n");
    // Of the started process; a login shell has a PATH of its own.
    const path = await sh(
      sandbox,
      "tr '\\0' '\\n' < /proc/$(pgrep -f http.server | head -n 1)/environ | grep ^PATH=",
    );
    expect(path).toMatch(/^PATH=\/opt\/app\/bin:\/usr/);
    expect(await sh(sandbox, "cat /said; ls '/exec form'")).toBe("2.5 8080 /bin/bash\n/exec form");
    // Owners of another stage are kept, hard links too; those of the context are root's unless told.
    expect(await sh(sandbox, "cd /opt/app/bin && stat -c '%n %u:%g %h %F' * && cat version")).toBe(
      "again 1234:1235 2 regular file\nlink 0:0 1 symbolic link\nversion 1234:1235 2 regular file\nv2.5",
    );
    expect(await sh(sandbox, "cd /opt/app/lib && stat -c '%n %U %a' *")).toBe(
      "a.so app 4711\nb.so app 644\nversion app 644",
    );
    expect(
      await sh(sandbox, "cd /opt/app/src && find . | LC_ALL=C sort | tr '\\n' ' '; stat -c '%U %a' main.py"),
    ).toBe(". ./link ./main.py ./sub ./sub/data app 755");
    expect(
      await sh(
        sandbox,
        "stat -c '%U:%G %a' /opt/app/conf/app.conf /opt/app/logs; cat /opt/app/conf/app.conf",
      ),
    ).toBe("root:root 640\napp:app 755\nport=8080 home=$HOME");
    // Started by the image's own commands, ready by its health check.
    expect(await sh(sandbox, "curl -s http://127.0.0.1:8080/ | grep -c app.conf")).toBe("1");
  });

  const again = await build("stages", dockerfile, ...args);
  expect(again).toMatchObject({ exitCode: 0 });
  // All that changes the guest comes from the cache, the other stage is not even started.
  expect(again.stderr).not.toContain("[build");
  expect(again.stderr).toContain("CACHED [6/");
}, 400_000);

test("FR-63: FROM scratch: one static program, no shell: builds, boots, runs; a shell's command says what is missing", async () => {
  const tool = join(context, "tool");
  const source = join(import.meta.dir, "../support/guest-tool.c");
  await runCommand(["musl-gcc", "-static", "-Os", "-s", "-o", tool, source], { timeoutMs: 60_000 });
  const dockerfile = `FROM scratch
COPY tool /app
RUN ["/app", "while", "building"]
WORKDIR /a/b
USER 65532
`;
  const built = await build("scratch", dockerfile, "--start-cmd", "");
  expect(built).toMatchObject({ exitCode: 0 });
  expect(built.stderr).toContain("0:0 while building");
  await inside("scratch", async (sandbox) => {
    expect((await sandbox.files.list("/a")).map(({ name }) => name)).toEqual(["b"]);
    const run = await server.run(["exec", sandbox.sandboxId, "--", "/app", "one", "two words"]);
    expect(run).toMatchObject({ exitCode: 0, stdout: "65532:0 one two words\n" });
    const shell = await sandbox.commands.run("true").catch((error: unknown) => error);
    expect(shell).toBeInstanceOf(CommandExitError);
    expect(shell).toMatchObject({ exitCode: 127, stderr: "/bin/bash: no shell in image\n" });
  });
  const refused = await build("scratch", `${dockerfile}RUN echo "in a shell"\n`, "--start-cmd", "");
  expect(refused.exitCode).toBe(1);
  expect(refused.stderr).toContain("there is no shell in the image (no /bin/sh)");
  // What was built before is still there.
  await inside("scratch", async (sandbox) => expect(await sandbox.files.exists("/app")).toBe(true));
}, 180_000);

test("a step that fails names the stage's step and the exit status; nothing runs on", async () => {
  const failing = `ARG BASE\nFROM \${BASE} AS one\nRUN echo some words >&2; exit 3\nFROM \${BASE}\nCOPY --from=one /x /\n`;
  const run = await build("failing", failing, "--build-arg", `BASE=${registry.debian}`);
  expect(run.exitCode).toBe(1);
  expect(run.stderr).toContain("exit status 3: some words");
  expect(run.stderr).toContain("(step: one 1)");
  expect(run.stderr).toContain("aenv template delete");
  const wrong = await build("failing", "FROM x\nONBUILD RUN y\n");
  expect(wrong.exitCode).toBe(1);
  expect(wrong.stderr).toContain("Dockerfile:2: ONBUILD is not supported");
  const vms = (await hostObjects(server)).filter((line) => line.includes("qemu"));
  expect(vms).toEqual([]);
}, 180_000);
