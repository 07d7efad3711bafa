/**
 * The one entry of the one executable: picks a program by the name it was called under or the first
 * argument, and loads only that program's modules. Workers start here, too.
 */
import { basename } from "node:path";
import { workerData } from "node:worker_threads";
import { withSystemDirectories } from "./lib/command.ts";

interface WorkerRole {
  readonly role: "blockd-worker";
}

async function runWorker(data: WorkerRole): Promise<void> {
  switch (data.role) {
    case "blockd-worker": {
      const { workerMain } = await import("./storage/blockd/index.ts");
      await workerMain();
      return;
    }
  }
}

async function runProgram(argv: string[]): Promise<number> {
  const [name, ...rest] = argv;
  switch (name) {
    case "serve": {
      const { serveMain } = await import("./server.ts");
      return serveMain(rest);
    }
    case "blockd": {
      const { blockdMain } = await import("./storage/blockd/index.ts");
      return blockdMain(rest);
    }
    case "merge-layers": {
      const { mergeLayersMain } = await import("./sandbox/index.ts");
      return mergeLayersMain();
    }
    case "layer": {
      const { layerMain } = await import("./storage/overlaybd/index.ts");
      return layerMain(rest, undefined, undefined, {
        applyLayer: async (job) => (await import("./image/index.ts")).applyLayer(job),
      });
    }
    case "setup": {
      const { setupMain } = await import("./setup/index.ts");
      return setupMain(rest);
    }
    case "config": {
      const { configMain } = await import("./config/index.ts");
      return configMain(rest);
    }
    case "doctor": {
      // Called as `aenv` it looks at the way to a server instead: the default below.
      if (basename(process.argv0) === "aenv") break;
      const { doctorMain } = await import("./setup/index.ts");
      return doctorMain(rest);
    }
  }
  const { cliMain } = await import("./cli/index.ts");
  return cliMain(argv);
}

if (Bun.isMainThread) {
  process.env.PATH = withSystemDirectories(process.env.PATH);
  process.exitCode = await runProgram(process.argv.slice(2));
} else {
  await runWorker(workerData as WorkerRole);
}
