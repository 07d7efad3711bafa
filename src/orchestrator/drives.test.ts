import { expect, test } from "bun:test";
import { plannedDrives } from "./drives.ts";
import type { AttachedDriveRequest } from "./types.ts";

const drive = (changes: Partial<AttachedDriveRequest>): AttachedDriveRequest => ({
  driveId: "data",
  image: "debian:12",
  readOnly: true,
  ...changes,
});

test("defaults are filled in, and paths are written in one way", () => {
  expect(plannedDrives([drive({})])).toEqual([{ ...drive({}), mountPath: "/mnt/data" }]);
  const [odd, inside] = plannedDrives([
    drive({ mountPath: "//srv//a/", subPath: "b/c" }),
    drive({ driveId: "b", mountPath: "/srv/a/b" }),
  ]);
  expect([odd?.mountPath, odd?.subPath, inside?.mountPath]).toEqual(["/srv/a", "b/c", "/srv/a/b"]);
  // Names that only begin like a system directory.
  expect(plannedDrives([drive({ mountPath: "/running" })])[0]?.mountPath).toBe("/running");
  expect(plannedDrives([drive({ mountPath: "/opt/a..b" })])[0]?.mountPath).toBe("/opt/a..b");
});

for (const [what, drives] of Object.entries({
  "a blank id": [drive({ driveId: " " })],
  "a slash in the id": [drive({ driveId: "a/b" })],
  "the root disk's id": [drive({ driveId: "rootfs" })],
  "the same id twice": [drive({}), drive({ mountPath: "/b" })],
  "an id that makes no path": [drive({ driveId: "a b" })],
  "a relative path": [drive({ mountPath: "srv" })],
  "the root": [drive({ mountPath: "//" })],
  "white space": [drive({ mountPath: "/a\tb" })],
  "a comma": [drive({ mountPath: "/a,b" })],
  "a colon": [drive({ mountPath: "/a:b" })],
  "a quotation mark": [drive({ mountPath: '/a"b' })],
  "letters beyond ASCII": [drive({ mountPath: "/données" })],
  "a control character": [drive({ mountPath: "/a\u007fb" })],
  "the parent directory": [drive({ mountPath: "/a/../proc" })],
  "a system directory": [drive({ mountPath: "/proc" })],
  "a place in a system directory": [drive({ mountPath: "/run/x" })],
  "an ancestor of one": [drive({ mountPath: "/opt" })],
  "the same path twice": [drive({ mountPath: "/a" }), drive({ driveId: "b", mountPath: "/a/" })],
  "an empty sub path": [drive({ subPath: "" })],
  "an absolute sub path": [drive({ subPath: "/etc" })],
  "a sub path upwards": [drive({ subPath: "a/../../b" })],
  "a sub path with a comma": [drive({ subPath: "a,vdz" })],
  "a sub path with a quotation mark": [drive({ subPath: 'a"' })],
  "a sub path beyond ASCII": [drive({ subPath: "ä" })],
  "an id that makes a path beyond ASCII": [drive({ driveId: "ü" })],
  "too many": Array.from({ length: 25 }, (_, i) => drive({ driveId: `d${i}` })),
})) {
  test(`refused by name: ${what}`, () => {
    expect(() => plannedDrives(drives)).toThrow(
      expect.objectContaining({ code: "invalid_drive", status: 400 }),
    );
  });
}
