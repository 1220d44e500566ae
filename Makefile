# `make` lists every command. Needs Python 3.11 or later, and make. Writes .venv, runs/ and tokens/ here; outside this
# folder it writes only to the user's cache folder (downloads, compiled programs).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

EXTRAS := tpu gpu ray datasets wandb s3 gcs buckets sentencepiece serve evaluate metrics site parity lock
# Size of the packages of requirements.txt: `du -sm .venv`.
PACKAGES_MB := 1100
PROGRESS_S = $(if $(shell [ -t 2 ] && echo terminal),1,20)
# Install a lock file with pip, and show how far it is: on a line that changes, or elsewhere as a line every 20 s. The
# watching process ends with its parent. Of pip's output, .venv/pip.log, only errors are shown.
define PIP_INSTALL
	@all=$$({ grep -o '^[^ =]*==' $(1) || true; } | sort -u | wc -l); \
	watch() { \
		while kill -0 $$$$ 2> /dev/null; do \
			got=$$(grep -cE '^(Collecting|Requirement already)' .venv/pip.log || true); line="  $$got of $$all packages downloaded"; \
			if grep -q '^Installing collected' .venv/pip.log; then \
				got=$$(ls -d .venv/lib/python*/site-packages/*.dist-info | grep -vcE '/(pip|setuptools)-' || true); \
				line="  $$got packages and $$(du -sm .venv | cut -f 1) MB are in .venv"; \
			fi; \
			if [ -t 2 ]; then printf '\r%s ' "$$line" >&2; else echo "$$line" >&2; fi; \
			sleep $(PROGRESS_S) > /dev/null 2>&1; \
		done; \
	}; \
	: > .venv/pip.log; watch & trap "kill $$! 2> /dev/null; [ ! -t 2 ] || echo >&2" EXIT; \
	.venv/bin/python -u -m pip install --disable-pip-version-check --require-hashes --no-deps -r $(1) \
		> .venv/pip.log 2>&1 || { sed -n '/^ERROR/,$$p' .venv/pip.log >&2; exit 1; }
endef
TORCH := torch==2.13.0 accelerate==1.15.0
COMPILE := .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
SHELL_FILES := $(wildcard .ci/run *.sh */*.sh */*.sbatch)
DAY ?= $(shell date -u +%u)
OWN_VENV = @if [ -L .venv ]; then \
	echo "error: .venv is a link to $$(readlink .venv), and installing would change the packages there; remove the" \
		"link (rm .venv), and make installs its own .venv" >&2; \
	exit 1; \
fi
ARGS ?= # extra arguments for train, plan, chapters, site, the tests and lock

.PHONY: help train plan chapters site pages read notebooks test test-more test-all test-tpu test-tpu-all test-rotation rehearse \
	test-site lint format lock clean extra-browser extra-torch $(EXTRAS:%=extra-%)

help: ## list every command
	@awk -F ':.*## ' '/^[^#\t]*:.*## / {printf "make %-23s %s\n", $$1, $$2}' Makefile
	@printf '%-28s %s\n' "make extra-NAME" "add optional packages to .venv: $(EXTRAS) torch"
	@echo "After \`source .venv/bin/activate\`, each with --help:"
	@awk -F ' *#: ' '/^# python .*#: / {printf "%-28s %s\n", substr($$1, 3), $$2}' Makefile

# python main.py #: train a preset, or resume a run; --config reuses a run's settings
# python -m generate #: sample from a run
# python -m serve #: serve a run over HTTP with an OpenAI-compatible API; needs extra-serve
# python -m data.prepare #: tokenize text
# python -m data.check #: verify and summarize tokens
# python -m data.train_tokenizer #: train a tokenizer on text; needs extra-parity
# python -m data.tasks #: list the named tasks, or print examples of one
# python -m train.report #: plot one or more runs together
# python -m train.selfcheck #: check that all hosts of a launch are ready to train
# python -m plan.profile #: print where the time of recorded steps went: planned, simulated and measured
# python -m train.checkpoint #: list or verify the checkpoints of a run
# python -m weights #: convert weights to and from Hugging Face, or extract them from a run
# python -m evaluate #: evaluate answers to tasks, lm-evaluation-harness tasks (needs extra-evaluate), or the loss on any tokens
# python -m plan #: predict memory, communication and step time of a mesh; without arguments: the presets' sizes
# python -m plan.traced #: plan any JAX program from its trace, before you pay for accelerators
# python -m plan.replay #: simulate any TPU program from its compiled text: seconds by cause and by source line, peak memory
# python -m pipeline #: print, plot and compare pipeline schedules
# python -m tests.parity #: compare training on a mesh with training on one device
# python -m tests.fuzz #: the same for random meshes and models
# python -m bench.step #: measure a training step on simulated devices
# python -m bench.data #: measure reading tokens and tokenizing, and compare with raw file reads and with tiktoken
# python -m bench.documents #: plan attention over packed documents, with both ways to deal them over context
# python -m bench.gpu #: measure this trainer and a torch trainer alternately, on one GPU
# python -m bench.report #: measure what an accelerator reaches, beside the planner's numbers; writes one JSON file
# python -m bench.overlap #: print how much communication the TPU compiler overlaps with compute; needs extra-tpu
# python -m bench.grouped #: compare the grouped matmul of the experts with jax.lax.ragged_dot; needs extra-tpu
# python -m bench.muon #: plan what Muon costs beside AdamW on eight meshes
# python -m bench.options #: print which compiler option overlaps which collective on which TPU; needs extra-tpu
# python -m bench.partition #: compare hand-written collectives with those that the compiler chooses
# python -m bench.peers #: simulate our steps of Llama, Mixtral and a long context beside MaxText's; needs extra-tpu
# python -m bench.plan #: compare planned step times with simulated compiled schedules; needs extra-tpu
# python -m bench.published #: plan the steps that others measured, and write docs/published*.md
# python -m bench.schedules #: measure each pipeline schedule, and compare it with its prediction
# python -m bench.serve #: measure the serving engine and transformers' generate alternately; needs extra-parity and torch
# python -m bench.soak #: kill and resume a run repeatedly, and check that results stay bitwise identical
# python bench/deadlock.py #: reproduce a deadlock of simulated devices with JAX alone
# python -m docs.eight_meshes #: train one model on eight meshes, and plot the figure in the README
# python -m docs.settings #: write docs/settings.md from config/
# python -m docs.readme #: write the table of chapters in README.md, and the public addresses there, in CITATION.cff and in docs/
# python -m docs.previews #: write the pictures and tables that docs/*.md show outside of the site
# python -m chapters #: run the chapters of the guide, and print how long each takes
# python -m docs.pages #: build the site, and commit it to a local branch; needs extra-site
# python -m docs.build #: build the guide's site from its chapters, and serve it; needs extra-site
# python -m docs.layer_timeline #: simulate the schedules for the layer timeline page; needs extra-tpu
# python -m docs.notebooks #: write the chapters as notebooks; needs extra-site

train: .venv/installed ## train the laptop preset on the Python standard library (3 minutes on 2 cores)
	.venv/bin/python -m data.prepare --source stdlib --tokenizer bytes --out tokens/stdlib-bytes
	.venv/bin/python main.py laptop $(ARGS)

plan: .venv/installed .venv/extra-tpu ## plan the main training run and compile it for 32 TPU chips (1 minute; needs no TPU)
	.venv/bin/python -m plan moe1b --topology v4:4x4x2 --compile $(ARGS)

chapters: .venv/installed ## run the chapters of the guide, and print how long each takes (12 minutes); ARGS="03 04" runs two
	.venv/bin/python -m chapters $(ARGS)

site: .venv/installed .venv/extra-site ## build the guide into docs/_build/html; runs the chapters that have changed
	.venv/bin/python -m docs.build $(ARGS)

pages: .venv/installed .venv/extra-site ## build the guide, and commit it to the local branch gh-pages; pushes nothing
	.venv/bin/python -m docs.pages $(ARGS)

read: .venv/installed ## serve the guide on this machine, and print its address
	.venv/bin/python -m docs.build --read $(ARGS)

notebooks: .venv/installed .venv/extra-site ## write the chapters as notebooks into notebooks/
	.venv/bin/python -m docs.notebooks $(ARGS)

# Each test belongs to only one of these targets: test, test-long, test-more, test-tpu, test-rotation of seven days, rehearse and test-site.
test: .venv/installed ## run the tests that are quick or protect most (11 minutes on 2 slow cores); ARGS="-k report -x" goes to pytest
	.venv/bin/python -m pytest -m "not (tpu or site or launch or slow or extra or rotation or long)" $(ARGS)

test-long: .venv/installed ## run the tests that make test skips because they take long (49 minutes on 2 slow cores)
	.venv/bin/python -m pytest -m "long and not (tpu or site or launch or slow or extra or rotation)" $(ARGS)

test-more: .venv/installed .venv/extra-serve .venv/extra-buckets .venv/extra-metrics .venv/extra-datasets ## run the tests that make test skips: slow tests, light extras (13 minutes)
	.venv/bin/python -m pytest -m "(slow or extra) and not (tpu or site or launch or rotation)" $(ARGS)

test-all: .venv/installed ## run all tests that need no TPU compiler, including repeats; skip tests whose extras are missing
	.venv/bin/python -m pytest $(ARGS)

test-rotation: .venv/installed .venv/extra-tpu .venv/extra-site ## run a seventh of the repeats and of the tests that need a large package; DAY=1..7
	extras=$$(.venv/bin/python -m tests.rotation $(DAY)); $(MAKE) .venv/installed $$extras
	.venv/bin/python -m pytest -m rotation --day $(DAY) $(ARGS)

test-tpu: .venv/installed .venv/extra-tpu ## run the tests that need the TPU compiler (a 700 MB package; needs no TPU; 10 minutes)
	.venv/bin/python -m pytest -m "tpu and not repeat" $(ARGS)

test-tpu-all: .venv/installed .venv/extra-tpu ## run all tests that need the TPU compiler, including repeats
	.venv/bin/python -m pytest -m tpu $(ARGS)

rehearse: .venv/installed ## test the launch scripts over ssh, on simulated hosts (10 minutes); needs openssh-server and tmux
	.venv/bin/python -m pytest -m "launch and not repeat" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-site: .venv/extra-browser ## run the chapters, build the guide, and test it in a headless browser (14 minutes)
	.venv/bin/python -m docs.build --longest_s 0
	.venv/bin/python -m pytest -m "site and not repeat" -n 0 $(ARGS)

lint: .venv/installed ## check style with ruff and shellcheck
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m ruff format --check --line-length 110 model.py
	$(if $(SHELL_FILES),.venv/bin/shellcheck --external-sources $(SHELL_FILES))

format: .venv/installed ## fix style with ruff
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format
	.venv/bin/python -m ruff format --line-length 110 model.py

lock: .venv/extra-lock ## write requirements.txt and requirements/ from pyproject.toml; ARGS=--upgrade for newer versions
	$(COMPILE) $(ARGS) pyproject.toml --output-file requirements.txt
	for name in $(EXTRAS); do \
		$(COMPILE) $(ARGS) --group "$$name" --constraint requirements.txt --output-file "requirements/$$name.txt"; \
	done

clean: ## remove .venv, caches and the built site; keep runs/ and tokens/
	rm -rf .venv .ruff_cache docs/_build notebooks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp file is written last, so make repeats an install that was interrupted or is older than the lock file.
.venv/installed: requirements.txt
	$(OWN_VENV)
	@for python in python3.11 python3.12 python3 none; do \
		"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && break; \
	done; \
	if [ "$$python" = none ]; then \
		echo "error: none of python3.11, python3.12 and python3 is Python 3.11 or later with the modules venv" \
			"and ensurepip (on Debian and Ubuntu they come in the package python3-venv)" >&2; \
		exit 1; \
	fi; \
	echo "Installing the $$(grep -o '^[^ =]*==' $< | sort -u | wc -l) packages of $< into .venv with" \
		"$$("$$python" -V): about $(PACKAGES_MB) MB, 1 to 3 minutes, once"; \
	"$$python" -m venv --clear .venv
	$(call PIP_INSTALL,$<)
	@touch $@

$(EXTRAS:%=extra-%): extra-%: .venv/extra-%

$(EXTRAS:%=.venv/extra-%): .venv/extra-%: requirements/%.txt .venv/installed
	$(OWN_VENV)
	@echo "Installing the packages of $< into .venv"
	$(call PIP_INSTALL,$<)
	@touch $@

extra-browser: .venv/extra-browser

# No lock file has torch; pyproject.toml explains why. If this version of torch is installed already, pip keeps it.
extra-torch: .venv/extra-torch

.venv/extra-torch: .venv/installed
	$(OWN_VENV)
	@echo "Installing $(TORCH) into .venv"
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@touch $@

.venv/extra-browser: docs/browser/package.json docs/browser/package-lock.json .venv/extra-site
	$(OWN_VENV)
	@echo "Installing the packages of docs/browser/package-lock.json, a headless Chromium, into docs/_build/browser"
	@mkdir -p docs/_build/browser
	@cp docs/browser/package.json docs/browser/package-lock.json docs/_build/browser
	@PATH="$$PWD/.venv/bin:$$PATH" npm ci --prefix docs/_build/browser --no-audit --no-fund --loglevel=error > /dev/null
	@touch $@
