/**
 * A host on "the internet": a namespace of the test's own, joined to this machine by a veth pair, with a
 * TCP server that greets. Its address is from a range that nobody routes and no default rule denies.
 */
export class OutsideHost implements AsyncDisposable {
  readonly address: string;
  readonly port = 7777;
  readonly #name: string;
  readonly #server: Bun.Subprocess;

  private constructor(name: string, address: string, server: Bun.Subprocess) {
    this.#name = name;
    this.address = address;
    this.#server = server;
  }

  static async create(): Promise<OutsideHost> {
    const number = 1 + Math.floor(Math.random() * 250);
    const name = `aenv-out-${number}`;
    // 198.18.0.0/15 is set aside for tests of networks (RFC 2544).
    const address = `198.19.${number}.2`;
    const ip = async (...words: string[]) => {
      const child = Bun.spawn(["ip", ...words], { stdout: "ignore", stderr: "pipe" });
      if ((await child.exited) !== 0) {
        throw new Error(`ip ${words.join(" ")}: ${await new Response(child.stderr).text()}`);
      }
    };
    await ip("netns", "add", name);
    try {
      await ip("link", "add", `aout${number}`, "type", "veth", "peer", "name", "eth0", "netns", name);
      await ip("addr", "add", `198.19.${number}.1/30`, "dev", `aout${number}`);
      await ip("link", "set", `aout${number}`, "up");
      await ip("-n", name, "addr", "add", `${address}/30`, "dev", "eth0");
      await ip("-n", name, "link", "set", "eth0", "up");
      await ip("-n", name, "link", "set", "lo", "up");
      await ip("-n", name, "route", "add", "default", "via", `198.19.${number}.1`);
    } catch (error) {
      await ip("netns", "del", name);
      throw error;
    }
    const program = `Bun.listen({ hostname: "0.0.0.0", port: 7777, socket: { open(s) { s.end("welcome"); }, data() {} } }); console.log("up")`;
    const server = Bun.spawn(["ip", "netns", "exec", name, process.execPath, "-e", program], {
      stdin: "ignore",
      stdout: "pipe",
      stderr: "inherit",
    });
    // One line when it listens.
    await server.stdout.getReader().read();
    return new OutsideHost(name, address, server);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.kill();
    await this.#server.exited;
    await Bun.spawn(["ip", "netns", "del", this.#name]).exited;
  }
}
