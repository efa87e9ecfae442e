# The command list. `make` alone prints it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# `make native` installs those that need a compiler.
NATIVE := libs/transfer-native libs/engine-native
PACKAGES := $(filter-out $(NATIVE:=/pyproject.toml),$(wildcard libs/*/pyproject.toml)) $(wildcard services/*/pyproject.toml)
EDITABLE := $(patsubst %/pyproject.toml,-e %,$(PACKAGES))
# vLLM pins other versions than ours: it lives in an environment of its own.
VENV_VLLM ?= .venv-vllm
VENV_AUDIT ?= .venv-audit
VENV_DOCS ?= .venv-docs
# torch's build: auto (for CPUs where no GPU is), cpu, or default (as the package index has it).
TORCH ?= auto

DOCS_PORT ?= 8008

# What `make up` takes from the command line or the environment, and passes on.
UP_SETTINGS := MODEL PREFILL DECODE KVSTORE PORT GROUP ENGINE METADATA SERVED_MODEL_NAME
export $(UP_SETTINGS)

# Tests and services start interpreters by the hundred: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: $(VENV_VLLM) .python-is-new-enough .up-settings-are-known help up test test-again test-nightly test-fast fuzz fuzz-messages fuzz-all test-soak sim-cluster chaos test-shaken native native-if-possible test-native-sanitized test-rdma test-vllm conform test-clients screenshots e2e-compose check docs docs-serve schema format bench bench-overload bench-conductor bench-transfer bench-kvpool bench-rdma bench-engine bench-goodput dist lock audit clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  settings of make up: MODEL=<folder or hub id> PREFILL=2 DECODE=2 KVSTORE=2 PORT=8000 TORCH=auto|cpu|default"

up: .up-settings-are-known $(VENV)/.installed ## an embedded cluster on this machine, until Ctrl-C
	@$(MAKE) --no-print-directory native-if-possible
	@$(BIN)/halfmoon up

# Two more than cores: many tests wait for a process or a peer.
WORKERS ?= $(shell echo $$(($$(nproc) + 2)))

# No test of `make test` takes so long: one that stands where its time limit can't end it (in a
# destructor, in a callback of the loop) writes all stacks and ends its worker, and the rest goes on.
STANDS_STILL_S ?= 420
# What random parameters of tests are drawn from.
RUN ?= $(shell date +%s)

test: $(VENV)/.dev ## all tests, several at once: WORKERS=3
	@echo "RUN=$(RUN)"
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --testrunuid $(RUN) \
		-o faulthandler_timeout=$(STANDS_STILL_S) -o faulthandler_exit_on_timeout=true

test-again: $(VENV)/.dev ## those that failed in the last run, one after the other (is it the test or the load?): RUN=<that run's>
	PYTEST_XDIST_TESTRUNUID=$(RUN) $(BIN)/pytest --last-failed --last-failed-no-failures none

test-nightly: $(VENV)/.dev ## all tests with many more examples, and statistics, soaks and sweeps (hours); says what they prove
	@echo "RUN=$(RUN)"
	HALFMOON_NIGHTLY=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal --testrunuid $(RUN) --timeout 7200

test-fast: $(VENV)/.dev ## tests of the files that took under two seconds: run it while you work
	$(BIN)/pytest --quick -q -r fE -n $(WORKERS) --dist worksteal

# Operations of the long soak; SEED repeats one.
OPERATIONS ?= 4000

test-soak: $(VENV)/.dev ## kvstore nodes under every fault, for long: OPERATIONS=4000 SEED=7
	HALFMOON_SOAK_OPERATIONS=$(OPERATIONS) HALFMOON_SOAK_SEED=$(SEED) \
		$(BIN)/pytest -s --timeout 7200 tests/kvstore/test_soak.py

SEEDS ?= 0:1000
JOBS ?= 1

sim-cluster: $(VENV)/.dev ## real services by a virtual clock, with seeded faults: SEEDS=0:10000 JOBS=2, or SEED=7
	$(BIN)/halfmoon sim-cluster --jobs $(JOBS) $(if $(SEED),--seed $(SEED) --log,--seeds $(SEEDS))

# Of faults. Further arguments: CHAOS=--help.
MINUTES ?= 10

chaos: $(VENV)/.dev ## a live cluster under faults, every answer checked: MINUTES=60 SEED=7 (needs redis-server)
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(CHAOS)

# Hostile inputs of each fuzzer; SEED repeats a run.
N ?= 10000

# Those of docs/security.md.
FUZZERS ?= tests/fuzz

fuzz: $(VENV)/.dev ## hostile inputs to every door: N=10000 SEED=7 FUZZERS=tests/fuzz/test_rest_bodies.py
	HALFMOON_FUZZ=$(N) HALFMOON_FUZZ_SEED=$(SEED) $(BIN)/pytest -s --timeout 14400 $(FUZZERS)

fuzz-all: fuzz fuzz-messages ## all fuzzers, the transfer extension's under sanitizers too (hours): N=10000 SEED=7
	HALFMOON_FUZZ=$(N) HALFMOON_FUZZ_SEED=$(SEED) $(BIN)/python tests/native/sanitized_build.py transfer-native

fuzz-messages: $(VENV)/.dev ## hostile messages to workers and conductor: N=10000 SEED=7
	HALFMOON_SEQUENCES=$(N) HALFMOON_SEED=$(SEED) \
		$(BIN)/pytest -s --timeout 14400 tests/services/test_hostile_sequences.py

# Which tests stand still again and again; all take hours.
SHAKEN ?= tests/runtime tests/services

test-shaken: $(VENV)/.dev ## tests on a machine that keeps standing still: SHAKEN="tests/kvstore -x"
	$(BIN)/python tests/shaken.py $(if $(SEED),--seed $(SEED)) $(BIN)/pytest --timeout 1800 $(SHAKEN)

# What they are for: docs/transfer/native.md, docs/models.md.
native: $(VENV)/.installed ## build the optional extensions (need g++, python3-dev, libxxhash-dev)
	@for package in $(NATIVE); do $(BIN)/python tools/native_requirements.py $$(basename $$package) || exit 1; done
	@$(PIP_INSTALL) --no-build-isolation --no-deps $(NATIVE:%=-e %)

# For `make up`: builds the engine's kernels once, and goes on without where that can't be.
ENGINE_KERNELS := $(VENV)/.engine-native
native-if-possible: $(VENV)/.installed
	@if [ ! -e $(ENGINE_KERNELS) ] && $(BIN)/python tools/native_requirements.py engine-native >/dev/null 2>&1; then \
		echo "compiling the engine's kernels (once, about a minute) …"; \
		$(PIP_INSTALL) --no-build-isolation --no-deps -e libs/engine-native \
		&& touch $(ENGINE_KERNELS) || echo "they can't be compiled here: torch computes, more slowly"; \
	elif [ ! -e $(ENGINE_KERNELS) ]; then \
		echo "no C++ compiler or Python.h here: torch computes, more slowly (see make native)"; fi

# Of inputs, unless the command line says how many.
test-native-sanitized: N = 500
test-native-sanitized: $(VENV)/.dev ## both extensions under AddressSanitizer and UBSan (two minutes): N=500 SEED=7
	$(BIN)/python tests/native/sanitized_build.py engine-native
	HALFMOON_FUZZ=$(N) HALFMOON_FUZZ_SEED=$(SEED) $(BIN)/python tests/native/sanitized_build.py transfer-native

# A virtual machine with software RDMA devices; not part of this repository.
RDMA_VM ?= ../shared/tools/rdma-vm
# What else the machine must see: the interpreter that the environment links to, and Debian's
# pyverbs alone (the link dangles here and leads somewhere there).
BASE = $(shell $(BIN)/python -c 'import sys; print(sys.base_prefix)')
RDMA_PATH := .halfmoon/pyverbs
RDMA_TESTS ?= tests/transfer/test_conformance.py tests/transfer/test_notifications.py \
	tests/transfer/backends/test_rdma.py tests/transfer/test_file_regions.py
# For all tests, on a busy machine. The first command builds the image and boots, nothing else.
RDMA_TIMEOUT_S ?= 1500
RDMA_BOOT_TIMEOUT_S ?= 600

# What runs a command in that machine, with this checkout at the same place, read-only.
IN_RDMA_VM = $(RDMA_VM) run -n 2 -t $(RDMA_TIMEOUT_S) -s "$(CURDIR):ro" -s "$(realpath $(VENV)):ro" \
	-s "$(BASE):ro" -C "$(CURDIR)" -e PYTHONPATH="$(CURDIR)/$(RDMA_PATH)$(if $(PYTHONPATH),:$(PYTHONPATH))" \
	-e PYTHONDONTWRITEBYTECODE=1 -e HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis -e HALFMOON_UNFORKED=1 --

$(RDMA_PATH):
	@mkdir -p $@ && ln -sfn /usr/lib/python3/dist-packages/pyverbs $@/pyverbs

test-rdma: $(VENV)/.dev $(RDMA_PATH) ## RDMA and NVMe over Fabrics, in a virtual machine (says so if it can't)
	@if [ ! -x "$(RDMA_VM)" ]; then \
		echo "skipped: no $(RDMA_VM), which runs a command in a machine with RDMA devices"; \
	elif ! timeout $(RDMA_BOOT_TIMEOUT_S) $(RDMA_VM) run -n 2 -- true; then \
		echo "skipped: $(RDMA_VM) could not boot its machine within $(RDMA_BOOT_TIMEOUT_S) s, see above"; \
	else \
		$(IN_RDMA_VM) bash tests/transfer/with_nvme_namespace.sh $(realpath $(VENV))/bin/python -m pytest \
			-p no:cacheprovider -m "rdma or block_device" $(RDMA_TESTS); \
	fi

bench-rdma: $(VENV)/.installed $(RDMA_PATH) ## the RDMA backend beside perftest, in that machine
	@$(IN_RDMA_VM) $(realpath $(VENV))/bin/python -m benchmarks.transfer.rdma $(BENCH)

# Two processes of tests want 16 GB, and start each server twice.
VLLM_WORKERS ?= 0
VLLM_TESTS ?= tests/vllm

# Brings the environment up to date, or leaves it as it is: in under a second.
$(VENV_VLLM): .python-is-new-enough
	@$(PYTHON) tools/vllm_environment.py $@ $(PACKAGES:/pyproject.toml=)

test-vllm: $(VENV_VLLM) ## vLLM as our engine and beside us, in .venv-vllm (4 GB, minutes): VLLM_TESTS=tests/vllm/test_x.py
	HALFMOON_UNFORKED=1 $(VENV_VLLM)/bin/python -m pytest -W ignore -n $(VLLM_WORKERS) --dist loadfile --timeout 600 $(VLLM_TESTS)

conform: $(VENV)/.dev ## the conformance kit against our services and those in TypeScript, with keys and without (minutes)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/conform/test_services.py tests/polyglot/test_conformance.py

test-clients: $(VENV)/.dev ## clients that people use, each from an environment of its own, on a live cluster
	HALFMOON_TEST_CLIENTS=1 HALFMOON_UNFORKED=1 $(BIN)/pytest tests/clients

screenshots: $(VENV)/.dev ## pictures of the web page in docs/page (needs chromium)
	HALFMOON_SCREENSHOTS=1 $(BIN)/pytest --timeout 900 tests/e2e/test_page.py -m pictured

e2e-compose: $(VENV)/.dev ## docker-compose.yml built, started and tested from outside (starts an engine if it must)
	@bash tests/compose/with_engine.sh $(BIN)/pytest -s tests/compose

check: $(VENV)/.dev ## format, lint, types, import layers, names, circles, prose, schema drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.checks
	$(BIN)/python -m halfmoon_protocol.schema --check
	$(BIN)/python -m tools.openapi --check

docs: $(VENV_DOCS)/.installed ## all pages as a site in site/, with a search and an API reference
	@$(VENV_DOCS)/bin/python -m tools.docs_site site

docs-serve: docs ## show that site on this machine, until Ctrl-C: DOCS_PORT=8008
	@echo "http://127.0.0.1:$(DOCS_PORT)"
	@$(VENV_DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory site $(DOCS_PORT) >/dev/null 2>&1

schema: $(VENV)/.dev ## write libs/protocol/{schema,golden} anew
	$(BIN)/python -m halfmoon_protocol.schema
	$(BIN)/python -m tools.openapi

format: $(VENV)/.dev ## let ruff have its way
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## how fast the parts are on this machine
	$(BIN)/python -m benchmarks

bench-overload: $(VENV)/.installed ## admission on a live cluster at 2 and 5 times what it serves: BENCH="--minutes 10"
	$(BIN)/python -m benchmarks.overload $(BENCH)

bench-conductor: $(VENV)/.installed ## a conductor's own cost beside routers of other projects (installs them aside)
	$(BIN)/python -m benchmarks.conductor

bench-transfer: $(VENV)/.installed ## the transfer library beside its peers (installs them aside)
	$(BIN)/python -m benchmarks.transfer

bench-kvpool: $(VENV)/.installed ## a kvstore beside other stores and the bare disk (installs them aside)
	$(BIN)/python -m benchmarks.blocks

# Further arguments of the two below, such as BENCH="--shapes llama-8x512 --rounds 3".
bench-engine: $(VENV)/.installed ## our engine beside vLLM's on the same cores (installs it aside): BENCH=--help
	$(BIN)/python -m benchmarks.engine $(BENCH)

bench-goodput: $(VENV)/.installed ## the most requests/s within limits, beside vLLM's servers (installs them aside): BENCH=--help
	$(BIN)/python -m benchmarks.goodput $(BENCH)

dist: $(VENV)/.dev ## sdist and wheel of every package into dist/, checked (those in C and C++: if they can be compiled)
	@rm -rf dist
	@for package in $(PACKAGES:/pyproject.toml=); do \
		$(BIN)/python -m build --no-isolation --outdir dist $$package >/dev/null || exit 1; done
	@for package in $(NATIVE); do if $(BIN)/python tools/native_requirements.py $$(basename $$package); then \
		$(BIN)/python -m build --no-isolation --outdir dist $$package >/dev/null || exit 1; fi; done
	$(BIN)/twine check --strict dist/*

lock: $(VENV)/.dev ## locks/ anew: versions of constraints.txt, hashes from the package index
	@$(PIP_INSTALL) uv
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.lock

audit: $(VENV_AUDIT)/.installed ## dist/halfmoon.cdx.json, the list of all parts; and their known weaknesses
	@mkdir -p dist
	@$(VENV_AUDIT)/bin/cyclonedx-py requirements --output-reproducible --of JSON -o dist/halfmoon.cdx.json locks/cluster.txt
	@$(VENV_AUDIT)/bin/python tools/audit.py locks/*.txt

clean: ## remove the environments and what runs leave behind
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_AUDIT) $(VENV_DOCS) dist site .halfmoon .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Of the command line alone: make takes any variable there, and would ignore a misspelt one.
.up-settings-are-known: .python-is-new-enough
	@$(PYTHON) tools/make_settings.py up $(UP_SETTINGS) TORCH PYTHON VENV

.python-is-new-enough:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Halfmoon needs Python 3.11 or newer, this is " + sys.version.split()[0])'

# What comes from elsewhere is installed from a lock: pip refuses a file with another hash. torch is in
# none, as the right build of it depends on the machine.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED = --require-hashes --no-deps -r

$(VENV)/.installed: constraints.txt locks/cluster.txt $(PACKAGES) | .python-is-new-enough
	@echo "installing into $(VENV): a minute or two, 0.3 GB to fetch where no GPU is, 1.4 GB on disk"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: $$(grep -c == locks/cluster.txt) libraries: 0.1 GB …"
	@$(PIP_INSTALL) $(LOCKED) locks/cluster.txt
	@printf "2 of 3: "; $(BIN)/python tools/install_torch.py $(TORCH)
	@echo "3 of 3: Halfmoon's own packages …"
	@$(PIP_INSTALL) --no-build-isolation --no-deps $(EDITABLE)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed locks/dev.txt
	@$(PIP_INSTALL) $(LOCKED) locks/dev.txt
	@touch $@

$(VENV_DOCS)/.installed: locks/docs.txt | .python-is-new-enough
	@test -x $(VENV_DOCS)/bin/python || $(PYTHON) -m venv $(VENV_DOCS)
	@$(VENV_DOCS)/bin/python -m pip install --quiet --disable-pip-version-check $(LOCKED) locks/docs.txt
	@touch $@

$(VENV_AUDIT)/.installed: locks/audit.txt | .python-is-new-enough
	@test -x $(VENV_AUDIT)/bin/python || $(PYTHON) -m venv $(VENV_AUDIT)
	@$(VENV_AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check $(LOCKED) locks/audit.txt
	@touch $@
