import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { dirname, join } from "node:path";

/*
 * The installer's and the package's scripts, as far as they can be run without a machine to install on;
 * scripts/try-fresh.sh has the rest.
 */

const ROOT = join(import.meta.dir, "..");
const INSTALL = join(ROOT, "scripts/install.sh");
/** An account that is nobody's here. */
const UID = 64_321;

let dir: string;
const children: Bun.Subprocess[] = [];

beforeEach(() => {
  dir = mkdtempSync("/tmp/packaging-");
  chmodSync(dir, 0o755);
});
afterEach(async () => {
  for (const child of children.splice(0)) {
    child.kill("SIGKILL");
    await child.exited;
  }
  rmSync(dir, { recursive: true, force: true });
});

function run(command: readonly string[], env: Record<string, string> = {}) {
  const { exitCode, stdout, stderr } = Bun.spawnSync([...command], {
    env: { PATH: process.env.PATH, HOME: dir, ...env },
    stdin: "ignore",
  });
  return { code: exitCode, out: stdout.toString(), err: stderr.toString() };
}

function put(path: string, content: string, mode = 0o644): string {
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, content);
  chmodSync(path, mode);
  return path;
}

/** A process that does nothing, of the account, once it is what it shall be. */
async function sleeper(cwd: string, program = "/bin/sleep"): Promise<Bun.Subprocess> {
  const account = [`--reuid=${UID}`, `--regid=${UID}`, "--clear-groups"];
  const child = Bun.spawn(["setpriv", ...account, "--", program, "300"], {
    cwd,
    stdio: ["ignore", "ignore", "inherit"],
  });
  children.push(child);
  while (!readFileSync(`/proc/${child.pid}/cmdline`, "utf8").startsWith(program)) {
    if (child.exitCode !== null) throw new Error(`${program} did not start`);
    await Bun.sleep(5);
  }
  return child;
}

const notRoot = process.geteuid?.() !== 0;
if (notRoot) console.warn("skipped: processes of another account, mounts: they need root");

describe("install.sh", () => {
  test("takes http from this machine alone", async () => {
    // Should one of them be asked after all, it is not found at once.
    mkdirSync(join(dir, "bin"));
    const curl = put(join(dir, "curl"), "#!/bin/sh\necho asked >&2\nexit 6\n", 0o755);
    symlinkSync(curl, join(dir, "bin/curl"));
    const env = { PATH: `${join(dir, "bin")}:${process.env.PATH}`, INSTALL_DIR: join(dir, "to") };
    const from = (url: string) => run(["bash", INSTALL, "cli", "--from", url], env).err;
    for (const url of [
      "http://127.0.0.1.evil.example/agentenv",
      "http://localhost.evil.example/agentenv",
      "http://127.0.0.1:80@evil.example/agentenv",
      "http://localhost@evil.example/",
      "http://localhost:80x/agentenv",
      "http://127.0.0.1",
      "http://example.org/agentenv",
    ]) {
      expect([url, from(url)]).toEqual([url, expect.stringContaining(`${url} is not https`)]);
    }
    for (const url of [
      "http://127.0.0.1/agentenv",
      "http://localhost:8899/a@b",
      "https://example.org/agentenv",
    ]) {
      expect([url, from(url)]).toEqual([url, expect.stringContaining("asked")]);
    }
    // An address that was taken does not lead on to one that would not have been.
    await using evil = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: () => new Response("#!/bin/sh") });
    await using near = Bun.serve({
      hostname: "127.0.0.1",
      port: 0,
      fetch: () => Response.redirect(`http://127.0.0.1:${evil.port}/agentenv`, 302),
    });
    const child = Bun.spawn(["bash", INSTALL, "cli", "--from", `http://127.0.0.1:${near.port}/agentenv`], {
      env: { ...process.env, INSTALL_DIR: join(dir, "to") },
      stdio: ["ignore", "ignore", "pipe"],
    });
    expect(await new Response(child.stderr).text()).toContain("cannot download");
    expect(await child.exited).toBe(1);
    expect(existsSync(join(dir, "to"))).toBe(false);
  });

  test.skipIf(notRoot)(
    "the command line without HOME, by one who may not write /usr/local/bin: asks for a place",
    () => {
      const account = [`--reuid=${UID}`, `--regid=${UID}`, "--clear-groups", "--"];
      const script = put(join(dir, "install.sh"), readFileSync(INSTALL, "utf8"), 0o755);
      const cli = ["bash", script, "cli", "--from", "/no/such/file"];
      expect(run(["setpriv", ...account, "env", "-u", "HOME", ...cli])).toEqual({
        code: 1,
        out: "",
        err: "Error: HOME is not set, and /usr/local/bin cannot be written\n  name a directory in INSTALL_DIR\n",
      });
      // With a place the file is looked for.
      expect(run(["env", "-u", "HOME", ...cli], { INSTALL_DIR: join(dir, "to") }).err).toContain(
        "/no/such/file",
      );
    },
  );

  test.skipIf(notRoot)("finds every VM of the account, whichever program runs it", async () => {
    const home = join(dir, "home");
    for (const place of ["home/firecracker-work/x", "elsewhere", "bin"]) {
      mkdirSync(join(dir, place), { recursive: true });
    }
    for (const program of ["firecracker", "qemu-system-x86_64", "agentenv", "other"]) {
      copyFileSync("/bin/sleep", join(dir, "bin", program));
      chmodSync(join(dir, "bin", program), 0o755);
    }
    const ours = [
      await sleeper(join(home, "firecracker-work/x"), join(dir, "bin/other")),
      await sleeper(join(dir, "elsewhere"), join(dir, "bin/firecracker")),
      await sleeper(join(dir, "elsewhere"), join(dir, "bin/qemu-system-x86_64")),
      await sleeper(join(dir, "elsewhere"), join(dir, "bin/agentenv")),
    ];
    await sleeper(join(dir, "elsewhere"), join(dir, "bin/other"));
    // What is replaced under a running process stays one of ours.
    rmSync(join(dir, "bin/firecracker"));
    const body = /^leftovers\(\) \{[\s\S]*?^\}/m.exec(readFileSync(INSTALL, "utf8"))![0];
    const script = `set -euo pipefail\n${body}\nid() { echo ${UID}; }\nuser=x home=$1 bin=$2 leftovers`;
    const found = run(["bash", "-c", script, "bash", home, join(dir, "bin/agentenv")]);
    expect(found.err).toBe("");
    expect(found.out.trim().split("\n").map(Number).sort()).toEqual(ours.map(({ pid }) => pid).sort());
  });
});

describe.skipIf(notRoot)("the Debian package's scripts", () => {
  /** A maintainer script that has its machine below `dir`, with stand-ins for what would change the real one. */
  function maintainer(name: string): string {
    const text = readFileSync(join(ROOT, "deploy/debian", name), "utf8").replace(
      /(?<![\w.*])\/(etc|var\/lib\/aenv|run\/(aenv|systemd)|usr\/bin\/agentenv)/g,
      `${dir}/$1`,
    );
    for (const command of ["systemctl", "deb-systemd-helper", "userdel", "groupdel", "groupadd", "useradd"]) {
      put(join(dir, "stubs", command), `#!/bin/sh\necho "${command} $*" >> ${dir}/calls\n`, 0o755);
    }
    put(join(dir, "stubs/id"), `#!/bin/sh\necho ${UID}\n`, 0o755);
    put(join(dir, "stubs/getent"), "#!/bin/sh\n", 0o755);
    put(join(dir, "stubs/chown"), "#!/bin/sh\n", 0o755);
    return put(join(dir, name), text, 0o755);
  }
  const env = () => ({ PATH: `${dir}/stubs:${process.env.PATH}` });
  const environment = (home: string, runtime: string) =>
    put(join(dir, "etc/default/aenv"), `AENV_HOME_PATH=${home}\nAENV_RUNTIME_PATH="${runtime}"\n`);

  test("removal and purge end what runs, take mounts down, and remove the home that was set", async () => {
    const home = join(dir, "data/aenv");
    const runtime = join(dir, "run/aenv");
    mkdirSync(join(home, "sandboxes/x"), { recursive: true });
    mkdirSync(join(runtime, "netns/deep/er"), { recursive: true });
    for (const place of ["stays", "var/lib"]) mkdirSync(join(dir, place), { recursive: true });
    put(join(dir, "stays/file"), "kept");
    put(join(dir, "etc/aenv/config.toml"), "");
    put(join(dir, "etc/sysctl.d/99-aenv.conf"), "");
    // Started where the script looks: a process of another mount namespace may have other paths to it.
    const asAccount = `setpriv --reuid=${UID} --regid=${UID} --clear-groups -- sleep 300`;
    const script = maintainer("postrm");
    const settings = environment(home, runtime);
    // In one mount namespace, as dpkg would: a mount that must not be descended into, one below another, one in use.
    const both = [
      `(cd ${home}/sandboxes/x && exec ${asAccount}) & vm=$!`,
      `(cd ${dir} && exec ${asAccount}) & other=$!`,
      // Both are what they shall be.
      `until [ "$(cat /proc/$vm/comm)$(cat /proc/$other/comm)" = sleepsleep ]; do sleep 0.02; done`,
      `mount --bind ${dir}/stays ${runtime}/netns/deep`,
      `mkdir ${dir}/stays/inner && mount --bind ${dir}/stays ${runtime}/netns/deep/inner`,
      `exec 9<${runtime}/netns/deep/file`,
      `${script} remove`,
      `grep -c ${runtime} /proc/self/mounts`,
      `wait $vm; echo "vm $?"`,
      `kill $other && wait $other; echo "other $?"`,
      // dpkg removes configuration files before the script is told to purge.
      `rm ${settings}`,
      `${script} purge`,
    ].join("\n");
    const unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c"];
    const outcome = run([...unshare, both], env());
    // The shell may remark upon its jobs' ends.
    const err = outcome.err.replaceAll("Terminated\n", "");
    // The other one lived until it was ended here: there was somebody to send the signal to.
    expect({ ...outcome, err }).toEqual({ code: 0, out: "0\nvm 143\nother 143\n", err: "" });
    for (const path of [home, runtime, join(dir, "etc/aenv"), join(dir, "var/lib/aenv.places")]) {
      expect([path, existsSync(path)]).toEqual([path, false]);
    }
    expect(readFileSync(join(dir, "stays/file"), "utf8")).toBe("kept");
    expect(readFileSync(join(dir, "calls"), "utf8")).toContain("userdel aenv\ngroupdel aenv\n");
  });

  test("a home that is the system's is left alone, and the purge goes on", () => {
    mkdirSync(join(dir, "var/lib"), { recursive: true });
    mkdirSync(join(dir, "run"));
    const script = maintainer("postrm");
    for (const home of ["/srv", "relative", "/var/lib/../../opt/"]) {
      environment(home, join(dir, "run/aenv"));
      rmSync(join(dir, "calls"), { force: true });
      // Nothing here could remove it: the command that would is a stand-in, too.
      put(join(dir, "stubs/rm"), `#!/bin/sh\necho "rm $*" >> ${dir}/calls\n`, 0o755);
      expect(run(["sh", script, "remove"], env()).code).toBe(0);
      const purge = run(["sh", script, "purge"], env());
      expect([purge.code, purge.err]).toEqual([0, `agentenv: ${home} is left: remove it yourself\n`]);
      const calls = readFileSync(join(dir, "calls"), "utf8");
      expect(calls).not.toMatch(new RegExp(`^rm .*${home}`, "m"));
      expect(calls).toContain("userdel aenv\n");
    }
  });

  test("host set-up that fails fails the installation, with all it said", () => {
    mkdirSync(join(dir, "etc/aenv"), { recursive: true });
    put(join(dir, "etc/aenv/config.toml"), "");
    environment(join(dir, "home"), join(dir, "run/aenv"));
    const script = maintainer("postinst");
    put(
      join(dir, "usr/bin/agentenv"),
      "#!/bin/sh\necho 'done  file /etc/x'\necho 'Error: no modules' >&2\nexit 1\n",
      0o755,
    );
    const failed = run(["sh", script, "configure"], env());
    expect(failed.code).toBe(1);
    expect(failed.err).toContain("Error: no modules");
    expect(failed.err).toContain("done  file /etc/x");
    put(
      join(dir, "usr/bin/agentenv"),
      "#!/bin/sh\necho 'present  file /etc/x'\necho 'done  file /etc/y'\n",
      0o755,
    );
    const good = run(["sh", script, "configure"], env());
    expect([good.code, good.err]).toEqual([0, ""]);
    expect(good.out).toStartWith("  file /etc/y\n");
  });
});
