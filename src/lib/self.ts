/** Command line that runs another program of this executable (works from the sources, too). */
export function selfCommand(...args: string[]): string[] {
  return Bun.isStandaloneExecutable ? [process.execPath, ...args] : [process.execPath, Bun.main, ...args];
}
