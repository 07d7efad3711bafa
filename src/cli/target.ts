import type { AgentTarget } from "./agent.ts";
import type { Api, SandboxJson } from "./api.ts";
import { CliError } from "./command.ts";

/** How the agent of a sandbox is reached. Nothing is resumed for it: a paused sandbox is an error. */
export async function runningTarget(api: Api, sandboxId: string, user?: string): Promise<AgentTarget> {
  const { body } = await api.request<SandboxJson>("GET", `/sandboxes/${encodeURIComponent(sandboxId)}`);
  if (body.state === "paused") {
    throw new CliError(`sandbox ${sandboxId} is paused`, {
      hint: `resume it with: aenv resume ${sandboxId}`,
    });
  }
  const token = body.envdAccessToken;
  return {
    url: api.credentials.url,
    sandboxId: body.sandboxID,
    ...(typeof token === "string" ? { accessToken: token } : {}),
    ...(user === undefined ? {} : { user }),
  };
}
