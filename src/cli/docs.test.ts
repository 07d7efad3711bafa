import { expect, test } from "bun:test";
import { join } from "node:path";
import { renderCliPage } from "../../scripts/cli-doc.ts";
import { COMMANDS } from "./commands.ts";

test("docs/cli.md is the page of the commands there are", async () => {
  const path = join(import.meta.dir, "../../docs/cli.md");
  const page = renderCliPage();
  for (const command of COMMANDS) expect(page).toContain(`### ${command.name}\n`);
  if (process.env.AENV_UPDATE_DOCS === "1") await Bun.write(path, page);
  const current = (await Bun.file(path).text()) === page;
  expect(current ? "current" : "run AENV_UPDATE_DOCS=1 bun test src/cli/docs.test.ts").toBe("current");
});
