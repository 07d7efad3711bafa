/** Runs Python in a sandbox with the unmodified e2b client, pauses and resumes it, and checks what it sees. */
import { Sandbox } from "e2b";

const template = process.argv[2] ?? "quickstart";
const started = performance.now();
const step = (text: string) =>
  console.log(`      ${((performance.now() - started) / 1000).toFixed(1).padStart(5)} s  ${text}`);

const PROGRAM = `
import os, platform, sys
print("Hello from Python", platform.python_version(), "in a microVM of its own")
print("kernel", platform.release(), "| cpus", os.cpu_count(), "| user", os.getuid())
print("sum of squares below 1000:", sum(i * i for i in range(1000)))
`;

const COUNTER = `
import time
n = 0
while True:
    n += 1
    with open("/tmp/counter", "w") as f:
        f.write(str(n))
    time.sleep(0.1)
`;

const sandbox = await Sandbox.create(template, { timeoutMs: 300_000 });
step(`sandbox ${sandbox.sandboxId} started from the snapshot`);
try {
  await sandbox.files.write("/tmp/program.py", PROGRAM);
  const result = await sandbox.commands.run("python3 /tmp/program.py");
  step("python3 /tmp/program.py printed:");
  for (const line of result.stdout.trimEnd().split("\n")) console.log(`               | ${line}`);
  if (result.exitCode !== 0) throw new Error(`Python ended with ${result.exitCode}: ${result.stderr}`);

  await sandbox.files.write("/tmp/counter.py", COUNTER);
  const counter = await sandbox.commands.run("exec python3 /tmp/counter.py", {
    background: true,
    timeoutMs: 0,
  });
  const read = async () => Number(await sandbox.files.read("/tmp/counter"));
  const advance = async (from: number) => {
    for (let i = 0; i < 100; i++) {
      const value = await sandbox.files.exists("/tmp/counter").then((there) => (there ? read() : 0));
      if (value > from) return value;
      await Bun.sleep(200);
    }
    throw new Error("the counting process does not count");
  };
  const before = await advance(2);
  step(`a Python process (pid ${counter.pid}) counts: ${before}`);

  await sandbox.pause();
  step("paused: memory and disk are on the host's disk, no VM runs");
  const resumed = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 300_000 });
  const processes = await resumed.commands.list();
  if (!processes.some((process) => process.pid === counter.pid))
    throw new Error("the counting process is gone");
  const after = await advance(before);
  step(`resumed: the same process (pid ${counter.pid}) goes on counting: ${before} -> ${after}`);
} finally {
  await Sandbox.kill(sandbox.sandboxId);
  step("sandbox deleted");
}
