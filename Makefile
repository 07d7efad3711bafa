# AgentENV. `make quickstart` runs the main job, `make test` passes all tests; every target does its own set-up.
# Root is asked for before anything is built or downloaded.
ifneq ($(filter quickstart start,$(MAKECMDGOALS)),)
NEEDS_ROOT := $(shell scripts/server.sh privileged || echo no)
ifeq ($(NEEDS_ROOT),no)
$(error network namespaces and taps need root: sudo make $(MAKECMDGOALS))
endif
endif
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-builtin-rules
# Root's shell by plain `su` has the user's PATH, without what administrates a machine.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

ROOT := $(CURDIR)
BUN := $(ROOT)/.tools/bin/bun
CC := gcc
GUEST_CC := musl-gcc
CFLAGS := -std=c11 -O2 -g -Wall -Wextra -Werror -D_GNU_SOURCE -fno-strict-aliasing
SAN_FLAGS := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

SHIM_SRC := $(wildcard c/shim/*.c)
SHIM_HDR := $(wildcard c/shim/*.h)
ENVD_SRC := $(wildcard c/envd/*.c)
ENVD_HDR := $(wildcard c/envd/*.h)
EXT4_SRC := $(wildcard c/ext4/*.c)
EXT4_HDR := $(wildcard c/ext4/*.h)
JAIL_SRC := $(wildcard c/jail/*.c)
JAIL_HDR := $(wildcard c/jail/*.h)
SHIELD_SRC := c/memshield/memshield.c
TS_SRC := $(shell find src ffi -name '*.ts' ! -name '*.test.ts' 2>/dev/null) package.json bun.lock
NATIVE := build/libaenv.so build/envd build/aenv-ext4 build/aenv-jail build/memshield.so

.PHONY: build quickstart test start stop bench soak lint fmt check native clean deps sanitize help crash-sim fuzz rig docs-check torture try-fresh try-image deb release

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: dist/agentenv ## build the executable dist/agentenv

quickstart: build ## build, start the server, make a template from a Debian image, run Python in a microVM
	@scripts/quickstart.sh

test: build ## lint and run every test, real microVMs included
	@scripts/bootstrap.sh test
	@scripts/test.sh

start: build ## start the server in the background
	@scripts/server.sh start

stop: ## stop the server that `make start` or `make quickstart` started
	@scripts/server.sh stop

bench: build ## measure and print the figures of docs/performance.md
	@scripts/bootstrap.sh test
	@scripts/bench.sh

bench-%: build ## one file of tests/bench, e.g. bench-storage, bench-envd, bench-lifecycle
	@scripts/bootstrap.sh test
	@AENV_BENCH=$* scripts/bench.sh

soak: build ## random lifecycle operations with faults (N=200 SEED=…), report of broken promises and leaks
	@scripts/bootstrap.sh test
	@dist/agentenv setup --home "$${AENV_TEST_HOME:-$(ROOT)/.aenv/home}"
	@$(BUN) tests/crash/soak.ts $(or $(N),200) $(SEED)

deps: .tools/ready node_modules/.ready ## tools and packages only

lint: deps native ## formatter, linter, type check, import directions, shell scripts
	@scripts/lint.sh

fmt: deps ## format the sources
	@node_modules/.bin/biome check --write .

check: deps native ## type check only
	@node_modules/.bin/tsc -p tsconfig.json

native: $(NATIVE) ## the C parts

rig: build ## run CMD=… in a throw-away machine with ublk and KVM (RIG_LIMIT seconds, docs/rig.md)
	@scripts/bootstrap.sh test
	@dist/agentenv setup --home "$${AENV_TEST_HOME:-$(ROOT)/.aenv/home}"
	@scripts/rig.sh -t $(or $(RIG_LIMIT),600) -- bash -c $(if $(CMD),'$(subst ','\'',$(CMD))','echo "give CMD=…, e.g. make rig CMD=\"ls /dev/ublk-control\""; exit 2')

crash-sim: deps native ## power loss under the storage engine (SEEDS=10000 FIRST=…), lost writes counted
	@$(BUN) scripts/crash-sim.ts --seeds $(or $(SEEDS),10000) $(if $(FIRST),--first $(FIRST))

docs-check: deps native ## every documented command, option, key and link exists, every existing one is documented
	@$(BUN) scripts/docs-check.ts

torture: build ## images that are hard to get right, each the root file system of a guest, compared with what other tools make
	@scripts/bootstrap.sh test
	@scripts/bootstrap.sh useful
	@dist/agentenv setup --home "$${AENV_TEST_HOME:-$(ROOT)/.aenv/home}"
	@AENV_TEST_LONG=1 $(BUN) test tests/image/torture.test.ts

try-fresh: build ## install, first sandbox, upgrade, crash, uninstall on a fresh machine made for it
	@scripts/bootstrap.sh test
	@scripts/try-fresh.sh

try-image: build ## carry out deploy/docker/Dockerfile without a container engine, and start what it makes
	@scripts/bootstrap.sh test
	@scripts/try-image.sh

deb: build ## the Debian package, in dist/
	@scripts/deb.sh dist/agentenv $$($(BUN) -e 'console.log(require("./package.json").version)') \
	  dist/agentenv_$$($(BUN) -e 'console.log(require("./package.json").version)')_amd64.deb

release: build ## dist/release: archives, command line for arm64 and macOS, package, checksums, bill of materials
	@scripts/release.sh

fuzz: .tools/ready ## 10 million mutated inputs for the guest agent's decoders, under sanitizers, then libFuzzer
	@scripts/bootstrap.sh useful
	@tests/fuzz/run.sh

clean: ## remove what the build made
	rm -rf build dist

# ---- tools and packages -------------------------------------------------------------------------

.tools/ready: scripts/bootstrap.sh scripts/packages.txt scripts/versions.sh
	@scripts/bootstrap.sh
	@touch $@

node_modules/.ready: package.json bun.lock | .tools/ready
	@$(BUN) install --frozen-lockfile --silent
	@touch $@

# ---- C parts ------------------------------------------------------------------------------------

build/libaenv.so: $(SHIM_SRC) $(SHIM_HDR) | .tools/ready
	@mkdir -p build
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) -shared -fPIC -fvisibility=hidden -msse4.2 -o $@.tmp $(SHIM_SRC) \
	  -Wl,-z,defs -Wl,--exclude-libs,ALL -Wl,-Bstatic -luring -lzstd -llz4 -Wl,-Bdynamic -lpthread
	@mv $@.tmp $@

build/envd: $(ENVD_SRC) $(ENVD_HDR) | .tools/ready
	@mkdir -p build
	@echo "  CC      $@"
	@$(GUEST_CC) $(CFLAGS) -static -Os -ffunction-sections -fdata-sections -Wl,--gc-sections -s \
	  -idirafter /usr/include -idirafter /usr/include/$$($(CC) -print-multiarch) -o $@.tmp $(ENVD_SRC)
	@mv $@.tmp $@

build/aenv-ext4: $(EXT4_SRC) $(EXT4_HDR) | .tools/ready
	@mkdir -p build
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) -static -o $@.tmp $(EXT4_SRC) -lext2fs -lcom_err -lpthread
	@mv $@.tmp $@

build/aenv-jail: $(JAIL_SRC) $(JAIL_HDR) | .tools/ready
	@mkdir -p build
	@echo "  CC      $@"
	@$(GUEST_CC) $(CFLAGS) -static -s -idirafter /usr/include -idirafter /usr/include/$$($(CC) -print-multiarch) \
	  -o $@.tmp $(JAIL_SRC)
	@mv $@.tmp $@

build/memshield.so: $(SHIELD_SRC) | .tools/ready
	@mkdir -p build
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) -shared -fPIC -fvisibility=hidden -Wl,-z,defs -o $@.tmp $(SHIELD_SRC)
	@mv $@.tmp $@

sanitize: build/san/libaenv.so build/san/envd build/san/aenv-ext4 ## the C parts with ASan and UBSan

build/san/libaenv.so: $(SHIM_SRC) $(SHIM_HDR) | .tools/ready
	@mkdir -p build/san
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) $(SAN_FLAGS) -shared -fPIC -fvisibility=hidden -msse4.2 -o $@ $(SHIM_SRC) -luring -lzstd -llz4 -lpthread

build/san/envd: $(ENVD_SRC) $(ENVD_HDR) | .tools/ready
	@mkdir -p build/san
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) $(SAN_FLAGS) -o $@ $(ENVD_SRC)

build/san/aenv-ext4: $(EXT4_SRC) $(EXT4_HDR) | .tools/ready
	@mkdir -p build/san
	@echo "  CC      $@"
	@$(CC) $(CFLAGS) $(SAN_FLAGS) -o $@ $(EXT4_SRC) -lext2fs -lcom_err -lpthread

# ---- executable ---------------------------------------------------------------------------------

dist/agentenv: $(TS_SRC) $(NATIVE) $(wildcard config/* deploy/systemd/*) scripts/build.ts | node_modules/.ready
	@$(BUN) run scripts/build.ts
