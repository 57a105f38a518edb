# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Names for what is done often. Each line calls a script that also works by itself.

.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

# `make lab NODES=3` and `NODES=3 make lab` are the same.
export NODES

.PHONY: help setup demo lab lab-down lab-status test test-faults test-matrix test-package lint unit sanity artifact molecule importer environment docs \
	bench bench-sync benchmark monitoring format clean

help: ## this list
	@echo "make <target>:"
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1\t/p' Makefile | expand -t 16
	@echo
	@echo "ansible-playbook playbooks/<name>.yml -i inventory/sparks:"
	@awk 'FNR == 1 { told = 0 } /^# / && !/Copyright|SPDX/ && !told { told = 1; sub(/^# /, ""); sub(/\. .*|[;:] .*|\.$$/, ""); \
		name = FILENAME; gsub(/playbooks\/|\.yml/, "", name); printf "  %s\t%s\n", name, $$0 }' playbooks/*.yml | expand -t 16

demo: ## from nothing to an answer: the lab, playbooks/site.yml on it, a question to the model
	@lab/demo

lab: ## two simulated Sparks on this machine (NODES=3 for more); quick when they are up
	@lab/lab up

lab-down: ## remove them, and nothing else
	@lab/lab down

lab-status: ## what is up
	@lab/lab status || [ $$? -eq 3 ]

test: ## all checks of a change: lint, unit, sanity, artifact, molecule
	@scripts/ci

lint: ## static checks: ruff, mypy, yamllint, ansible-lint
	@scripts/lint

unit: ## unit tests
	@scripts/unit

sanity: ## ansible-test sanity
	@scripts/sanity

artifact: ## build the collection, install it elsewhere, use it from there
	@scripts/artifact

molecule: ## every scenario on the lab
	@scripts/molecule

test-faults: ## the scenarios with faults that take long (molecule/*_faults), which `make test` leaves out
	@scripts/molecule --faults

test-matrix: ## sanity and unit tests with every supported ansible-core; needs Python 3.12 or newer, too
	@scripts/matrix

test-package: ## what is published: importer, environment and docs, with a sum like that of `make test`
	@scripts/ci importer environment docs

importer: ## what Galaxy does with an upload (galaxy-importer)
	@scripts/importer

environment: ## the execution environment, as far as it can be checked without building it
	@scripts/environment

docs: ## the documentation as a site, in .cache/docs/html
	@scripts/docs

benchmark: ## measure what the lab serves, with a report in benchmarks/ (playbooks/benchmark.yml)
	@scripts/setup && .venv/bin/ansible-playbook playbooks/benchmark.yml -i inventory/lab

monitoring: ## files for Prometheus and Grafana that watch the lab, in .cache/monitoring (playbooks/monitoring.yml)
	@scripts/setup && .venv/bin/ansible-playbook playbooks/monitoring.yml -i inventory/lab -e monitoring_dir=$(CURDIR)/.cache/monitoring

bench: ## how long things take on the lab
	@lab/bench

bench-sync: ## how fast models and images are copied, against rsync, scp and docker save
	@lab/bench_sync

format: ## format the Python files
	@scripts/format

setup: ## the pinned tools in .venv (the targets above do it when needed)
	@scripts/setup

clean: ## remove what the checks made here (.venv, .cache); the lab stays
	@rm -rf .venv .cache .ansible .mypy_cache .pytest_cache .ruff_cache tests/output dgxspark-serving-*.tar.gz
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
