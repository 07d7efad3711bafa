import { runCommand, tryCommand } from "../lib/command.ts";
import type { Logger } from "../lib/log.ts";

/**
 * In the kernel's packet filter a drop is final: where another program's chain drops what it does not know
 * (docker FORWARD, ufw FORWARD and INPUT, firewalld both), our own rules cannot let a guest's packets through.
 *
 * In the table `ip filter`, which many programs share, each chain that drops by default gets rules that let
 * packets of our devices through; what guests may do is for our own table to say, which has its hook there,
 * too. Docker leaves a chain of its own to the administrator, DOCKER-USER, and looks into it first: where it
 * is there, ours go there instead of FORWARD. They carry our table's name as a comment, by which they are
 * found and removed. Nothing else of other people's rules is touched.
 *
 * firewalld makes its table anew at every reload: there only the administrator can do it, and is told how.
 */
const DOCKER_CHAIN = "DOCKER-USER";
const CHAINS = [DOCKER_CHAIN, "FORWARD", "INPUT"] as const;
type Chain = (typeof CHAINS)[number];

/** Host ends of all slots, in the words of iptables. */
const DEVICES = "veth-+";

async function ownRules(chain: Chain, tag: string): Promise<string[][]> {
  const { exitCode, stdout } = await tryCommand(["iptables", "-w", "5", "-S", chain]);
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

interface HostFirewall {
  /** Chains of `ip filter` that are there; none without the program that changes them. */
  readonly chains: readonly Chain[];
  readonly forwardDrops: boolean;
  readonly inputDrops: boolean;
  readonly firewalld: boolean;
}

/** Asked by nft: iptables would make its tables by being asked. */
async function lookAtHost(): Promise<HostFirewall> {
  const { exitCode, stdout } = await tryCommand(["nft", "list", "chains"]);
  const listing = exitCode === 0 ? stdout : "";
  const drops = (chain: Chain) => /policy drop/.test(chainDeclaration(listing, chain) ?? "");
  return {
    chains:
      Bun.which("iptables") === null
        ? []
        : CHAINS.filter((chain) => chainDeclaration(listing, chain) !== undefined),
    forwardDrops: drops("FORWARD"),
    inputDrops: drops("INPUT"),
    firewalld: /^table inet firewalld \{/m.test(listing),
  };
}

async function removeOwnRules(chains: readonly Chain[], tag: string): Promise<void> {
  for (const chain of chains) {
    for (const [, ...rule] of await ownRules(chain, tag))
      await runCommand(["iptables", "-w", "5", "-D", ...rule]);
  }
}

/** Removes our rules from the chains of others, if there are any. */
export async function closeHostFirewall(tag: string): Promise<void> {
  await removeOwnRules((await lookAtHost()).chains, tag);
}

/**
 * Lets the pool's guests through what drops by default; where that is for the administrator to do, the log
 * says how. Rules of an earlier process with this tag go first. Resolves with the number of rules added.
 */
export async function openHostFirewall(pool: string, tag: string, log: Logger): Promise<number> {
  const host = await lookAtHost();
  await removeOwnRules(host.chains, tag);
  if (host.firewalld) await checkFirewalld(pool, log);
  if (!host.forwardDrops && !host.inputDrops) return 0;
  if (host.chains.length === 0) {
    log.warn(
      "the host's FORWARD or INPUT chain drops by default and iptables is not installed: guests have no internet, " +
        "or none by name; install iptables, or accept what comes from and established what goes to veth-*",
    );
    return 0;
  }
  const established = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"];
  const forward: Chain = host.chains.includes(DOCKER_CHAIN) ? DOCKER_CHAIN : "FORWARD";
  const rules: [Chain, string[]][] = [
    ...(host.forwardDrops
      ? ([
          [forward, ["-i", DEVICES, "-s", pool]],
          [forward, ["-o", DEVICES, "-d", pool, ...established]],
        ] as [Chain, string[]][])
      : []),
    // The node's own two servers for guests, and a DNS server on the host.
    ...(host.inputDrops ? ([["INPUT", ["-i", DEVICES, "-s", pool]]] as [Chain, string[]][]) : []),
  ];
  for (const [chain, rule] of rules) {
    const end = ["-m", "comment", "--comment", tag, "-j", "ACCEPT"];
    await runCommand(["iptables", "-w", "5", "-I", chain, ...rule, ...end]);
  }
  log.info(
    { pool, chains: [...new Set(rules.map(([chain]) => chain))] },
    "the host's firewall drops by default: rules at the head of these chains let our guests through",
  );
  return rules.length;
}

async function checkFirewalld(pool: string, log: Logger): Promise<void> {
  const { stdout } = await tryCommand(["nft", "list", "table", "inet", "firewalld"]);
  const zoned = stdout
    .split("\n")
    .some(
      (line) => /iifname "veth-\*"|ip saddr /.test(line) && (line.includes("veth-*") || line.includes(pool)),
    );
  if (zoned) return;
  log.warn(
    "firewalld rejects what it does not know: guests have no internet until it trusts our devices: " +
      "firewall-cmd --permanent --zone=trusted --add-interface=veth-+ && firewall-cmd --reload",
  );
}
