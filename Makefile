# `make train` and `make test` need Python >= 3.11 and make; they install all else into $(VENV), once.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# The bytecode of sources and tests is kept: without it, each process that a test starts compiles all of Spanax, which takes a third of it.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
STAMP := $(VENV)/.installed
# Silent if it succeeds; everything pip printed if it fails: with -q, pip leaves out the reason of a conflict.
INSTALL = install() { $(BIN)/python -m pip install --disable-pip-version-check "$$@" >$(VENV)/pip.log 2>&1 || \
  { cat $(VENV)/pip.log; exit 1; }; }; install
PINNED = -c constraints/$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
# The tests up to the Plan: they must pass on a machine where JAX can start no backend. Those of whole searches take minutes.
SEARCHES := $(addprefix tests/plan/, calibration/ candidates/ $(addsuffix .py, test_alternatives test_family_prices test_local_search \
  test_partial_remat test_plan test_ring_search test_schedule_search test_search))
PLANNING := $(filter-out $(SEARCHES), $(wildcard tests/test_house.py tests/test_api.py tests/test_docs.py tests/test_dist.py \
  tests/trace tests/hardware tests/plan/*/ tests/plan/test_*.py))

# What PART=versions leaves of both: what a version of Python, JAX or Flax changes. `make check` runs what reads jaxprs and models XLA's
# partitioner; `make test` the oracles (the numbers of one device, XLA's collectives, bit-equal round trips) and the examples of the pages.
ifdef PART
PLANNING := $(addprefix tests/, trace plan/sharding plan/spmd)
VERSIONS := $(addprefix tests/, jit byo stack check step/replay step/pipeline step/attention step/test_accumulation.py train/state \
  train/store train/test_init.py train/test_parity.py decoding/test_decoder.py decoding/test_generate.py processes test_api.py \
  test_compat.py test_docs.py test_errata.py)
endif

# `make check test` runs no test twice: of what `make check` ran, `make test` runs what was left out there, for want of devices.
CHECKED := $(if $(filter check, $(MAKECMDGOALS)), --checked="$(PLANNING)")

# The digests of tests/frozen: behavior that a refactoring must leave as it is.
FROZEN := $(PYTEST) -n 2 --dist worksteal -o faulthandler_timeout=0 -m 'slow or not slow' tests/frozen

.PHONY: help install train test check golden freeze frozen slow browser bench bench-peers lint types doctest docs dist clean

help:
	@echo 'make train   train a small GPT on this machine (ARGS="--steps 50" are passed on)'
	@echo 'make test    everything a change must pass; make check: the part of it that takes under two minutes;'
	@echo '             PART=versions: of both, what depends on the versions of Python, JAX and Flax'
	@echo 'make frozen  compare programs, plans, prices and texts with the golden digests; make freeze writes them'
	@echo 'make slow    every case of the large matrices, and the long campaigns'
	@echo 'make bench   Spanax beside its peers on this machine; make bench-peers installs PyTorch and transformers for it'
	@echo 'make browser the tests of pages and of the site in a browser'
	@echo 'make lint    format, rules of ruff, spelling'
	@echo 'make golden  write the golden files anew; read the diff before it is committed'
	@echo 'make docs    build the site into build/docs; every warning is an error'
	@echo 'make dist    build sdist and wheel, install the wheel into an empty environment and train with it'
	@echo 'make clean   remove caches and build outputs (not $(VENV))'

install: $(STAMP)

$(STAMP): pyproject.toml constraints/py311.txt constraints/py312.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Spanax needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into $(VENV) with $$($(PYTHON) --version); once, a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[dev]' $(PINNED)
	@touch $@

train: $(STAMP)
	$(BIN)/spanax train gpt-nano $(ARGS)

# Two processes: one alone leaves a core idle while it traces. Each begins with half, and takes from the other at the end.
test: $(if $(PART),,lint types) doctest
	$(PYTEST) -n 2 --dist worksteal $(CHECKED) $(VERSIONS) $(ARGS)

check: $(if $(PART),$(STAMP),lint types)
	JAX_PLATFORMS=none_such $(PYTEST) -n 2 --dist worksteal $(PLANNING) $(ARGS)

golden: $(STAMP)
	SPANAX_GOLDEN=update $(PYTEST) $(shell grep -rl --include='test_*.py' SPANAX_GOLDEN tests) $(ARGS)
	SPANAX_GOLDEN=update $(PYTEST) -m slow tests/check/test_frozen.py
	SPANAX_GOLDEN=update $(PYTEST) -m slow tests/byo -k every_preset
	SPANAX_GOLDEN=update $(PYTEST) -m slow tests/test_guides.py
	$(BIN)/python benchmarks/diagrams.py

freeze: $(STAMP)
	SPANAX_GOLDEN=update $(FROZEN) $(ARGS)

frozen: $(STAMP)
	$(FROZEN) $(ARGS)

slow: $(STAMP)
	$(PYTEST) -m slow -o faulthandler_timeout=0 $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/peers $(ARGS)

# In an environment of their own: no test needs them. PyTorch offers builds for CPUs to the newest Pythons last.
bench-peers:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --disable-pip-version-check -r benchmarks/peers/requirements.txt

browser: docs
	@command -v chromium >/dev/null || echo 'there is no Chromium: apt-get install chromium, and these tests run instead of being left out'
	@$(INSTALL) -e '.[$@]' $(PINNED)
	$(PYTEST) tests/show/test_browser.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell README.md CHANGELOG.md CODE_OF_CONDUCT.md CONTRIBUTING.md SECURITY.md docs src

types: $(STAMP)
	$(BIN)/mypy

# tests/conftest.py is named so that doctests, too, run on 8 simulated devices. Packages that can be called show the docstring of
# their function, whose examples run where it is defined.
doctest: $(STAMP)
	$(PYTEST) -n 2 --dist worksteal --doctest-modules src/spanax tests/conftest.py $(foreach name,check jit plan stack trace,--deselect src/spanax/$(name)/__init__.py)

docs: $(STAMP)
	@$(INSTALL) -e '.[$@]' $(PINNED)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

dist: $(STAMP)
	@$(INSTALL) -e '.[$@]' $(PINNED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	SPANAX_DIST=dist $(PYTEST) -m slow tests/test_dist.py

clean:
	rm -rf .cache build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
