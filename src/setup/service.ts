import environmentText from "../../deploy/systemd/aenv.default" with { type: "text" };
import unitText from "../../deploy/systemd/aenv.service" with { type: "text" };

export const PRINTABLE = ["unit", "environment"] as const;

/**
 * The systemd unit or its environment file, as installed: this executable and the given account put in.
 * `executable` is an absolute path.
 */
export function serviceFile(
  which: (typeof PRINTABLE)[number],
  { executable, user, group }: { readonly executable: string; readonly user: string; readonly group: string },
): string {
  if (which === "environment") return environmentText;
  return unitText
    .replace(/^ExecStart=\S+/m, () => `ExecStart=${executable}`)
    .replace(/^User=.*$/m, () => `User=${user}`)
    .replace(/^Group=.*$/m, () => `Group=${group}`);
}
