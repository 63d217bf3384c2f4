# Sets up everything from nothing in a virtual environment, then runs the demo or the tests. `make help` lists targets.

PYTHON ?= python3
VENV ?= .venv
TF ?= 2.18.1
HOROVOD := 0.28.1
STYLE_TOOLS := ruff==0.17.6 clang-format==23.1.5

MINOR := $(word 1,$(subst ., ,$(TF))).$(word 2,$(subst ., ,$(TF)))
BIN := $(VENV)/bin
LOG := $(VENV)/setup.log
MARK := $(VENV)/.made-by-hvd_eightbit
# Before PATH is changed, or python3 might be that of an environment made earlier.
PYTHON_MINOR := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# Other settings, another environment: a stamp of one must not stand for another.
STAMP := $(VENV)/.stamp-tf$(TF)-py$(PYTHON_MINOR)
export PATH := $(abspath $(BIN)):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# tensorflow-cpu exists for x86-64 only; elsewhere the package tensorflow is without CUDA.
TF_PACKAGE := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
# TensorFlow 2.15 brings Keras 2 itself; later ones Keras 3, and Keras 2 as tf_keras.
TF_KERAS := $(if $(filter 2.15,$(MINOR)),,tf-keras==$(MINOR).*)
# Horovod takes MPI in where it can be built and run, and always its embedded Gloo.
HAVE_MPI := $(shell command -v mpirun >/dev/null && command -v mpicxx >/dev/null && echo 1)
# Its jobs are as many as the cores. Left to itself Horovod starts 8, or, as any setting of ours is in MAKEFLAGS, one.
JOBS := $(shell nproc)
HOROVOD_FLAGS := HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
	$(if $(HAVE_MPI),HOROVOD_WITH_MPI=1,HOROVOD_WITHOUT_MPI=1) MAKEFLAGS=-j$(JOBS)
HOROVOD_STAMP := $(STAMP)-horovod$(if $(HAVE_MPI),-mpi)

# The op lies in the checkout, whatever the environment: built for another TensorFlow, or removed, it is built again.
BUILT_FOR := $(shell sed -n 's/.*"tensorflow": "\(.*\)".*/\1/p' hvd_eightbit/_build.json 2>/dev/null)
OP_IS_OURS := $(and $(wildcard hvd_eightbit/_tf_ops.so),$(filter $(TF),$(BUILT_FOR)))

# $(call step,what it does,command): one line on the screen, the noise in the log, its end on the screen if it fails.
define step
	@echo "== $(1)"
	@( $(2) ) >>$(LOG) 2>&1 || { echo "FAILED: $(1). The end of $(LOG):"; tail -n 30 $(LOG); exit 1; }
endef

# $(refuse_foreign): fails if VENV is a folder that was not made here, before anything in it is removed.
refuse_foreign = @[ ! -e "$(VENV)" ] || [ -e "$(MARK)" ] || { \
	echo "VENV=$(VENV) is there and was not made by this Makefile: remove it yourself, or name another folder"; exit 1; }

.NOTPARALLEL:
.PHONY: help demo test lint format clean check always
help:
	@echo "make demo     set up everything, then train on two ranks, float32 against 8 bits"
	@echo "make test     set up everything, then run the tests"
	@echo "make lint     check the style of Python (ruff) and C++ (clang-format)"
	@echo "make format   apply it"
	@echo "make clean    remove the environment and what was built"
	@echo "Settings: PYTHON=$(PYTHON) VENV=$(VENV) TF=$(TF)"

demo: $(STAMP)-package
	horovodrun -np 2 --gloo python examples/train.py --compare none dynamic_tree

test: $(STAMP)-package
	python -m pytest

lint: $(STAMP)-tools
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(wildcard tf_ops/*.h tf_ops/*.cc tf_ops/*.cu)

format: $(STAMP)-tools
	ruff check --fix-only .
	ruff format .
	clang-format -i $(wildcard tf_ops/*.h tf_ops/*.cc tf_ops/*.cu)

clean:
	$(refuse_foreign)
	rm -rf $(VENV) build *.egg-info hvd_eightbit/_tf_ops.so hvd_eightbit/_build.json

check:
	@sh scripts/check-system "$(PYTHON)" "$(MINOR)"

$(STAMP)-python:
	@sh scripts/check-system "$(PYTHON)" "$(MINOR)"
	$(refuse_foreign)
	@rm -rf $(VENV) && mkdir -p $(VENV) && touch $(MARK)
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	$(call step,pip and build tools,python -m pip install --upgrade pip "setuptools<81" wheel "cmake<4")
	@touch $@

$(STAMP)-tensorflow: $(STAMP)-python
	$(call step,TensorFlow $(TF) for CPU,pip install $(TF_PACKAGE)==$(TF) \
		$(if $(TF_KERAS),&& pip install --no-deps "$(TF_KERAS)"))
	@touch $@

$(HOROVOD_STAMP): $(STAMP)-tensorflow
	$(call step,Horovod $(HOROVOD) with Gloo$(if $(HAVE_MPI), and MPI) (about 2 minutes), \
		pip install packaging cloudpickle psutil pyyaml cffi && \
		$(HOROVOD_FLAGS) pip install --no-build-isolation --no-cache-dir --no-binary horovod --force-reinstall --no-deps \
		horovod==$(HOROVOD))
	@touch $@

# Editable: the Python files are those of the checkout, and only the op is built. What the tests need includes what the
# demo needs, so the op is built once for both.
$(STAMP)-package: $(HOROVOD_STAMP) setup.py pyproject.toml $(wildcard tf_ops/*) $(if $(OP_IS_OURS),,always)
	$(call step,hvd_eightbit with its op and test packages,pip install --no-build-isolation -e ".[test]")
	@touch $@

$(STAMP)-tools: $(STAMP)-python
	$(call step,ruff and clang-format,pip install $(STYLE_TOOLS))
	@touch $@
