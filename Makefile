PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
DATA ?= .
# Two thirds of the tests' time would be compiling. test-full compiles as users do.
QUICKLY := --xla_backend_optimization_level=0
# Beside the other environment: where a compiler is installed, JAX looks for its devices at every start.
COMPILERS := $(VENV)/compilers
# uv installs in a tenth of pip's time, where it is there and reaches the packages.
install = (command -v uv > /dev/null && (uv pip install --quiet --python $(1) $(2) || (echo "uv could not; pip tries"; false))) || $(1) -m pip install --quiet --disable-pip-version-check $(2)
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

# make hands what stands behind it to every program, and launch/slurm.sbatch would take that PYTHON.
unexport PYTHON VENV ARGS DATA

.PHONY: train help compilers test test-full test-commands test-compilers test-tpu test-gpu test-postgres lint bench faults results

train: $(VENV)/.run  ## train on synthetic images; ARGS="--config configs/eurosat.py ..." for anything else
	$(BIN)/python train.py $(ARGS)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' Makefile

compilers: $(COMPILERS)/.done  ## for --compile_for: .venv/compilers/bin/python train.py --config ... --compile_for h200

test: $(VENV)/.dev  ## for every change: each module, with real processes and real data; minutes on 2 cores
	XLA_FLAGS="$(XLA_FLAGS) $(QUICKLY)" $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-full: $(VENV)/.dev  ## what `test` leaves out: pods, a fresh clone, PostgreSQL, a browser, long resumes, short faults
	$(BIN)/python -m pytest -n 2 --dist worksteal -m full $(ARGS)

test-compilers: $(VENV)/.dev $(COMPILERS)/.done  ## three configs compiled for TPUs and a GPU, with what must be found if it is wrong
	$(COMPILERS)/bin/python -m pytest -n 2 --dist worksteal -m compilers tests/hardware tests/test_commands.py $(ARGS)

test-commands: $(VENV)/.dev  ## every command of the pages and of docstrings, on few small images; a quarter of an hour
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "full or commands" tests/test_commands.py $(ARGS)

test-tpu: $(VENV)/.dev $(COMPILERS)/.done  ## every config compiled for TPUs; no TPU is needed
	$(COMPILERS)/bin/python -m pytest tests/hardware -m "compilers or tpu" -k "not h200" $(ARGS)

test-gpu: $(VENV)/.dev $(COMPILERS)/.done  ## every config compiled for a GPU; no GPU is needed
	$(COMPILERS)/bin/python -m pytest tests/hardware -m "compilers or gpu" -k "h200" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.run  ## throughput beside the plain way and the hardware limit
	$(BIN)/python bench.py step $(ARGS)

results: $(VENV)/.run  ## measures the tables of docs/results.md anew, in hours; goes on where it was killed. DATA is the folder of the zips
	$(BIN)/python bench.py results --path runs/results --data $(DATA) $(ARGS)

test-postgres: $(VENV)/.dev  ## studies in PostgreSQL; installs the server on Debian and Ubuntu
	test -n "$$(ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null || command -v initdb)" || $(SUDO) apt-get install -y --no-install-recommends postgresql
	$(BIN)/python -m pytest -m full tests/studies/test_postgres.py $(ARGS)

faults: $(VENV)/.dev  ## the long part of the fault harness, hours on 2 cores; figures in faults.jsonl
	rm -f faults.jsonl
	FAULT_FIGURES=$(CURDIR)/faults.jsonl $(BIN)/python -m pytest tests/faults -m faults -n 2 $(ARGS)
	cat faults.jsonl

$(VENV)/.run: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed, this is " + sys.version.split()[0] + "; give another by PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing requirements.txt in $(VENV): a minute or more"
	@$(call install,$(BIN)/python,-r requirements.txt)
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	@echo "installing requirements-dev.txt in $(VENV): a minute or more"
	@$(call install,$(BIN)/python,-r requirements-dev.txt)
	touch $@

$(COMPILERS)/.done: requirements-tpu.txt requirements-cuda.txt $(VENV)/.run
	$(PYTHON) -m venv $(COMPILERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > $$($(COMPILERS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/project.pth
	@echo "installing the compilers of TPUs and GPUs in $(COMPILERS): some minutes"
	@$(call install,$(COMPILERS)/bin/python,-r requirements-tpu.txt -r requirements-cuda.txt)
	touch $@
