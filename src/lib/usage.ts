/** What `parseArgs` of `node:util` found wrong, in one clause; its advice on "--" fits none of our programs. */
export function usageProblem(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text
    .replace(/\. To specify a positional argument .*$/s, "")
    .replace(/\. This command does not .*$/s, "");
}
