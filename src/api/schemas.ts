import { z } from "zod";
import { MAX_POLICY_ENTRIES } from "../network/index.ts";

/** Named schemas become `components.schemas` of the OpenAPI document. */
export const named = z.registry<{ id: string; description?: string }>();

function component<Schema extends z.ZodType>(id: string, schema: Schema): Schema {
  named.add(schema, { id });
  return schema;
}

const int32 = z.int().max(2_147_483_647);

/** Seconds to live. Zero would kill at once: DELETE says that better. */
export const TimeoutSeconds = int32.min(1).describe("Seconds to live, counted from now");

const StringMap = z.record(z.string(), z.string());

/** What a process can have in its environment: `execve` takes `NAME=VALUE` texts that end with a NUL. */
const EnvVars = z.record(
  z.string().regex(/^[^=\0]+$/, "a variable's name is not empty and has neither = nor NUL in it"),
  z.string().regex(/^[^\0]*$/, "a variable's value has no NUL in it"),
);

export const ErrorBody = component(
  "Error",
  z.object({
    code: z.int().describe("The HTTP status"),
    message: z.string(),
    error_code: z.string().optional().describe("Stable machine-readable name of the error"),
    cause: z.array(z.string()).optional().describe("What led to it, outermost first"),
    remediation: z.string().optional().describe("What the caller can do"),
  }),
);

export const NetworkConfig = component(
  "NetworkConfig",
  z.looseObject({
    allowPublicTraffic: z.boolean().optional().describe("false: application ports need the traffic token"),
    allowOut: z
      .array(z.string().min(1))
      .max(MAX_POLICY_ENTRIES)
      .optional()
      .describe("Address, CIDR or domain; wins over denyOut"),
    denyOut: z.array(z.string().min(1)).max(MAX_POLICY_ENTRIES).optional().describe("Address or CIDR"),
    maskRequestHost: z
      .string()
      .max(300)
      .regex(/^[A-Za-z0-9._:[\]${}-]+$/, "must be a host, with a port or $" + "{PORT} where wanted")
      .optional()
      .describe("Host header the service sees; the text $" + "{PORT} is replaced"),
  }),
);

const AutoResume = z.strictObject({ enabled: z.boolean() });

/*
 * Who creates a sandbox relies on every wish it names: a field that is not known is an error, never dropped.
 * Elsewhere unknown fields are ignored, and named in the answer.
 */
const anyCreateFields = {
  autoResume: AutoResume.optional(),
  network: NetworkConfig.optional(),
  metadata: StringMap.optional(),
  envVars: EnvVars.optional(),
  customExtensionParams: z.record(z.string(), z.unknown()).optional(),
  volumeMounts: z.array(z.object({ name: z.string(), path: z.string() })).optional(),
};

const createFields = {
  ...anyCreateFields,
  templateID: z.string().min(1).max(256),
  allow_internet_access: z.boolean().optional(),
  mcp: z.union([z.record(z.string(), z.unknown()), z.null()]).optional(),
  autoPauseMemory: z
    .boolean()
    .optional()
    .describe("false: a pause at the deadline keeps the disks alone; needs autoPause and no autoResume"),
  iam: z.strictObject({ tokens: z.record(z.string(), z.unknown()).optional() }).optional(),
};

const autoPauseV1 = z.boolean().default(true).describe("Pause at the deadline instead of killing");
const secureV1 = z.boolean().default(false).describe("The guest agent needs the sandbox's access token");
const timeoutV1 = TimeoutSeconds.optional().describe("Default: the server's, 15 unless configured otherwise");

export const NewSandbox = component(
  "NewSandbox",
  z.strictObject({ ...createFields, timeout: timeoutV1, autoPause: autoPauseV1, secure: secureV1 }),
);

export const NewSandboxV2 = component(
  "NewSandboxV2",
  z.strictObject({
    ...createFields,
    timeout: TimeoutSeconds.default(300),
    autoPause: z.boolean().default(false),
  }),
);

/** The largest multiple below 16 TiB: disks are made with fewer than 2^32 blocks of 4 KiB. */
const MAX_DISK_SIZE_MB = 16_776_192;
const DiskSizeMB = z.int().min(1024).max(MAX_DISK_SIZE_MB).multipleOf(1024);

export const AttachedDrive = component(
  "AttachedDrive",
  z.strictObject({
    driveID: z.string().min(1).max(64).describe("Unique in the request, no `/`"),
    source: z.strictObject({ image: z.string().min(1).max(512).describe("OCI reference") }),
    readOnly: z.boolean().default(true),
    mountPath: z.string().max(256).optional().describe("Absolute; default: `/mnt/` and the driveID"),
    subPath: z
      .string()
      .max(256)
      .optional()
      .describe("Relative; only that directory of the drive is at mountPath"),
    diskSizeMB: DiskSizeMB.optional().describe("Like the root disk's"),
  }),
);

export const NewColdSandbox = component(
  "NewColdSandbox",
  z.strictObject({
    ...anyCreateFields,
    image: z.string().min(1).max(512).describe("OCI reference; converted at its first use"),
    timeout: timeoutV1,
    autoPause: autoPauseV1,
    secure: secureV1,
    allowInternetAccess: z.boolean().optional(),
    cpuCount: z.int().min(1).max(1024).optional().describe("Default: the server's"),
    memoryMB: z.int().min(128).max(4_194_304).optional().describe("Default: the server's"),
    diskSizeMB: DiskSizeMB.optional().describe(
      "A multiple of 1024; default: the server's. Smaller than that only where it is allowed",
    ),
    attachedDrives: z
      .array(AttachedDrive)
      .max(24)
      .optional()
      .describe("Further disks, mounted by the guest; part of what pause, fork and snapshot capture"),
    extraBootArgs: z
      .string()
      .max(2048)
      .optional()
      .describe("Words for the kernel's command line; those the server does not allow are left out"),
  }),
);

export const Sandbox = component(
  "Sandbox",
  z.object({
    templateID: z.string(),
    sandboxID: z.string(),
    clientID: z.literal(""),
    envdVersion: z.string(),
    alias: z.string().optional(),
    envdAccessToken: z.string().optional(),
    trafficAccessToken: z.string().nullable(),
    domain: z.string().nullable(),
  }),
);

const listedFields = {
  templateID: z.string(),
  sandboxID: z.string(),
  clientID: z.literal(""),
  envdVersion: z.string(),
  alias: z.string().optional(),
  startedAt: z.iso.datetime(),
  endAt: z.iso.datetime(),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int(),
  state: z.enum(["running", "paused"]),
  metadata: StringMap.optional(),
};

export const ListedSandbox = component("ListedSandbox", z.object(listedFields));

export const SandboxDetail = component(
  "SandboxDetail",
  z.object({
    ...listedFields,
    envdAccessToken: z.string().optional(),
    domain: z.string().nullable(),
    allowInternetAccess: z.boolean().nullable(),
    network: NetworkConfig.optional(),
    lifecycle: z.object({ autoResume: z.boolean(), onTimeout: z.enum(["kill", "pause"]) }),
    unresponsiveSince: z.iso
      .datetime()
      .optional()
      .describe("Since when the guest's agent has not answered; absent while it does"),
  }),
);

export const NetworkUpdate = component(
  "NetworkUpdate",
  z.looseObject({
    allowOut: z.array(z.string().min(1)).max(MAX_POLICY_ENTRIES).optional(),
    denyOut: z.array(z.string().min(1)).max(MAX_POLICY_ENTRIES).optional(),
    allow_internet_access: z.boolean().optional(),
  }),
);

const PacketCount = z.object({ packets: z.int(), bytes: z.int() });

export const NetworkReport = component(
  "NetworkReport",
  z.object({
    slot: z.object({
      index: z.int(),
      hostAddress: z.string().describe("The sandbox's address on the host; every port of it is there"),
      hostDevice: z.string(),
      netnsPath: z.string().describe("Its network namespace, for nsenter --net="),
    }),
    node: z.object({
      deniedCidrs: z.array(z.string()).describe("What no sandbox of this node reaches, whatever its rules"),
      dnsServer: z.string(),
    }),
    base: z.enum(["default", "allow", "deny"]).describe("What happens to what no rule names"),
    allowOut: z.array(z.string()).describe("In normal form; wins over denyOut"),
    denyOut: z.array(z.string()),
    restricted: z.boolean().describe("What is not named is refused, and DNS answers allowed names only"),
    filtered: z.boolean().describe("HTTP and TLS go through the node's egress proxy"),
    rules: z
      .array(z.object({ rule: z.string(), packets: z.int(), bytes: z.int() }))
      .describe("First packets of connections, by address rule"),
    refused: PacketCount.describe("Packets refused since the last change of the rules"),
    openConnections: z.int().describe("Connections through the egress proxy at this moment"),
    connections: z
      .object({ relayed: z.int(), refused: z.int() })
      .describe("Through the egress proxy since the sandbox was started or resumed"),
    names: z
      .object({ answered: z.int(), refused: z.int(), failed: z.int() })
      .describe("Questions to the node's name server, which restricted sandboxes have"),
    recentRefusals: z
      .array(z.object({ at: z.iso.datetime(), what: z.string() }))
      .describe("The last ones by name, oldest first"),
  }),
);

export const PauseRequest = component(
  "PauseRequest",
  z.object({
    memory: z
      .boolean()
      .optional()
      .describe("false: the disks alone are kept; what runs ends, and a resume boots. Default: true"),
  }),
);
const ResumeMemory = z
  .boolean()
  .optional()
  .describe("false: boot it; 409 when it was paused with its memory. Without effect on one that runs");
export const ResumeRequest = component(
  "ResumeRequest",
  z.object({
    timeout: TimeoutSeconds.optional(),
    autoPause: z.boolean().optional(),
    memory: ResumeMemory,
  }),
);
export const ConnectRequest = component(
  "ConnectRequest",
  z.object({ timeout: TimeoutSeconds, memory: ResumeMemory }),
);
export const ConnectRequestV2 = component(
  "ConnectRequestV2",
  z.object({ timeout: TimeoutSeconds.default(300), memory: ResumeMemory }),
);
export const TimeoutRequest = component("TimeoutRequest", z.object({ timeout: TimeoutSeconds.optional() }));
export const RefreshRequest = component(
  "RefreshRequest",
  z.object({ duration: z.int().min(0).max(3600).optional() }),
);

export const NewTemplate = component(
  "NewTemplate",
  z.object({
    name: z.string().min(1).max(128).optional(),
    alias: z.string().min(1).max(128).optional().describe("Deprecated name for `name`"),
    tags: z.array(z.string().min(1)).optional(),
    cpuCount: z.int().min(1).max(1024).optional(),
    memoryMB: z.int().min(128).max(4_194_304).optional(),
    minFreeDiskMb: z
      .int()
      .min(0)
      .optional()
      .describe(
        "Best effort, MiB: less than the server's disks have, of which free is what the build leaves",
      ),
    teamID: z.string().optional(),
  }),
);

export const TemplateCreated = component(
  "TemplateCreated",
  z.object({
    templateID: z.string(),
    buildID: z.string(),
    public: z.boolean(),
    names: z.array(z.string()),
    tags: z.array(z.string()),
    aliases: z.array(z.string()),
  }),
);

const BuildSteps = z.array(
  z.object({
    type: z.string().min(1),
    args: z.array(z.string()).default([]),
    filesHash: z.string().optional(),
    force: z.boolean().optional(),
    from: z.int().min(0).optional(),
    exec: z.boolean().optional(),
  }),
);

export const BuildStart = component(
  "BuildStart",
  z.object({
    fromImage: z.string().min(1).optional(),
    fromTemplate: z.string().min(1).optional(),
    fromImageRegistry: z
      .object({ type: z.string(), username: z.string().optional(), password: z.string().optional() })
      .optional(),
    force: z.boolean().optional(),
    steps: BuildSteps.optional(),
    stages: z
      .array(
        z.object({ name: z.string().optional(), fromImage: z.string().min(1).optional(), steps: BuildSteps }),
      )
      .max(100)
      .optional(),
    dockerfile: z.object({ escape: z.enum(["\\", "`"]).default("\\") }).optional(),
    startCmd: z.string().optional(),
    readyCmd: z.string().optional(),
  }),
);

export const BuildLogEntry = component(
  "BuildLogEntry",
  z.object({
    timestamp: z.iso.datetime(),
    message: z.string(),
    level: z.enum(["debug", "info", "warn", "error"]),
    step: z.string().optional(),
  }),
);

export const BuildInfo = component(
  "BuildInfo",
  z.object({
    templateID: z.string(),
    buildID: z.string(),
    status: z.enum(["waiting", "building", "ready", "error"]),
    logs: z.array(z.string()),
    logEntries: z.array(BuildLogEntry),
    reason: z
      .object({
        message: z.string(),
        step: z.string().optional(),
        logEntries: z.array(BuildLogEntry).optional(),
      })
      .optional(),
  }),
);

export const Template = component(
  "Template",
  z.object({
    templateID: z.string(),
    buildID: z.string(),
    cpuCount: z.int(),
    memoryMB: z.int(),
    diskSizeMB: z.int(),
    public: z.boolean(),
    aliases: z.array(z.string()),
    names: z.array(z.string()),
    createdAt: z.iso.datetime(),
    updatedAt: z.iso.datetime(),
    createdBy: z.null(),
    lastSpawnedAt: z.iso.datetime().nullable(),
    spawnCount: z.int(),
    buildCount: z.int(),
    envdVersion: z.string(),
    buildStatus: z.enum(["waiting", "building", "ready", "error"]),
  }),
);

export const TemplateWithBuilds = component(
  "TemplateWithBuilds",
  z.object({
    templateID: z.string(),
    public: z.boolean(),
    aliases: z.array(z.string()),
    names: z.array(z.string()),
    createdAt: z.iso.datetime(),
    updatedAt: z.iso.datetime(),
    lastSpawnedAt: z.iso.datetime().nullable(),
    spawnCount: z.int(),
    builds: z.array(
      z.object({
        buildID: z.string(),
        status: z.enum(["waiting", "building", "ready", "error"]),
        createdAt: z.iso.datetime(),
        updatedAt: z.iso.datetime(),
        finishedAt: z.iso.datetime().optional(),
        cpuCount: z.int(),
        memoryMB: z.int(),
        diskSizeMB: z.int().optional(),
        envdVersion: z.string().optional(),
      }),
    ),
  }),
);

export const AliasInfo = component("AliasInfo", z.object({ templateID: z.string(), public: z.boolean() }));

// Query parameters arrive as text.
const IntText = (min: number, max: number) =>
  z
    .string()
    .regex(/^\d{1,14}$/, `must be a whole number from ${min} to ${max}`)
    .transform(Number)
    .pipe(z.int().min(min).max(max));

export const PageQuery = { limit: IntText(1, 100).default(100), nextToken: z.string().optional() };

export const ListSandboxesQuery = z.object({ metadata: z.string().optional() });

export const ListSandboxesV2Query = z.object({
  ...PageQuery,
  metadata: z.string().optional().describe("k=v&k2=v2, all must match"),
  state: z.string().optional().describe("running, paused or both, comma-joined"),
  startedAfter: z.iso.datetime({ offset: true }).optional(),
  template: z.string().optional(),
  order: z.enum(["asc", "desc"]).default("desc"),
});

export const ListTemplatesQuery = z.object({ teamID: z.string().optional() });
export const ListTemplatesV2Query = z.object({ ...PageQuery, teamID: z.string().optional() });

const LogLevel = z.enum(["debug", "info", "warn", "error"]);

export const BuildStatusQuery = z.object({
  logsOffset: IntText(0, 1_000_000_000).default(0),
  limit: IntText(1, 100).default(100),
  level: LogLevel.optional(),
});

export const BuildLogsQuery = z.object({
  cursor: IntText(0, 99_999_999_999_999).optional(),
  limit: IntText(1, 100).default(100),
  direction: z.enum(["forward", "backward"]).default("forward"),
  level: LogLevel.optional(),
  source: z.enum(["temporary", "persistent"]).optional(),
});

// ---- resource figures, logs, nodes, tags ----

export const SandboxMetric = component(
  "SandboxMetric",
  z.object({
    timestamp: z.iso.datetime(),
    timestampUnix: z.int(),
    cpuUsedPct: z.number().describe("0 to 100: share of all vCPUs together"),
    cpuCount: z.int(),
    memUsed: z.int().describe("Bytes, like the other sizes"),
    memTotal: z.int(),
    memCache: z.int(),
    diskUsed: z.int(),
    diskTotal: z.int(),
  }),
);

export const SandboxesWithMetrics = component(
  "SandboxesWithMetrics",
  z.object({ sandboxes: z.record(z.string(), SandboxMetric) }),
);

const UnixSeconds = IntText(0, 99_999_999_999);
const UnixMs = IntText(0, 99_999_999_999_999);

export const SandboxesMetricsQuery = z.object({
  sandbox_ids: z.string().default("").describe("Up to 100 ids, comma-joined"),
});
export const SandboxMetricsQuery = z.object({
  start: UnixSeconds.optional().describe("Unix seconds"),
  end: UnixSeconds.optional().describe("Unix seconds"),
});

export const SandboxLogEntry = component(
  "SandboxLogEntry",
  z.object({
    timestamp: z.iso.datetime(),
    message: z.string(),
    level: LogLevel,
    fields: StringMap.describe("source is lifecycle or console; lifecycle lines have their event"),
  }),
);
export const SandboxLogs = component(
  "SandboxLogs",
  z.object({
    logs: z.array(z.object({ timestamp: z.iso.datetime(), line: z.string() })),
    logEntries: z.array(SandboxLogEntry),
  }),
);
export const SandboxLogsV2 = component("SandboxLogsV2", z.object({ logs: z.array(SandboxLogEntry) }));

export const SandboxLogsQuery = z.object({
  start: UnixMs.optional().describe("Unix milliseconds"),
  limit: IntText(1, 10_000).default(1000),
});
export const SandboxLogsV2Query = z.object({
  cursor: UnixMs.optional().describe("Unix milliseconds to go on from"),
  limit: IntText(1, 1000).default(1000),
  direction: z.enum(["forward", "backward"]).default("backward"),
  level: LogLevel.optional().describe("Least level"),
  search: z.string().max(256).optional().describe("Text the message must contain"),
});

export const NIL_UUID = "00000000-0000-0000-0000-000000000000";
export const NodesQuery = z.object({ clusterID: z.string().optional() });

const nodeFields = {
  id: z.string(),
  serviceInstanceID: z.string(),
  clusterID: z.string(),
  version: z.string(),
  commit: z.string(),
  machineInfo: z.object({
    cpuFamily: z.string(),
    cpuModel: z.string(),
    cpuModelName: z.string(),
    cpuArchitecture: z.string(),
  }),
  status: z.enum(["ready", "draining", "connecting", "unhealthy"]),
  sandboxCount: z.int(),
  sandboxPausedCount: z.int(),
  createSuccesses: z.int().describe("Since the server's start, like createFails"),
  createFails: z.int(),
  metrics: z.object({
    allocatedCPU: z.int().describe("CPUs of all sandboxes but the paused ones"),
    allocatedMemoryBytes: z.int(),
    cpuPercent: z.int(),
    cpuCount: z.int(),
    memoryUsedBytes: z.int(),
    memoryTotalBytes: z.int(),
    pausedAllocatedCPU: z.int(),
    pausedAllocatedMemoryBytes: z.int(),
    disks: z.array(
      z.object({
        mountPoint: z.string(),
        device: z.string(),
        filesystemType: z.string(),
        usedBytes: z.int(),
        totalBytes: z.int(),
      }),
    ),
  }),
};
export const Node = component("Node", z.object({ ...nodeFields, sandboxStartingCount: z.int() }));
export const NodeDetail = component(
  "NodeDetail",
  z.object({
    ...nodeFields,
    cachedBuilds: z.array(z.string()),
    sandboxes: z.array(ListedSandbox).describe("The running ones"),
  }),
);

export const Team = component(
  "Team",
  z.object({
    teamID: z.string(),
    name: z.string(),
    apiKey: z.string().describe("Always empty: no answer holds a key"),
    isDefault: z.boolean(),
  }),
);

const Tags = z.array(z.string().min(1).max(128)).min(1).max(100);
export const AssignTags = component(
  "AssignTemplateTags",
  z.object({ target: z.string().min(1).max(256).describe("name[:tag]"), tags: Tags }),
);
export const AssignedTags = component(
  "AssignedTemplateTags",
  z.object({ buildID: z.string(), tags: z.array(z.string()) }),
);
export const RemoveTags = component(
  "RemoveTemplateTags",
  z.object({ name: z.string().min(1).max(256), tags: Tags }),
);
export const TemplateTag = component(
  "TemplateTag",
  z.object({ tag: z.string(), buildID: z.string(), createdAt: z.iso.datetime() }),
);
export const UpdateTemplate = component("UpdateTemplate", z.object({ public: z.boolean() }));
export const TemplateNames = component("TemplateNames", z.object({ names: z.array(z.string()) }));
export const Nothing = component("Nothing", z.object({}));
export const FreeObject = component("FreeObject", z.record(z.string(), z.unknown()));
