# `make demo` and `make test` set themselves up: Python >= 3.11 and make are all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two processes of one thread each: tests are small, and threads would only wait for one another.
TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Another transformers than that of constraints.txt: by default the oldest the package allows.
VERSION ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OTHER := .venv-transformers-$(VERSION)
WITH_TRANSFORMERS := tests/models tests/parity tests/test_train.py tests/test_runs.py

.PHONY: demo test test-transformers check format clean

# Resumable: what is trained is not trained again.
RECALL := $(addprefix runs/demo-recall-,sliding-window full-attention ovq)
demo: $(READY)
	@$(BIN)/ovq build || echo "going on without it: everything works, slower"
	@for run in $(RECALL); do $(BIN)/ovq train $$(basename $$run) || exit $$?; done
	$(BIN)/ovq evaluate $(RECALL)
	$(BIN)/ovq report $(RECALL) --output runs/demo-report
	$(BIN)/ovq train demo-book
	$(BIN)/ovq generate runs/demo-book --held-out 4000 --max-new-tokens 200

test: $(READY)
	@$(BIN)/ovq build || echo "going on without it: its tests are skipped"
	$(TEST) -m "not plain" --jaxtyping-packages=ovq,beartype.beartype
	JAXTYPING_DISABLE=1 $(TEST) -m plain

# `make test-transformers VERSION=5.20.2` for another; each has an environment of its own.
test-transformers: BIN := $(OTHER)/bin
test-transformers: $(OTHER)/.ready
	@$(BIN)/python -c 'import transformers as t; print("transformers", t.__version__)'
	$(TEST) -m "not plain" --jaxtyping-packages=ovq,beartype.beartype $(WITH_TRANSFORMERS)
	JAXTYPING_DISABLE=1 $(TEST) -m plain $(WITH_TRANSFORMERS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch is named first and pinned, so that no other package chooses its build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: Python >= 3.11 is needed, got $$($(PYTHON) --version); name one with PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev]' -c constraints.txt
	@touch $@

# What depends on the version of transformers finds its own.
$(OTHER)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -Ev '^(transformers|huggingface_hub|tokenizers)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet torch -c $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --editable '.[train]' 'transformers==$(VERSION)' \
	  beartype hypothesis pytest pytest-xdist -c $(OTHER)/constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-transformers-* runs build dist src/*.egg-info
