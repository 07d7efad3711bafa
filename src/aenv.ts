/** The command line alone: for platforms that run no server. Its commands are the executable's own. */
import { cliMain } from "./cli/index.ts";

process.exitCode = await cliMain(process.argv.slice(2));
