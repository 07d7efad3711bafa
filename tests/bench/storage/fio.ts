/** fio in the same run, as the measure of what the host can do. */
export interface FioResult {
  readonly iops: number;
  readonly mibPerSecond: number;
  /** Processor time of all its threads per operation, in microseconds. */
  readonly cpuUs: number;
  readonly operations: number;
}

interface FioJob {
  readonly read: { readonly total_ios: number; readonly iops: number; readonly bw_bytes: number };
  readonly write: { readonly total_ios: number; readonly iops: number; readonly bw_bytes: number };
  readonly usr_cpu: number;
  readonly sys_cpu: number;
  readonly job_runtime: number;
  readonly error: number;
}

/** Runs one job; `options` as on its command line, without dashes. Statistics that cost time are off. */
export async function fio(options: Readonly<Record<string, string | number>>): Promise<FioResult> {
  const all: Record<string, string | number> = {
    name: "bench",
    ioengine: "io_uring",
    iodepth: 32,
    norandommap: 0,
    randrepeat: 0,
    gtod_reduce: 1,
    thread: 1,
    ...options,
  };
  const argv = Object.entries(all).map(([key, value]) => `--${key}=${value}`);
  const child = Bun.spawn(["fio", "--output-format=json", ...argv], {
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [text, errors, code] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  if (code !== 0) throw new Error(`fio ${argv.join(" ")}: ${errors || text}`);
  const { jobs } = JSON.parse(text.slice(text.indexOf("{"))) as { jobs: FioJob[] };
  const job = jobs[0]!;
  if (job.error !== 0) throw new Error(`fio: error ${job.error}`);
  const side = job.read.total_ios > 0 ? job.read : job.write;
  const cpuMs = ((job.usr_cpu + job.sys_cpu) / 100) * job.job_runtime;
  return {
    iops: side.iops,
    mibPerSecond: side.bw_bytes / 2 ** 20,
    cpuUs: (cpuMs * 1000) / side.total_ios,
    operations: side.total_ios,
  };
}
