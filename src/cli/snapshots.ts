import { Api, type SnapshotJson, START_TIMEOUT_MS } from "./api.ts";
import type { Invocation } from "./command.ts";
import { formatTable, print, printJson, wantsTable } from "./output.ts";

/** `aenv snapshot create`. */
export async function snapshotCreate({ args, flags }: Invocation): Promise<number> {
  const name = flags.text("name");
  const api = await Api.open();
  const { body } = await api.request<SnapshotJson>(
    "POST",
    `/sandboxes/${encodeURIComponent(args[0]!)}/snapshots`,
    { body: name === undefined ? {} : { name }, timeoutMs: START_TIMEOUT_MS },
  );
  print(`Created snapshot ${body.snapshotID}`);
  if (body.imageRef !== undefined) print(`Image: ${body.imageRef}`);
  return 0;
}

/** `aenv snapshot list`. */
export async function snapshotList({ flags }: Invocation): Promise<number> {
  const sandbox = flags.text("sandbox-id");
  const api = await Api.open();
  const query = sandbox === undefined ? "" : `?sandboxID=${encodeURIComponent(sandbox)}`;
  const items = await api.list<SnapshotJson>(`/snapshots${query}`);
  if (!wantsTable(flags.text("output"))) {
    printJson(items);
    return 0;
  }
  const rows = items.map((item) => [item.snapshotID, (item.names ?? []).join(","), item.imageRef]);
  process.stdout.write(formatTable(["SNAPSHOT ID", "NAMES", "IMAGE REF"], rows));
  return 0;
}

/** `aenv snapshot delete`: by id, or by a name that a snapshot has. */
export async function snapshotDelete({ args, usageError }: Invocation): Promise<number> {
  const name = args[0]!;
  if (/^\.+$/.test(name)) throw usageError(`"${name}" is no snapshot name`);
  const api = await Api.open();
  const { body } = await api.request<SnapshotJson>("GET", `/snapshots/${encodeURIComponent(name)}`);
  await api.request("DELETE", `/templates/${encodeURIComponent(body.snapshotID)}`);
  print(`Deleted snapshot ${body.snapshotID}`);
  return 0;
}
