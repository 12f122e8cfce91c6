# Every target sets up what it needs by itself, in .venv. Needed beforehand: make and Python 3.11 or newer.
# Arguments pass through: make test ARGS="-k layout"    make demo ARGS="--steps 5"    make PYTHON=python3.13 test
# Another torch gets an environment of its own, of gigabytes: make test TORCH=2.15.0

PYTHON ?= python3
ARGS ?=
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)

VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# hypothesis draws constants of local code, too; code in folders of this name counts as installed.
TRITON := $(VENV)/triton/site-packages
FLASH := $(VENV)/flash/site-packages
ONNX := $(VENV)/onnx/site-packages
VISION := $(VENV)/vision/site-packages
SITE := $(VENV)/docs
RELEASE := $(VENV)/release
# Build isolation would install a torch of its own choice; `setuptools` comes from the constraints instead. Modules are compiled
# when they are first imported: of 17,000 most never are.
PIP := $(PY) -m pip install --no-compile
CONSTRAINTS := build/constraints-$(TORCH).txt
INSTALL := $(PIP) --quiet --constraint $(CONSTRAINTS) --no-build-isolation

# The workers share the cores, so each runs torch and the C++ compiler on one thread; that the compiler has the vectors of the
# processor is taken for granted, as building a program for each kind of them takes ten seconds.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 \
	$(PY) -m pytest --numprocesses auto --dist worksteal
KERNELS := PYTHONPATH=$(TRITON) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/kernels TRITON_CACHE_DIR=$(CURDIR)/build/kernels/triton

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/inductor
# Whatever the shell says: the next run, and each process that a test starts, need not compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo browser test test-kernels test-interpreted test-compiled test-flash test-onnx guard bench lint format types docs pictures release clean
# One environment serves every target: two installs at once would break it.
.NOTPARALLEL:
.SUFFIXES:

help:  ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

demo: $(VENV)/.demo  ## Train a small LongNet on Python's own source text; results in demo-out/
	$(PY) docs/examples/train_longnet.py $(ARGS)

# The viewer's tests drive a browser. Where none is found they are skipped, but fail where CI=true.
browser:  ## Install chromium for the viewer's tests, on Debian and its like and as root; nothing to do where one is found
	@for name in chromium chromium-browser google-chrome chrome; do \
		if command -v $$name; then exit 0; fi; \
	done; apt-get update && apt-get install --yes --no-install-recommends chromium

test: $(VENV)/.test $(VISION)/.ready  ## Run the tests
	$(PYTEST) $(ARGS)

# Triton lies beside the other packages, where only these two processes look for it, unless a build of torch for CUDA has brought
# its own. Where there is none for this machine, the tests are skipped and say so (pytest's status 5). Whether kernels are
# interpreted or compiled is decided when Triton is imported.
test-kernels: test-interpreted test-compiled  ## Test the kernels made for an H200 without one; all of them by ARGS=--all

test-interpreted: $(VENV)/.test $(TRITON)/.ready  ## Run these kernels in Triton's interpreter
	$(KERNELS) TRITON_INTERPRET=1 $(PYTEST) tests/interpreted/test_kernels.py tests/interpreted/test_listed_keys.py tests/interpreted/test_without_triton.py $(ARGS) || [ $$? -eq 5 ]

test-compiled: $(VENV)/.test $(TRITON)/.ready  ## Compile these kernels, and hold their code and their programs to account
	$(KERNELS) TRITON_INTERPRET=0 $(PYTEST) tests/interpreted/test_code.py tests/interpreted/test_program.py $(ARGS) || [ $$? -eq 5 ]

# FlashAttention's kernels are compiled for devices that are not there, for minutes each; cases that are recorded are left out.
test-flash: $(VENV)/.test $(FLASH)/.ready  ## Compile the kernels of engine "flash" without a device, with TORCH=2.15.0 or later
	PYTHONPATH=$(FLASH):$(FLASH)/nvidia_cutlass_dsl/dsl_packages $(PY) -m tests.interpreted.flash_code $(ARGS)

test-onnx: $(VENV)/.test $(ONNX)/.ready  ## Export models to ONNX, and run the files by onnx's own evaluator
	PYTHONPATH=$(ONNX) $(PYTEST) tests/attend/test_onnx.py $(ARGS)

guard: $(VENV)/.test  ## See within seconds whether anything became twice as slow
	$(PY) -m bench guard $(ARGS)

bench: $(VENV)/.test  ## Measure against the targets; results in bench/results/
	$(PY) -m bench $(ARGS)

lint: $(VENV)/.dev  ## Check style and formatting
	$(PY) -m ruff check $(ARGS)
	$(PY) -m ruff format --check

format: $(VENV)/.dev  ## Format, and mend what ruff can mend
	$(PY) -m ruff check --fix-only --quiet
	$(PY) -m ruff format $(ARGS)

types: $(VENV)/.dev  ## Check the types
	$(PY) -m pyright --pythonpath $(PY) $(ARGS)

# The theme announces its successor at each build; the variable is its own way to say that this was read.
docs: $(SITE)/.ready  ## Build the documentation's site in build/site, from docs/ and the docstrings
	PYTHONPATH=$(SITE) NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build $(ARGS)

pictures: $(VENV)/.test browser  ## Draw the documentation's pictures again, in some minutes
	set -e; for each in docs/images/make_*.py; do echo $$each; $(PY) -m docs.images.$$(basename $$each .py); done
	$(PY) -m bench pictures

release: $(VENV)/.dev $(RELEASE)/.ready  ## Build dist/, and hold what it installs to the whole suite
	.ci/release $(ARGS)

clean:  ## Remove builds and caches; .venv and demo-out/ stay
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find bench docs flexdilated masks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(TRITON)/.ready: $(READY) tests/interpreted/constraints.txt
	rm -rf $(TRITON)
	@mkdir -p $(TRITON)
	@$(PY) -c 'import triton' 2>/dev/null && touch $@ \
		|| $(PIP) --quiet --no-deps --target $(TRITON) --requirement tests/interpreted/constraints.txt && touch $@ \
		|| echo "Triton was not installed: the tests of its kernels will be skipped."

$(FLASH)/.ready: $(READY) tests/interpreted/flash_constraints.txt
	rm -rf $(FLASH)
	$(PIP) --quiet --no-deps --target $(FLASH) --requirement tests/interpreted/flash_constraints.txt
	@touch $@

$(ONNX)/.ready: $(READY) tests/attend/onnx_constraints.txt
	rm -rf $(ONNX)
	$(PIP) --quiet --no-deps --target $(ONNX) --requirement tests/attend/onnx_constraints.txt
	@touch $@

# timm and torchvision, whose import fails beside a torch without CUDA: tests/support/vision.py says what the tests do. Beside
# them lies dilated-attention-pytorch, whose xformers would bring another torch.
$(VISION)/.ready: $(READY) tests/integrations/convert/constraints.txt
	rm -rf $(VISION)
	@mkdir -p $(VISION)
	@$(PIP) --quiet --no-deps --target $(VISION) --requirement tests/integrations/convert/constraints.txt \
		&& touch $@ || echo "timm was not installed: the tests of its models, and of dilated-attention-pytorch, will be skipped."

$(SITE)/.ready: $(READY) docs/constraints.txt
	rm -rf $(SITE)
	$(PIP) --quiet --no-deps --target $(SITE) --requirement docs/constraints.txt
	@touch $@

$(RELEASE)/.ready: $(READY) .ci/constraints.txt
	rm -rf $(RELEASE)
	$(PIP) --quiet --no-deps --target $(RELEASE) --requirement .ci/constraints.txt
	@touch $@

# Some releases of torch ask for an older setuptools than the pinned one.
$(CONSTRAINTS): constraints.txt
	@mkdir -p $(@D)
	@sed $(if $(filter $(PINNED),$(TORCH)),,-e '/^setuptools==/d') -e 's/^torch==.*/torch==$(TORCH)/' $< >$@

# The first half of the set-up: an environment with one torch and nothing that could choose another.
$(READY): constraints.txt | $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
		echo "flexdilated needs Python 3.11 or newer, with its venv module; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
		echo "Name another one: make PYTHON=python3.13 ..."; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once."
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --quiet --constraint $(CONSTRAINTS) --upgrade pip
	$(PIP) --constraint $(CONSTRAINTS) torch 'setuptools>=77.0.3' wheel
	@touch $@

# The second half: the project, editable, with one extra. An install that is interrupted leaves no $(READY) behind, so that
# the next run starts from an empty environment instead of a half-written one; what cannot be resolved has changed nothing,
# as a dry run then fails, too. `mv` keeps its time. An extra holds others, which need no install of their own.
WITH_dev := .test .demo
WITH_test := .demo
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(READY) pyproject.toml | $(CONSTRAINTS)
	@mv $(READY) $(READY).installing
	$(INSTALL) --editable '.[$*]' \
		|| { $(INSTALL) --dry-run --editable '.[$*]' 2>/dev/null || mv $(READY).installing $(READY); exit 1; }
	@mv $(READY).installing $(READY)
	@cd $(VENV) && touch .$* $(WITH_$*)
