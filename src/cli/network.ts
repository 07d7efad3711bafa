import { Api } from "./api.ts";
import type { Invocation } from "./command.ts";
import { formatTable, formatTime, plainText, print, wantsTable } from "./output.ts";

/** The parts of `GET /sandboxes/{id}/network` that are shown. */
interface NetworkJson {
  readonly slot: {
    readonly index: number;
    readonly hostAddress: string;
    readonly hostDevice: string;
    readonly netnsPath: string;
  };
  readonly node: { readonly deniedCidrs: readonly string[]; readonly dnsServer: string };
  readonly base: "default" | "allow" | "deny";
  readonly allowOut: readonly string[];
  readonly denyOut: readonly string[];
  readonly restricted: boolean;
  readonly filtered: boolean;
  readonly rules: readonly { readonly rule: string; readonly packets: number; readonly bytes: number }[];
  readonly refused: { readonly packets: number; readonly bytes: number };
  readonly openConnections: number;
  readonly connections: { readonly relayed: number; readonly refused: number };
  readonly names: { readonly answered: number; readonly refused: number; readonly failed: number };
  readonly recentRefusals: readonly { readonly at: string; readonly what: string }[];
}

/** The rules in the order they are asked, with what each has done; names have no counters of their own. */
function ruleRows(report: NetworkJson): [string, string | number, string | number][] {
  const counted = new Map(report.rules.map((rule) => [rule.rule, rule]));
  const row = (verb: "allow" | "deny", what: string): [string, string | number, string | number] => {
    const counter = counted.get(`${verb} ${what}`);
    return [`${verb} ${what}`, counter?.packets ?? "-", counter?.bytes ?? "-"];
  };
  const rest = report.restricted ? "deny" : "allow";
  return [
    ...report.node.deniedCidrs.map((cidr) => [`deny ${cidr} (node)`, "-", "-"] as [string, string, string]),
    ...report.allowOut.map((entry) => row("allow", entry)),
    ...report.denyOut.map((entry) => row("deny", entry)),
    [`${rest} everything else`, "-", "-"],
    ["refused in all", report.refused.packets, report.refused.bytes],
  ];
}

function facts({ slot, node, restricted, filtered, ...report }: NetworkJson): [string, string][] {
  const { connections, names, openConnections } = report;
  return [
    ["SLOT", `${slot.index} (${slot.hostAddress}, ${slot.hostDevice})`],
    ["NAMESPACE", slot.netnsPath],
    ["INTERNET ACCESS", report.base === "default" ? "node default (allowed)" : report.base],
    ["DNS", restricted ? "by the node, allowed names only" : node.dnsServer],
    ["HTTP AND TLS", filtered ? "by name, through the egress proxy" : "by address"],
    [
      "BY NAME",
      `${connections.relayed} connections let through, ${connections.refused} refused, ${openConnections} open`,
    ],
    [
      "NAMES ASKED",
      `${names.answered} answered, ${names.refused} refused, ${names.failed} without an answer`,
    ],
  ];
}

/** `aenv network show`: what is in force for a running sandbox's packets, and what that has done. */
export async function networkShow({ args, flags }: Invocation): Promise<number> {
  const api = await Api.open();
  const { body } = await api.request<NetworkJson>(
    "GET",
    `/sandboxes/${encodeURIComponent(args[0]!)}/network`,
  );
  if (!wantsTable(flags.text("output"))) {
    print(JSON.stringify(body, null, 2));
    return 0;
  }
  const rows = facts(body);
  const width = Math.max(...rows.map(([name]) => name.length));
  for (const [name, value] of rows) print(`${name.padEnd(width)}  ${plainText(value)}`);
  process.stdout.write(`\n${formatTable(["RULE", "PACKETS", "BYTES"], ruleRows(body))}`);
  if (body.recentRefusals.length > 0) {
    const refusals = body.recentRefusals.map(({ at, what }) => [formatTime(at), what]);
    process.stdout.write(`\n${formatTable(["REFUSED AT", "WHAT"], refusals)}`);
  }
  return 0;
}
