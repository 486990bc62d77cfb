PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SPOT ?= tests/data/spot
FRAMEWORKS := .venv-frameworks
# Most integration tests wait for processes of their own, so a little more than the cores are kept busy.
JOBS ?= 3
# How many real Airflows share the files of e2e, beside the demo's own. Chosen: on 2 cores two of them starve
# each other's tests, from 4 cores on two are faster; each has CPU shares of its own.
AIRFLOWS ?= 1

.DEFAULT_GOAL := help
.PHONY: audit locks mutants help venv frameworks-venv test test-frameworks drills e2e e2e-postgres test-kubernetes demo docs simulate bench-deadline lint words types contracts format bench wheel clean

help:  ## List what there is.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: $(VENV)/.ready  ## Make .venv with everything for development.

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --group dev --editable '.[amazon]'
	touch $@

# Apart from .venv, as Airflow and the frameworks pin the same packages. By pip: with torch's wheels for the
# CPU in reach, pip takes those, and the whole is 1.3 GB instead of 6.
frameworks-venv: $(FRAMEWORKS)/.ready  ## Make .venv-frameworks with torch, transformers, Lightning, Keras, Accelerate.

$(FRAMEWORKS)/.ready: dags/examples/frameworks/requirements.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< pytest pytest-timeout pytest-xdist
	touch $@

# The files that take longest, which build images, come first: else a worker begins one when the others are done.
test: venv  ## Run everything that needs no Airflow services (12 minutes on 2 cores).
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		tests/integration tests/contract tests/compat tests/golden tests/simulation tests/unit $(ARGS)

test-frameworks: venv frameworks-venv  ## Run trainings of seven libraries, lost, killed and moved (1.3 GB of environment).
	PYTHONPATH=$(CURDIR):$(CURDIR)/agent $(FRAMEWORKS)/bin/python -m pytest -n $(JOBS) tests/frameworks/inside $(ARGS)
	$(BIN)/python -m pytest -n $(JOBS) tests/frameworks/test_plain_savers.py tests/frameworks/test_moved_and_interrupted.py $(ARGS)

drills: venv  ## Break real runs of this machine by every fault of envscaler drill (10 minutes).
	$(BIN)/python -m pytest tests/drills tests/e2e/test_drills.py $(ARGS)

e2e: venv  ## Run the rest against a real Airflow (12 minutes on 2 cores).
	$(BIN)/python -m pytest -n $$(($(AIRFLOWS) + 1)) --dist loadfile tests/e2e --ignore tests/e2e/kubernetes --ignore tests/e2e/test_drills.py $(ARGS)

# With Debian's postgresql. Two schedulers, each with workers of its own, and two triggerers share the stages.
e2e-postgres: venv  ## Run the tests that kill, clear and delete on PostgreSQL with two schedulers and triggerers.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt psycopg2-binary asyncpg
	E2E_POSTGRES=1 $(BIN)/python -m pytest tests/e2e/test_kills.py tests/e2e/test_tries.py tests/e2e/test_services.py $(ARGS)

test-kubernetes: venv  ## Run stages on the cluster of KUBECONFIG; see tests/e2e/kubernetes/README.md.
	$(BIN)/python -m pytest tests/e2e/kubernetes $(ARGS)

# A failing seed: make simulate REPLAY=17, with SHRINK=1 for the fewest faults that still break it.
simulate: venv  ## Run the protocol in a simulated world: SEEDS=1000 FROM=1, FRESH=1, CORPUS=1, REPLAY=seed.
	$(BIN)/python -m tests.simulation $(if $(REPLAY),--replay $(REPLAY)) $(if $(CORPUS),--corpus) $(if $(FRESH),--fresh) \
		--seeds $(or $(SEEDS),100) --from $(or $(FROM),1) $(if $(SHRINK),--shrink) $(ARGS)

# A random sample, bounded by time; it writes mutants/, which git ignores.
mutants: venv  ## Change the code one expression at a time, and print what no test notices: MINUTES=110 SEED=1.
	$(BIN)/python -m tests.mutants --minutes $(or $(MINUTES),110) --seed $(or $(SEED),1) $(ARGS)

demo: venv  ## Retrain a text classifier on a real Airflow; SERVE=1 keeps the UI up, BACKEND=kubernetes takes pods.
	@$(BIN)/envscaler demo $(if $(SERVE),--serve) $(if $(BACKEND),--backend $(BACKEND))

# Its links are checked, those to files outside docs/ too. The variable silences a notice on MkDocs 2 of the
# theme's authors, which is not about this site: constraints.txt pins MkDocs 1.
docs: venv  ## Build the documentation as a site into build/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lint: venv words  ## Check style, and what bandit knows of insecure calls.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive envscaler_airflow agent/envscaler_agent docs/_site hatch_build.py

LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --constraint constraints.txt
locks: venv  ## Pin what the images install, with hashes, in the versions of constraints.txt.
	$(BIN)/$(LOCK) --group sidecar-image --output-file envscaler_airflow/images/sidecar-requirements.txt
	$(BIN)/$(LOCK) pyproject.toml --extra amazon --extra kubernetes --group airflow-image --output-file docker/requirements.txt

# Apart from CI: it asks a service for the faults that are known today. In an environment of its own.
audit: venv  ## Check the pinned dependencies for known vulnerabilities.
	$(BIN)/uv tool run --from pip-audit==2.10.1 pip-audit --progress-spinner off --disable-pip --no-deps --requirement constraints.txt

words: venv  ## Check that the prose is plain English; tests/style/words.yaml lists what to avoid.
	$(BIN)/python tests/style/check_words.py

types: venv  ## Check types.
	$(BIN)/mypy

contracts: venv  ## Check which room imports which.
	$(BIN)/lint-imports

format: venv  ## Rewrite to style.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv frameworks-venv  ## Print the figures of benchmarks/.
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

bench-deadline: venv  ## Compare a stage with a deadline, live, with the simulator; SPOT=folder of traces, an hour on two cores.
	$(BIN)/python benchmarks/policies/live_deadline.py --spot $(SPOT) --cells 52x0.2,70x0.2 --small 2000

wheel: venv  ## Build the wheel into dist/.
	$(BIN)/uv build --quiet --wheel --out-dir dist

clean:  ## Remove what was made.
	rm -rf $(VENV) $(FRAMEWORKS) dist build mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
