import { describe, expect, test } from "bun:test";
import { release } from "node:os";
import { chooseExport, probeUblk } from "./disk-export.ts";

const here = { controlDevice: "/dev/null" };
/** A shell in the daemon's place; what it is called with is the probe's flag. */
const acting = (script: string) => ["sh", "-c", script];

describe("the probe of ublk", () => {
  test("without the kernel's control device says which module is missing", async () => {
    const verdict = await probeUblk(acting("exit 9"), { controlDevice: "/nonexistent/ublk-control" });
    expect(verdict).toMatchObject({ usable: false, reason: "there is no /nonexistent/ublk-control" });
    expect(verdict.cure).toContain("modprobe ublk_drv");
  });

  test("passes on what its process found", async () => {
    const found = { usable: true, reason: "works" };
    expect(await probeUblk(acting(`echo '${JSON.stringify(found)}'`), here)).toEqual(found);
  });

  test("FR-95: gives up on a kernel that never answers, names it, and leaves no process that can be ended", async () => {
    const verdict = await probeUblk(acting("echo $$ > /dev/null; sleep 600"), { ...here, timeoutMs: 100 });
    expect(verdict.usable).toBe(false);
    expect(verdict.reason).toContain(`Linux ${release()}`);
    expect(verdict.cure).toContain("nbd");
  });

  test("tells of one that dies or talks rubbish", async () => {
    expect(await probeUblk(acting("exit 3"), here)).toMatchObject({
      usable: false,
      reason: expect.stringContaining("(3)"),
    });
    expect(await probeUblk(acting("echo no"), here)).toMatchObject({
      usable: false,
      reason: expect.stringContaining("without an answer"),
    });
    expect(await probeUblk(["/nonexistent/agentenv"], here)).toMatchObject({
      usable: false,
      reason: expect.stringContaining("cannot be started"),
    });
  });
});

describe("the choice of export", () => {
  const usable = async () => ({ usable: true, reason: "works" });
  const unusable = async () => ({ usable: false, reason: "no module", cure: "load it" });

  test("auto takes ublk where it works, else NBD with the reason", async () => {
    expect(await chooseExport("auto", usable)).toEqual({ kind: "ublk", reason: "works" });
    expect(await chooseExport("auto", unusable)).toEqual({
      kind: "nbd",
      reason: "ublk cannot be used: no module",
      cure: "load it",
    });
  });

  test("nbd does not ask", async () => {
    const never = () => Promise.reject(new Error("asked"));
    expect(await chooseExport("nbd", never)).toMatchObject({ kind: "nbd" });
  });

  test("ublk where it does not work is refused with the cure", async () => {
    await expect(chooseExport("ublk", unusable)).rejects.toMatchObject({
      code: "ublk_unusable",
      message: expect.stringContaining("no module"),
      remediation: "load it",
    });
  });
});
