import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { type AddressInfo, createConnection, createServer, type Socket } from "node:net";
import { CliRig, noGuest, type OnTerminal } from "../../tests/support/cli-rig.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { ScreenModes } from "./terminal.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

if (noGuest !== undefined) console.warn(`skipped: shells of aenv connect and start: ${noGuest}`);

/** Runs `aenv ARGS` between two looks at the terminal's settings; `[rc N same]` tells the outcome. */
const around = (args: string) =>
  `before=$(stty -g); aenv ${args}; rc=$?; after=$(stty -g); [ "$before" = "$after" ] && s=same || s=changed; echo "[rc $rc $s]"`;

describe.skipIf(noGuest !== undefined)("an attached shell", () => {
  let rig: CliRig;

  beforeAll(async () => {
    rig = await CliRig.start();
    await rig.guest();
    await Bun.write(`${rig.dir}/home/.profile`, "PS1='guest> '\nHISTFILE=\n");
  });
  afterAll(() => rig[Symbol.asyncDispose]());

  const connect = async (id: string, env: Record<string, string> = {}): Promise<OnTerminal> => {
    const terminal = rig.terminal(around(`connect ${id}`), env);
    await terminal.shows("guest> ");
    return terminal;
  };

  test("prompt, commands, exit status, hint; the terminal is as before", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    terminal.type("echo $((6 * 7))-typed\r");
    await terminal.shows("42-typed\r\n");
    terminal.type("exit 37\r");
    await terminal.shows("[rc 37 same]");
    expect(terminal.screen()).toContain(`Come back with: aenv cn ${id}\r\n`);
    expect(await terminal.exited).toBe(0);
  });

  test("127 as the last status does not start another shell", async () => {
    const terminal = await connect(rig.sandbox());
    terminal.type("no-such-program; exit\r");
    await terminal.shows("[rc 127 same]");
  });

  test("Ctrl-C, Ctrl-Z and Ctrl-D go to the remote shell", async () => {
    const terminal = await connect(rig.sandbox());
    terminal.type("sh -c 'echo first-$((1 + 1)); exec sleep 60'\r");
    await terminal.shows("first-2\r\n");
    terminal.type("\x03");
    await terminal.shows(/\^C.*guest> /s);
    terminal.type("echo status=$?\r");
    await terminal.shows("status=130\r\n");
    terminal.type("sh -c 'echo runs-$((1 + 1)); exec sleep 60'\r");
    await terminal.shows("runs-2\r\n");
    terminal.type("\x1a");
    await terminal.shows(/Stopped .*sleep 60/);
    terminal.type("kill %1; wait; echo ended-$((1 + 1))\r");
    await terminal.shows(/ended-2\r\n.*guest> /s);
    terminal.type("\x04");
    // A shell that has not yet heard of its job's end warns once.
    await terminal.shows(/\[rc \d+ same\]|There are (stopped|running) jobs/);
    if (terminal.screen().includes("There are")) {
      terminal.type("\x04");
      await terminal.shows(/\[rc \d+ same\]/);
    }
  });

  test("size at the start and after a change", async () => {
    const terminal = await connect(rig.sandbox());
    terminal.type("stty size\r");
    await terminal.shows("24 80\r\n");
    terminal.resize(133, 51);
    terminal.type('until [ "$(stty size)" = "51 133" ]; do sleep 0.05; done; stty size\r');
    await terminal.shows("51 133\r\n");
    terminal.type("exit\r");
    await terminal.shows("[rc 0 same]");
  });

  test("environment: what describes the terminal, nothing else", async () => {
    const terminal = await connect(rig.sandbox(), {
      TERM: "xterm-kitty",
      COLORTERM: "truecolor",
      SECRET: "x",
    });
    terminal.type('echo "<$TERM|$COLORTERM|$LANG|$SECRET>"\r');
    await terminal.shows("<xterm-256color|truecolor|C.UTF-8|>\r\n");
    terminal.type("exit\r");
    await terminal.shows("[rc 0 same]");
  });

  test("much output and a long paste arrive whole", async () => {
    const terminal = await connect(rig.sandbox());
    terminal.type("stty -echo -icanon; echo go-$((1 + 1)); head -c 60000 | sha256sum; stty echo icanon\r");
    await terminal.shows("go-2");
    const line = `é${"x".repeat(56)}é`.slice(0, 57);
    const paste = Array.from({ length: 1000 }, (_, i) => `${line}${i % 10}\n`).join("");
    const bytes = Buffer.from(paste);
    expect(bytes.length).toBe(60_000);
    terminal.type(paste);
    await terminal.shows(`${new Bun.CryptoHasher("sha256").update(bytes).digest("hex")}  -`);
    terminal.type("seq 1 60000\r");
    await terminal.shows("\r\n60000\r\n");
    const counted = Array.from({ length: 60_000 }, (_, i) => `${i + 1}\r\n`).join("");
    expect(terminal.screen().includes(counted)).toBe(true);
    terminal.type("exit\r");
    await terminal.shows("[rc 0 same]");
  }, 120_000);

  test("a paused sandbox is resumed; its shell ends with 130 when it is paused again", async () => {
    const id = rig.sandbox({ state: "paused" });
    const terminal = await connect(id);
    expect(rig.records.get(id)?.state).toBe("running");
    // A full-screen program is on: its modes must not stay behind.
    terminal.type("printf '\\033[?1049h\\033[?2004h\\033[?25l'; sleep 60\r");
    await terminal.shows("\x1b[?25l");
    expect((await rig.aenv(["pause", id])).code).toBe(0);
    await terminal.shows("[rc 130 same]");
    expect(terminal.screen()).toContain(`The sandbox was paused. Resume it with: aenv resume ${id}`);
    expect(terminal.screen()).toContain("\x1b[?1049l");
    expect(terminal.screen().lastIndexOf("\x1b[?25h")).toBeGreaterThan(
      terminal.screen().lastIndexOf("\x1b[?25l"),
    );
  });

  test("deleted during the session", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    expect((await rig.aenv(["delete", id])).code).toBe(0);
    await terminal.shows("[rc 130 same]");
    expect(terminal.screen()).toContain(`The sandbox ${id} was deleted.`);
  });

  test("a broken connection is made again, to the same shell", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    terminal.type("marker=kept-$((1 + 1)); echo set-$marker\r");
    await terminal.shows("set-kept-2\r\n");
    rig.cut(id);
    await Bun.sleep(900);
    terminal.type("echo $marker\r");
    await terminal.shows("kept-2\r\n");
    // Keys typed while nothing answers are not lost.
    await rig.silence();
    await Bun.sleep(300);
    terminal.type("echo after-$marker\r");
    await Bun.sleep(500);
    rig.listen();
    await terminal.shows("after-kept-2\r\n");
    terminal.type("exit 5\r");
    await terminal.shows("[rc 5 same]");
  });

  test("an output stream that has silently died is replaced, without a line twice", async () => {
    const id = rig.sandbox();
    await using relay = startRelay(Number(new URL(rig.url).port));
    rig.login(`http://127.0.0.1:${relay.port}`);
    try {
      const terminal = await connect(id);
      terminal.type("stty -echo; PS1='now> '\r");
      await terminal.shows("now> ");
      relay.freeze();
      // The first answer is lost with the dead connection, which shows by its absence.
      terminal.type("echo one\r");
      await Bun.sleep(1_200);
      terminal.type("echo two-$((1 + 1))\r");
      await terminal.shows("two-2\r\n");
      for (let i = 0; i < 5; i++) terminal.type(`echo more-$((${i} + 100))\r`);
      await terminal.shows("more-104\r\n");
      for (const line of ["two-2", "more-100", "more-103"])
        expect(terminal.screen().split(`${line}\r\n`).length).toBe(2);
      terminal.type("exit 4\r");
      await terminal.shows("[rc 4 same]");
    } finally {
      rig.login();
    }
  });

  test("keys that are not echoed disturb nothing", async () => {
    const terminal = await connect(rig.sandbox());
    terminal.type("read -s -p 'Password: ' secret; echo \"<$secret>\"\r");
    await terminal.shows("Password: ");
    terminal.type("hid");
    await Bun.sleep(1_500);
    terminal.type("den\r");
    await terminal.shows("<hidden>\r\n");
    terminal.type("echo once-$((1 + 1))\r");
    await terminal.shows("once-2\r\n");
    await Bun.sleep(1_000);
    expect(terminal.screen().split("once-2\r\n").length).toBe(2);
    terminal.type("exit\r");
    await terminal.shows("[rc 0 same]");
  });

  test("a server that stays away ends the session after ten seconds", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    const from = performance.now();
    await rig.silence();
    try {
      await terminal.shows("[rc 130 same]", 50_000);
      expect(performance.now() - from).toBeGreaterThan(8_000);
      expect(terminal.screen()).toContain(
        `The connection to the sandbox was lost. Try again with: aenv cn ${id}`,
      );
    } finally {
      rig.listen();
    }
  });

  for (const [signal, code] of [
    ["SIGTERM", 143],
    ["SIGHUP", 129],
    ["SIGINT", 130],
  ] as const) {
    test(`the terminal is as before after ${signal}`, async () => {
      const terminal = await connect(rig.sandbox());
      terminal.type("printf '\\033[?1049h'\r");
      await terminal.shows("\x1b[?1049h");
      process.kill(await terminal.aenvPid(), signal);
      await terminal.shows(`[rc ${code} same]`);
      expect(terminal.screen()).toContain("\x1b[?1049l");
    });
  }

  test("stopped and continued, the terminal is raw again", async () => {
    const terminal = await connect(rig.sandbox());
    const pid = await terminal.aenvPid();
    const tty = await ttyOf(pid);
    const settings = () => Bun.spawnSync(["stty", "-F", tty, "-a"], { stdout: "pipe" }).stdout.toString();
    process.kill(pid, "SIGSTOP");
    await eventually("stopped", async () => /\) T /.test(await Bun.file(`/proc/${pid}/stat`).text()));
    Bun.spawnSync(["stty", "-F", tty, "sane"]);
    expect(settings()).toMatch(/^opost .* icanon /ms);
    process.kill(pid, "SIGCONT");
    await eventually("raw again", () => /^-opost .* -icanon /ms.test(settings()));
    terminal.type("\x03");
    // An interrupt throws away what is typed before the next prompt.
    await terminal.shows(/\^C.*guest> /s);
    terminal.type("echo still-$((40 + 2))\r");
    await terminal.shows("still-42\r\n");
    terminal.type("exit\r");
    await terminal.shows(/\[rc \d+ same\]/);
  });

  test("start opens a shell in a new sandbox", async () => {
    const terminal = rig.terminal(around("start debian --timeout 900"));
    await terminal.shows("guest> ");
    const id = /Started sandbox ([0-9a-f-]{36})\r\n/.exec(terminal.screen())?.[1] ?? "";
    expect(rig.records.get(id)?.timeoutSeconds).toBe(900);
    terminal.type("exit 3\r");
    await terminal.shows("[rc 3 same]");
  });

  test("without a terminal nothing is started or resumed", async () => {
    const id = rig.sandbox({ state: "paused" });
    const before = rig.records.size;
    rig.template("debian");
    const connected = await rig.aenv(["connect", id]);
    expect(connected.code).toBe(2);
    expect(connected.err).toBe(
      `Error: a shell needs a terminal on standard input and output\n  run a command with: aenv exec ${id} COMMAND\n`,
    );
    expect(rig.records.get(id)?.state).toBe("paused");
    const started = await rig.aenv(["start", "debian"]);
    expect(started.code).toBe(2);
    expect(started.err).toContain("--detach");
    // A wrong name is told before that.
    const misspelt = await rig.aenv(["start", "debain"]);
    expect(misspelt).toMatchObject({ code: 1, out: "" });
    expect(misspelt.err).toContain("debain");
    expect(misspelt.err).not.toContain("terminal");
    expect(rig.records.size).toBe(before);
  });

  test("the detach keys leave the shell running; --pid comes back to it", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    // Once it is a key like others.
    terminal.type("kept=state-$((20 + 2)); echo cat-$((1 + 1)); cat -v\r");
    await terminal.shows("cat-2\r\n");
    terminal.type("\x1d");
    await terminal.shows("^]");
    terminal.type("\r");
    await terminal.shows("^]\r\n^]\r\n");
    terminal.type("\x04");
    await terminal.shows(/\^\]\r\n.*guest> /s);
    terminal.type("\x1d\x1d");
    await terminal.shows("[rc 0 same]");
    const pid = new RegExp(
      `Detached; the shell goes on\\. Come back to it with: aenv cn ${id} --pid (\\d+)`,
    ).exec(terminal.screen())?.[1];
    expect(pid).toBeDefined();
    // A shell that is late to hear of it draws its prompt all the same.
    process.kill(Number(pid), "SIGSTOP");
    const again = rig.terminal(around(`cn ${id} --pid ${pid}`));
    await again.shows("connecting");
    await Bun.sleep(500);
    process.kill(Number(pid), "SIGCONT");
    await again.shows("guest> ");
    again.type("echo $kept\r");
    await again.shows("state-22\r\n");
    again.type("exit 9\r");
    await again.shows("[rc 9 same]");
    const gone = rig.terminal(around(`cn ${id} --pid 4194303`));
    // Others of this file's shells may run: all its sandboxes are one agent.
    await gone.shows(/no shell runs in it; start one with: aenv cn|shells that run in it: \d+ /);
    await gone.shows("[rc 1 same]");
    const other = await connect(id);
    const wrong = rig.terminal(around(`cn ${id} --pid 4194303`));
    await wrong.shows(
      /shells that run in it: (\d+) \(\/bin\/(ba)?sh .*\); come back to one with: aenv cn \S+ --pid \1/,
    );
    await wrong.shows("[rc 1 same]");
    other.type("exit\r");
    await other.shows("[rc 0 same]");
  });

  test("what is typed right before the detach keys still arrives", async () => {
    const id = rig.sandbox();
    const terminal = await connect(id);
    terminal.type("kept=late-$((20 + 2))\r\x1d\x1d");
    await terminal.shows("[rc 0 same]");
    const pid = / --pid (\d+)/.exec(terminal.screen())?.[1];
    const again = rig.terminal(around(`cn ${id} --pid ${pid}`));
    again.type("echo $kept; exit\r");
    await again.shows("late-22\r\n");
  });

  test("top goes on over a restart of the server and leaves the terminal as it was", async () => {
    rig.records.clear();
    const id = rig.sandbox();
    const terminal = rig.terminal(around("top --interval 1"));
    await terminal.shows(/1 running at .*q ends/);
    expect(terminal.screen()).toContain(id);
    await rig.silence();
    await terminal.shows(/cannot reach the server at .*; trying again/);
    const since = terminal.screen().length;
    rig.listen();
    await terminal.shows("1 running at", 30_000, since);
    terminal.type("x\x1b[Aq");
    await terminal.shows("[rc 0 same]");
    expect(terminal.screen()).toContain("\x1b[?1049l");
  });

  test("other detach keys, none, wrong ones", async () => {
    const id = rig.sandbox();
    const terminal = rig.terminal(around(`cn --detach-keys ctrl-p,q ${id}`));
    await terminal.shows("guest> ");
    terminal.type("\x10q");
    await terminal.shows("[rc 0 same]");
    const wrong = await rig.aenv(["cn", "--detach-keys", "ctrl-!,x", id]);
    expect(wrong.code).toBe(2);
    expect(wrong.err).toContain('"ctrl-!,x" are no detach keys');
  });

  test("exec --tty: a command with its own terminal, environment, directory and status", async () => {
    const id = rig.sandbox();
    const terminal = rig.terminal(
      around(
        `exec -it -e COLOUR=blue -w / ${id} sh -c 'stty size; pwd; echo $COLOUR; tty; read line; echo "<$line>"; exit 6'`,
      ),
    );
    await terminal.shows("24 80\r\n/\r\nblue\r\n/dev/pts/");
    terminal.type("typed here\r");
    await terminal.shows("<typed here>\r\n");
    await terminal.shows("[rc 6 same]");
    expect(terminal.screen()).not.toContain("Come back");
    const no = await rig.aenv(["exec", "-t", id, "tty"]);
    expect(no.code).toBe(2);
    expect(no.err).toContain("leave out --tty");
  });

  test("a sandbox that is not there", async () => {
    const terminal = rig.terminal(around("cn 01234567-89ab-7def-8123-456789abcdef"));
    await terminal.shows("[rc 1 same]");
    expect(terminal.screen()).toContain(
      "Error: HTTP 404: sandbox 01234567-89ab-7def-8123-456789abcdef was not found",
    );
  });
});

/** Passes connections on; `freeze` holds back for ever what comes back on those that are open. */
function startRelay(port: number): AsyncDisposable & { readonly port: number; freeze(): void } {
  const sockets = new Set<Socket>();
  const frozen = new Set<Socket>();
  const server = createServer((client) => {
    const upstream = createConnection(port, "127.0.0.1");
    for (const [from, to] of [
      [client, upstream],
      [upstream, client],
    ] as const) {
      sockets.add(from);
      from.on("data", (bytes) => {
        if (!frozen.has(from)) to.write(bytes);
      });
      from.on("end", () => {
        if (!frozen.has(from)) to.end();
      });
      from.on("error", () => to.destroy());
      from.on("close", () => sockets.delete(from));
    }
    toClient.add(upstream);
  }).listen(0, "127.0.0.1");
  const toClient = new Set<Socket>();
  return {
    port: (server.address() as AddressInfo).port,
    freeze() {
      for (const socket of toClient) frozen.add(socket);
    },
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

async function ttyOf(pid: number): Promise<string> {
  const { readlink } = await import("node:fs/promises");
  return readlink(`/proc/${pid}/fd/0`);
}

test("the terminal is as before after an uncaught error", async () => {
  await using rig = await CliRig.start();
  const code = `import { RawMode } from "${import.meta.dir}/terminal.ts";
    new RawMode();
    setTimeout(() => { throw new Error("boom"); }, 50);`;
  await Bun.write(`${rig.dir}/throws.ts`, code);
  const terminal = rig.terminal(
    `before=$(stty -g); "${process.execPath}" throws.ts; [ "$before" = "$(stty -g)" ] && echo "[same]"`,
  );
  await terminal.shows("[same]");
  expect(terminal.screen()).toContain("boom");
});

describe("modes that remote programs leave behind", () => {
  const observe = (...chunks: string[]) => {
    const modes = new ScreenModes();
    for (const chunk of chunks) modes.observe(Buffer.from(chunk));
    return modes.undo();
  };

  test("only what is on is undone", () => {
    expect(observe("plain \x1b[31mred\x1b[0m")).toBe("");
    expect(observe("\x1b[?1049h\x1b[?1049l")).toBe("");
    expect(observe("\x1b[?1049;1006h")).toBe("\x1b[?1049l\x1b[?1006l\x1b[0m");
    expect(observe("\x1b[?25l")).toBe("\x1b[?25h\x1b[0m");
    expect(observe("\x1b[?1h")).toBe("");
  });

  test("a sequence may be cut at any place", () => {
    const text = "abc\x1b[?1049hdef\x1b[?2004h\x1b[?2004lghi";
    for (let at = 0; at <= text.length; at++) {
      expect(observe(text.slice(0, at), text.slice(at))).toBe("\x1b[?1049l\x1b[0m");
    }
    expect(observe(...text)).toBe("\x1b[?1049l\x1b[0m");
  });
});
