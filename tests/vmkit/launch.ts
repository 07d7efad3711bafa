/**
 * A server's part in the life of a VM: launches one from a JSON description on standard input, prints its
 * reference and waits to be killed.
 */
import { createLogger } from "../../src/lib/log.ts";
import { createQemuDriver, type QemuDriverOptions, type VmLaunchSpec } from "../../src/vmm/index.ts";

export interface LaunchRequest {
  readonly driver: Omit<QemuDriverOptions, "log">;
  readonly spec: VmLaunchSpec;
}

const request = JSON.parse(await Bun.stdin.text()) as LaunchRequest;
const driver = createQemuDriver({ ...request.driver, log: createLogger("launch") });
const handle = await driver.launch(request.spec);
console.log(JSON.stringify(handle.reference));
await Bun.sleep(600_000);
