import { AenvError } from "../lib/errors.ts";
import type { AttachedDriveRequest } from "./types.ts";

/** `/dev/vdb` to `/dev/vdy`; a VMM may have room for fewer. */
export const MAX_ATTACHED_DRIVES = 24;

const RESERVED_IDS = new Set(["rootfs", "user_rootfs"]);
/** Where the guest's system lives. */
const SYSTEM_PATHS = ["/proc", "/sys", "/dev", "/run", "/agentenv", "/opt/agentenv"];
/**
 * All but printable ASCII, and what has a meaning on the guest's boot line: comma and colon separate drives and their
 * fields, a quotation mark joins words (`next_arg` of Linux's lib/cmdline.c).
 */
const UNFIT = /[^!-~]|[",:]/;
const UNFIT_SAID = 'has white space, a comma, a colon, a ", characters beyond ASCII or dots for a directory';

/** A drive as it will be mounted: every field has its value. */
export interface PlannedDrive extends AttachedDriveRequest {
  readonly mountPath: string;
}

function within(path: string, parent: string): boolean {
  return path === parent || path.startsWith(`${parent}/`);
}

function hasDots(path: string): boolean {
  return path.split("/").some((part) => part === "." || part === "..");
}

/**
 * Fills in defaults and checks a request's drives against each other and the guest. Error `invalid_drive` 400, which
 * names drive and rule.
 */
export function plannedDrives(drives: readonly AttachedDriveRequest[]): PlannedDrive[] {
  if (drives.length > MAX_ATTACHED_DRIVES) {
    throw invalid(`${drives.length} drives were asked for, at most ${MAX_ATTACHED_DRIVES} are possible`);
  }
  const planned: PlannedDrive[] = [];
  for (const drive of drives) {
    const { driveId, subPath } = drive;
    const say = (what: string): AenvError => invalid(`drive ${JSON.stringify(driveId)}: ${what}`);
    if (driveId.trim() === "" || driveId.includes("/")) throw say("driveID must not be blank and has no /");
    if (RESERVED_IDS.has(driveId)) throw say("this driveID is the root disk's");
    if (planned.some((other) => other.driveId === driveId)) throw say("two drives have this driveID");

    const wanted = drive.mountPath ?? `/mnt/${driveId}`;
    // One way to write a path: what is compared is what is mounted.
    const mountPath = wanted.replace(/\/+/g, "/").replace(/(.)\/$/, "$1");
    if (!mountPath.startsWith("/") || mountPath === "/") throw say("mountPath must be absolute and not /");
    if (UNFIT.test(mountPath) || hasDots(mountPath)) {
      throw say(`mountPath ${JSON.stringify(wanted)} ${UNFIT_SAID}`);
    }
    const taken = SYSTEM_PATHS.find((path) => within(mountPath, path) || within(path, mountPath));
    if (taken !== undefined) throw say(`mountPath ${mountPath} is in the way of ${taken}`);
    if (planned.some((other) => other.mountPath === mountPath)) throw say(`two drives are at ${mountPath}`);

    if (subPath !== undefined) {
      if (subPath === "" || subPath.startsWith("/")) throw say("subPath must be relative and not empty");
      if (UNFIT.test(subPath) || hasDots(subPath)) {
        throw say(`subPath ${JSON.stringify(subPath)} ${UNFIT_SAID}`);
      }
    }
    planned.push({ ...drive, mountPath });
  }
  return planned;
}

function invalid(message: string): AenvError {
  return new AenvError({ code: "invalid_drive", status: 400, message: `attachedDrives: ${message}` });
}
