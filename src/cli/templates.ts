import { Api, type TemplateJson } from "./api.ts";
import type { Invocation } from "./command.ts";
import { formatTable, formatTime, print, printJson, wantsTable } from "./output.ts";

/** `aenv template list`. */
export async function templateList({ flags }: Invocation): Promise<number> {
  const api = await Api.open();
  const items = await api.list<TemplateJson>("/v2/templates");
  if (!wantsTable(flags.text("output"))) {
    printJson(items);
    return 0;
  }
  const rows = items.map((item) => [
    (item.names ?? item.aliases ?? []).join(", "),
    item.templateID,
    item.buildStatus,
    item.cpuCount,
    item.memoryMB,
    item.diskSizeMB,
    formatTime(item.updatedAt),
  ]);
  process.stdout.write(
    formatTable(["NAME", "TEMPLATE ID", "STATUS", "CPU", "MEM (MiB)", "DISK (MiB)", "UPDATED"], rows),
  );
  return 0;
}

/** `aenv template delete`; takes snapshots, too. */
export async function templateDelete({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  const id = await api.templateId(args[0]!);
  await api.request("DELETE", `/templates/${encodeURIComponent(id)}`);
  print(`Deleted template ${id}`);
  return 0;
}
