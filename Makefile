# Two commands on a fresh machine:  make serve   make test      (and: make docs, make readme)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
MODEL ?= glm52-nano
WORKERS ?= 2
export HF_HUB_OFFLINE = 1

.PHONY: serve test docs readme sync clean

serve: $(VENV)/.core           ## install what serving needs, then serve MODEL on 127.0.0.1:8000
	$(BIN)/glm52 serve $(MODEL)

test: $(VENV)/.dev             ## install everything, then run what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

docs: $(VENV)/.dev             ## the site, into _docs
	$(BIN)/python tests/documentation.py docs

readme: $(VENV)/.dev           ## README.md from nbs/index.ipynb
	$(BIN)/python tests/documentation.py readme

sync: $(VENV)/.dev             ## notebooks cleaned, package exported from them
	$(BIN)/nbdev-clean && $(BIN)/nbdev-export

# Without a GPU a CPU build of torch is preferred where the configured package sources offer one: it is a tenth of the size.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	@if ! command -v nvidia-smi >/dev/null; then $(BIN)/pip install -q "torch==$(TORCH)+cpu" 2>/dev/null || echo "no CPU build of torch on offer: taking the default one"; fi
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q "torch==$(TORCH)"
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e '.[dev,gpu]'
	@touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) _proc _docs build *.egg-info
