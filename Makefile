# Recipes use relative paths only and start programs as `python -m`: both work in a directory with spaces in its name.

RUN := .venv/bin/python -m
WORKERS ?= 2
TESTS ?= tests
SEEDS ?= 1000
KILLS ?= 200
MINUTES ?= 10
BENCH ?= [a-z]*
.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-kerberos demo demo-s3 kafka-demo agent-demo test check nightly test-costs lint conformance simulate model kill-test agent-soak soak broker-soak broker-kit evidence bench release clean

help: ## This list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done
	@echo 'Variables: PYTHON=/path/to/python3 (3.11 or newer), WORKERS=$(WORKERS) test processes, TESTS="$(TESTS)"'

setup: ## The virtual environment in .venv, up to date (the others do this first)
	@sh .ci/setup

setup-demo:
	@sh .ci/setup demo

setup-kerberos: ## The same with Kerberos for HDFS, which is built (needs gcc, libkrb5-dev, python3-dev)
	@sh .ci/setup kerberos

demo: setup-demo ## The main job, end to end, on generated data
	@$(RUN) compactor demo

demo-s3: setup ## The same on a local S3 server: versitygw if Go is installed, else moto
	@$(RUN) tests.support.demo_s3

kafka-demo: setup ## A Kafka broker that tiers a topic, and what its consumers get; COMMAND="..." runs on that tier (needs Java and Maven)
	@$(RUN) tests.support.kafka_demo -- $(COMMAND)

agent-demo: setup ## A stock broker with short retention, the agent, the daemon, a consumer (needs Java and Maven)
	@$(RUN) tests.support.agent_demo

test: setup ## The tests that need nothing but Python, random ones with few seeds: about 10 minutes on two cores
	@.venv/bin/python -c 'from compactor.cleaner.precompile import precompile_kernels; precompile_kernels()' # once, not in each worker
	@$(RUN) pytest -n $(WORKERS) -m "not check and not slow" --hypothesis-profile quick $(TESTS)

check: setup ## The other tests that CI requires, at full depth: brokers, Spark, browser, emulators (needs Java, Maven, Go, npm)
	@sh .ci/java || true
	@.venv/bin/python -c 'from compactor.cleaner.precompile import precompile_kernels; precompile_kernels()' # once, not in each worker
	@$(RUN) tests.nightly --age
	@$(RUN) pytest -n $(WORKERS) -m "(check or deep) and not slow" $(TESTS)

nightly: setup-kerberos ## What takes hours: slow tests, older brokers, 1,000 seeds, kills, soaks; ONLY=name for one part; writes a record
	@$(RUN) tests.nightly --workers $(WORKERS) $(ONLY)

test-costs: setup ## CPU seconds of each test and fixture of `make test` and `make check`, the dearest first
	@mkdir -p build && rm -f build/test-costs.jsonl
	@$(RUN) pytest -n $(WORKERS) -m "not slow" -p tests.support.costs --costs build/test-costs.jsonl $(TESTS) || true
	@$(RUN) tests.support.costs build/test-costs.jsonl

lint: setup ## ruff, mypy --strict, the import layers; prints what each feature costs in statements
	@$(RUN) ruff check --quiet .
	@$(RUN) ruff format --check --quiet .
	@$(RUN) mypy --no-error-summary
	@.venv/bin/python -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo
	@$(RUN) tests.support.feature_costs

conformance: setup ## SEEDS=1000 random logs through Kafka's own cleaner and ours (needs Java and Maven)
	@$(RUN) tests.conformance --seeds $(SEEDS)

simulate: setup ## SEEDS=1000 random schedules of crashes, zombies and broken stores
	@$(RUN) tests.simulation --seeds $(SEEDS)
	@for store in gs az hdfs; do $(RUN) tests.simulation --seeds $(SEEDS) --store $$store || exit 1; done

model: setup ## Check the replacement protocol exhaustively, and show what fails without each rule (needs Java and Maven)
	@$(RUN) tests.model

kill-test: setup ## KILLS=200 processes killed at random moments on a growing tier
	@$(RUN) tests.kill_test --kills $(KILLS)

agent-soak: setup ## MINUTES=10 of load on brokers with agents, a daemon and readers, killed at random (needs Java and Maven)
	@$(RUN) tests.agent_soak --minutes $(MINUTES)

soak: setup ## MINUTES=10 (an hour is meant) of faults around two daemons over one tier on S3; needs the right to mount a small disk
	@$(RUN) tests.soak --minutes $(MINUTES)

broker-soak: setup ## MINUTES=10 (an hour is meant) of faults around brokers with tiered storage and two daemons; every read is judged (needs Java and Maven)
	@$(RUN) tests.broker_soak --minutes $(MINUTES)

broker-kit: setup ## KAFKA=folder of any Kafka distribution: do the rules of docs/broker-protocol.md hold under it? 20 minutes, one page (needs Java and Maven)
	@$(RUN) tests.broker_kit "$(KAFKA)"

evidence: setup ## the tables of docs/reliability.md from the records in docs/evidence, which the test programs write (--record)
	@$(RUN) tests.evidence

bench: setup ## All benchmarks, or BENCH=name: fails where documents differ by more than a third, WRITE=1 mends their tables (docs/benchmarks.md)
	@failed=; for file in benchmarks/$(BENCH).py; do name=$$(basename "$$file" .py); \
	grep -q __main__ "$$file" || continue; BENCH_WRITE=$(WRITE) $(RUN) "benchmarks.$$name" || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "these failed:$$failed"; exit 1; }

release: setup ## In dist/: sdist, wheel, chart, image context, release notes, digests, of the commit that is checked out; wants a nightly run of the last 14 days
	@.venv/bin/python .ci/release.py

clean: ## Removes .venv and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info build
	find bloom checkpoint compactor tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
