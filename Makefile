# Two commands are enough: `make lab` to learn, `make test` to check. `make help` lists the others.

PYTHONS = python3 python3.13 python3.12 python3.11 python3.14
PYTHON ?= $(firstword $(foreach p,$(PYTHONS),$(if $(shell command -v $(p)),$(p))))
VENV   ?= .venv
# PyTorch's wheels: cpu (0.2 GB, not 3 GB), pip (the ordinary index's), cu128 and the like. Empty
# keeps what is there; the first time it is cpu where Linux has no nvidia-smi, else pip.
TORCH  ?=
# Where `make lab` serves; the next free port is taken when this one is busy.
PORT   ?= 8888
# Test files that run at the same time; empty means one more than there are cores.
JOBS   ?=
# Labs, "03 06": what make test leaves out of their tests, and nothing else; empty means all tests.
STEMS  ?=
# pip fetches uv where it is missing. An index that wants a login gets no answer from either, and
# setup.py says so.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
# Python keeps its bytecode, or each process would compile torch and our modules again, 5 s.
unexport PYTHONDONTWRITEBYTECODE

# A path may hold spaces, so make's own functions, which split at them, are of no use here.
PY      = "$(VENV)/bin/python"
INSIDE  = PATH="$$(cd "$(VENV)" && pwd)/bin:$$PATH"
# Without a screen a text browser would take over the terminal; the address is printed anyway.
SCREEN  = $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname)))
# Jupyter refuses to run as root unless told; in a container root is the usual user.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

# The first time JupyterLab opens the tour, later the folder.
FIRST   := $(if $(wildcard work),,--first)

.PHONY: help setup work lab tour test sweep soak check build slides site pythons gpu bench horovod \
	slurm doctor clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@echo "  options:      TORCH=cpu|pip|cu128  PYTHON=python3.12  PORT=8888  JOBS=3  STEMS='03 06'"
	@echo "                REPOSITORY=https://github.com/owner/name (for make site)"

setup:
	@[ -n "$(PYTHON)" ] || { echo "No Python found: install Python 3.11 or newer," \
		"then run the same command again."; exit 1; }
	@$(PYTHON) scripts/setup.py --venv "$(VENV)" --torch "$(TORCH)"

work: setup ## your copies of the labs, in work/, for an editor of your own
	@$(INSIDE) $(PY) -m ranklab.cli work

# With our configuration Jupyter does not begin by asking whether to fetch news.
lab: work ## open JupyterLab on your copies of the labs, in work/ (the first run installs)
	@$(INSIDE) JUPYTER_CONFIG_PATH="$(CURDIR)/scripts/jupyter" $(PY) scripts/lab.py $(FIRST) \
		--port=$(PORT) $(if $(SCREEN),,--no-browser) $(AS_ROOT)

tour: setup ## the course in a minute: four ranks, one loss, a hang that is named, five layouts
	@$(INSIDE) $(PY) -m ranklab.cli tour

test: setup ## everything: the tests, with the unsolved labs, and every solution
	@$(INSIDE) $(PY) scripts/test.py $(if $(JOBS),--jobs $(JOBS))

sweep: setup ## make test, and what it leaves out: all mistakes, rehearsals, slides, figures
	@$(INSIDE) $(PY) scripts/test.py $(if $(JOBS),--jobs $(JOBS)) --sweep --stems "$(STEMS)"

soak: setup ## lab 14's training disturbed 100 times; it must end the same (half an hour)
	@$(INSIDE) $(PY) -m ranklab.projects.resilience --soak 100

check: setup ## no notebooks and no slow tests, five minutes, for while you work
	@$(INSIDE) $(PY) scripts/test.py $(if $(JOBS),--jobs $(JOBS)) --fast

build: setup ## labs/ and solutions/ from labs/source/ and the library
	@$(INSIDE) $(PY) -m ranklab.cli build

slides: setup ## the decks to HTML (and PDF where chromium is) under build/slides/
	@$(INSIDE) $(PY) slides/build.py

site: setup ## solved labs, decks, questions, a planner: web pages under build/site/
	@$(INSIDE) $(PY) site/build.py

pythons: ## make work and make test under Python 3.13 and 3.14, in two Debians; as root (an hour)
	@bash scripts/pythons.sh

gpu: setup ## what this machine's GPUs do with the course, MINUTES=10: build/gpu/report.md
	@$(INSIDE) $(PY) scripts/gpu --minutes $(or $(MINUTES),10)

bench: setup ## print ratios of running times; nothing is asserted
	@$(INSIDE) $(PY) scripts/bench.py

horovod: setup ## build the real Horovod for lab 05 (4 to 8 minutes, once) and compare with it
	@$(INSIDE) $(PY) scripts/horovod.py
	@$(INSIDE) $(PY) -m pytest -q -rs tests/test_horovod_real.py

slurm: setup ## lab 15 on a real Slurm inside this machine, as root; it loses a node (2 minutes)
	@$(INSIDE) $(PY) -m pytest -q -rsP -n 2 --sweep tests/test_cluster_slurm.py \
		tests/test_cluster_systems.py::test_two_hosts_train_and_go_on_from_their_checkpoint

doctor: setup ## what this machine is, and what each lab will run on
	@$(INSIDE) $(PY) -m ranklab.cli doctor

clean: ## remove what was built here (not work/, not .ranklab/)
	rm -rf build "$(VENV)" slides/node_modules site/node_modules
