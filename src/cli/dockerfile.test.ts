// biome-ignore-all lint/suspicious/noTemplateCurlyInString: these are Dockerfiles.
import { describe, expect, test } from "bun:test";
import { type BuildPlan, parseDockerfile } from "./dockerfile.ts";

function parse(text: string, buildArgs: Record<string, string> = {}): BuildPlan {
  const options = {
    file: "Dockerfile",
    buildArgs: new Map(Object.entries(buildArgs)),
    architecture: "amd64",
  };
  return parseDockerfile(text, options);
}

/** The steps of the last stage as `TYPE arg|arg`. */
function steps(text: string, buildArgs: Record<string, string> = {}): string[] {
  return parse(text, buildArgs)
    .stages.at(-1)!
    .steps.map(({ type, args, exec }) => `${type}${exec === true ? "!" : ""} ${args.join("|")}`);
}

describe("instructions", () => {
  test("words stay as written, lists are told from texts, lines are joined without comments", () => {
    expect(
      steps(`# syntax=docker/dockerfile:1
FROM debian
RUN apt-get update && \\
    # not this
    apt-get install \\

    -y curl
RUN ["prog", "a b"]
RUN [not json]
CMD ["sh","-c","a && \\"b\\""]
ENTRYPOINT run it
CMD []
SHELL ["/bin/bash", "-c"]
ENV A=1 B="two words" C=\${A:-x}
ENV OLD style value
LABEL a=b
USER app
WORKDIR /srv/$A
EXPOSE 80 443/udp
VOLUME ["/data", "/more"]
VOLUME /x /y
MAINTAINER me
HEALTHCHECK --interval=5s CMD curl -f localhost
HEALTHCHECK CMD ["curl", "x"]
HEALTHCHECK NONE
ARG X=1
ARG Y`),
    ).toEqual([
      "RUN apt-get update &&     apt-get install     -y curl",
      "RUN! prog|a b",
      "RUN [not json]",
      'CMD! sh|-c|a && "b"',
      "ENTRYPOINT run it",
      "CMD ",
      "SHELL /bin/bash|-c",
      'ENV A|1|B|"two words"|C|${A:-x}',
      "ENV OLD|style value",
      "LABEL a|b",
      "USER app",
      "WORKDIR /srv/$A",
      "EXPOSE 80|443/udp",
      "VOLUME /data|/more",
      "VOLUME /x|/y",
      "LABEL maintainer|'me'",
      "HEALTHCHECK curl -f localhost",
      "HEALTHCHECK! curl|x",
      "HEALTHCHECK NONE",
      "ARG X|1",
    ]);
  });

  test("here-documents: scripts, programs, files", () => {
    const plan = parse(`FROM debian
ENV NAME=me
RUN <<EOF
echo one \\
  two
# kept
EOF
RUN python3 - <<PY > /out
print("x")
PY
RUN <<-'X'
\t#!/bin/python
\tprint(1)
\tX
COPY --chmod=600 <<"RAW" <<EXPANDED a.txt /dst/
$NAME
RAW
hello $NAME \\$HOME
EXPANDED
CMD x`);
    const [, first, second, third, copy, cmd] = plan.stages[0]!.steps;
    expect(first!.args).toEqual(["echo one \\\n  two\n# kept\n"]);
    expect(second!.args).toEqual(['python3 - <<PY > /out\nprint("x")\nPY\n']);
    expect(third!.args[0]).toContain("#!/bin/python\nprint(1)\nAENV_SCRIPT\n");
    expect(copy).toMatchObject({ type: "COPY", args: ["/dst/", "", "600"], line: 15 });
    expect(copy!.files).toEqual({
      sources: ["a.txt"],
      inline: [
        { name: "RAW", content: "$NAME\n" },
        { name: "EXPANDED", content: "hello me $HOME\n" },
      ],
      exclude: [],
    });
    expect(cmd!.args).toEqual(["x"]);
  });
});

describe("variables", () => {
  test("of FROM: global ARG and build arguments; in stages only where ARG takes them", () => {
    const text = `ARG V=12
ARG IMAGE=debian:\${V}
FROM \${IMAGE} AS a
ARG V
ARG OWN=a-$V
ARG TARGETARCH
RUN x`;
    expect(parse(text).stages[0]!.image).toBe("debian:12");
    expect(steps(text)).toEqual(["ARG V|'12'", "ARG OWN|a-$V", "ARG TARGETARCH|'amd64'", "RUN x"]);
    expect(parse(text, { V: "13", OWN: "it's" }).stages[0]!.image).toBe("debian:13");
    expect(steps(text, { V: "13", OWN: "it's" }).slice(0, 2)).toEqual(["ARG V|'13'", `ARG OWN|'it'"'"'s'`]);
    expect(parse("FROM x\nRUN y", { NOBODY: "1" }).notes).toEqual(["no ARG takes the build argument NOBODY"]);
    expect(steps("FROM x\nRUN y", { http_proxy: "p" })).toEqual(["ARG http_proxy|'p'", "RUN y"]);
  });

  test("in sources of COPY they are known from the Dockerfile, or refused", () => {
    const sources = (text: string) => parse(text).stages[0]!.steps.at(-1)!.files!.sources;
    expect(sources("FROM x\nARG D=src\nENV E=$D/app\nCOPY ${E}/*.py $TARGET/")).toEqual(["src/app/*.py"]);
    expect(() => sources("FROM x\nCOPY $WHAT /")).toThrow(
      "Dockerfile:2: COPY $WHAT uses $WHAT, which this Dockerfile does not set",
    );
    expect(() => sources("FROM x\nENV P=$PATH\n\nCOPY $P /")).toThrow(
      "Dockerfile:4: COPY $P uses $P, which depends on the image's environment",
    );
  });
});

describe("stages", () => {
  test("only those that are needed, in their order, by name, number and image", () => {
    const plan = parse(`FROM golang AS build
RUN make
FROM node AS unused
RUN nothing
FROM alpine
COPY --from=build /out /a
COPY --from=0 --chown=1:2 /x /y /dir/
COPY --from=busybox:1 /bin/busybox /bin/`);
    expect(plan.stages.map(({ name, image }) => [name, image])).toEqual([
      ["busybox:1", "busybox:1"],
      ["build", "golang"],
      ["stage 2", "alpine"],
    ]);
    expect(plan.stages.at(-1)!.steps.map(({ from, args }) => [from, ...args])).toEqual([
      [1, "/out", "/a", "", ""],
      [1, "/x", "/dir/", "1:2", ""],
      [1, "/y", "/dir/", "1:2", ""],
      [0, "/bin/busybox", "/bin/", "", ""],
    ]);
  });

  test("a stage from a stage has its steps, variables and needs", () => {
    const plan = parse(`FROM debian AS Base
ARG D=dir
RUN one
FROM base AS next
COPY $D/x /
FROM next
RUN two`);
    expect(plan.stages).toHaveLength(1);
    expect(plan.stages[0]!.image).toBe("debian");
    expect(plan.stages[0]!.steps.map(({ type }) => type)).toEqual([
      "ARG",
      "RUN",
      "FROM",
      "COPY",
      "FROM",
      "RUN",
    ]);
    expect(plan.stages[0]!.steps[3]!.files!.sources).toEqual(["dir/x"]);
  });
});

test("what cannot be built is refused with its line", () => {
  const cases: [string, RegExp][] = [
    ["", /there is no FROM/],
    ["RUN x\nFROM y", /Dockerfile:1: RUN comes before the first FROM/],
    ["FROM", /:1: FROM is written as/],
    ["FROM $X", /:1: the image \$X is empty/],
    ["FROM a AS 1x", /:1: 1x is not a name for a stage/],
    [
      "FROM --platform=linux/arm64 a",
      /:1: the platform linux\/arm64 cannot be built here: this is linux\/amd64/,
    ],
    ["FROM a\n\nONBUILD RUN x", /:3: ONBUILD is not supported/],
    ["FROM a\nRUM x", /:2: unknown instruction RUM/],
    ["FROM a\nRUN --mount=type=secret,id=x y", /:2: RUN --mount of type secret is not supported/],
    ["FROM a\nRUN --network=none y", /:2: RUN --network=none is not supported/],
    ["FROM a\nRUN --security=insecure y", /:2: RUN --security is not supported/],
    ["FROM a\nCOPY --parents x /", /:2: COPY --parents is not supported/],
    ["FROM a\nCOPY --chmod=u+x x /", /:2: --chmod=u\+x is not supported/],
    ["FROM a\nCOPY x", /:2: COPY needs a source and a target/],
    ["FROM a\nADD https://x/y /", /:2: ADD of https:\/\/x\/y: remote sources are not supported/],
    ["FROM a\nCOPY --from=3 x /", /:2: there is no stage 3 before this one/],
    ["FROM a AS b\nCOPY --from=b x /", /:2: the stage b cannot copy from itself/],
    ["FROM a\nCOPY --from=b x y z", /:2: with several sources the target must be a directory/],
    ["FROM a\nSHELL bash", /:2: SHELL takes a list/],
    ["FROM a\nHEALTHCHECK curl", /:2: HEALTHCHECK is written as/],
    ["FROM a\nENV X", /:2: ENV needs a key and a value/],
    ["FROM a\nENV A=1 B", /:2: ENV: B is not written as key=value/],
    ["FROM a\nUSER", /:2: USER needs an argument/],
    ["ARG A=${B:?needed}\nFROM a", /:1: ARG A: B: needed/],
  ];
  for (const [text, message] of cases) expect(() => parse(text)).toThrow(message);
});
