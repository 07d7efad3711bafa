import { runCommand, tryCommand } from "../lib/command.ts";
import type { Logger } from "../lib/log.ts";

/**
 * In the kernel's packet filter a drop is final, and docker makes the host's FORWARD chain drop what is not
 * its own: our own rules cannot let a guest's packets through there. Docker leaves one chain to the
 * administrator for this, DOCKER-USER, looks into it first and does not touch it. That chain, and nothing
 * else of other people's rules, gets two rules that let our pool through (what guests may do is for our own
 * table to say). They carry our table's name as a comment, by which they are found and removed.
 */
const CHAIN = "DOCKER-USER";

async function ownRules(tag: string): Promise<string[][]> {
  const { exitCode, stdout } = await tryCommand(["iptables", "-w", "5", "-S", CHAIN]);
  if (exitCode !== 0) return [];
  return stdout
    .split("\n")
    .map((line) => line.replaceAll('"', "").trim().split(/\s+/))
    .filter((words) => words[0] === "-A" && words[words.indexOf("--comment") + 1] === tag);
}

/** The declarations of one chain of `table ip filter` in what `nft list chains` prints; rules are not in it. */
function chainDeclaration(listing: string, chain: string): string | undefined {
  const table = /^table ip filter \{\n([\s\S]*?)^\}/m.exec(listing)?.[1];
  return new RegExp(`^\\tchain ${chain} \\{\\n([\\s\\S]*?)^\\t\\}`, "m").exec(table ?? "")?.[1];
}

/** Asked by nft: iptables would make its tables by being asked. */
async function filterChains(): Promise<{ forwardDrops: boolean; docker: boolean }> {
  const { exitCode, stdout } = await tryCommand(["nft", "list", "chains", "ip"]);
  const listing = exitCode === 0 ? stdout : "";
  return {
    forwardDrops: /policy drop/.test(chainDeclaration(listing, "FORWARD") ?? ""),
    docker: chainDeclaration(listing, CHAIN) !== undefined && Bun.which("iptables") !== null,
  };
}

async function removeOwnRules(tag: string): Promise<void> {
  for (const [, ...rule] of await ownRules(tag)) await runCommand(["iptables", "-w", "5", "-D", ...rule]);
}

/** Removes our rules from docker's chain, if there are any. */
export async function closeDockerForward(tag: string): Promise<void> {
  if ((await filterChains()).docker) await removeOwnRules(tag);
}

/**
 * Lets the pool through a FORWARD chain that drops by default: by docker's chain when it is there, otherwise
 * the log says what to do. True: rules were added.
 */
export async function openDockerForward(pool: string, tag: string, log: Logger): Promise<boolean> {
  const { forwardDrops, docker } = await filterChains();
  if (docker) await removeOwnRules(tag);
  if (!forwardDrops) return false;
  if (!docker) {
    log.warn(
      "the host's FORWARD chain drops by default: guests have no internet until it accepts our pool, e.g. " +
        `iptables -I FORWARD -s ${pool} -j ACCEPT and ` +
        `iptables -I FORWARD -d ${pool} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT`,
    );
    return false;
  }
  const end = ["-m", "comment", "--comment", tag, "-j", "ACCEPT"];
  const insert = ["iptables", "-w", "5", "-I", CHAIN];
  await runCommand([...insert, "-s", pool, ...end]);
  await runCommand([...insert, "-d", pool, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", ...end]);
  log.info(
    { pool },
    "docker drops what is forwarded: two rules in its DOCKER-USER chain let our guests through",
  );
  return true;
}
