# Everything runs in .venv; torch comes first and pinned, since an unpinned one can bring gigabytes of CUDA.
PYTHON ?= python3
BIN := .venv/bin

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[cpu,torch,dev]'
	touch .venv/ready

.PHONY: demo test check slow clean

demo: .venv/ready
	rm -rf vecferry-demo
	$(BIN)/vecferry demo --out vecferry-demo

test: .venv/ready
	$(BIN)/pytest -n auto

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

slow: .venv/ready
	$(BIN)/pytest -n auto -m 'slow or models or stores'

clean:
	rm -rf .venv vecferry-demo
