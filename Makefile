# One command each, the same for people and for CI.
PYTHON ?= python

.PHONY: check format lint types test slow wheel bench families api cubins clean

check: lint types test            ## everything a commit must pass

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	codespell

# mypy cannot follow the import hook of an editable install, so it sees the packages through a folder of links.
.typing: pyproject.toml
	rm -rf .typing && mkdir -p .typing/moewe
	ln -s ../../moewe/__init__.py ../../moewe/__main__.py ../../moewe/py.typed .typing/moewe/
	for p in server runtime models moe attention kvcache quant topologies text telemetry native; do \
	  ln -s ../../$$p .typing/moewe/$$p; done

types: .typing
	$(PYTHON) -m mypy -p moewe

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m "slow and not soak and not gpu"

families:                         ## docs/families.md, after a change of models/checked.py
	$(PYTHON) -m moewe.models.checked > docs/families.md

api:                              ## docs/api.md, after a change of a field of the API
	$(PYTHON) -m moewe.server.openapi.reference > docs/api.md

cubins:                           ## tests/gpu/compiled.json and docs/gpu-kernels.md, after a change of a GPU kernel
	$(PYTHON) benchmarks/gpu_kernels.py

bench:
	@ls benchmarks/*.py

clean:
	rm -rf build dist .typing .pytest_cache .mypy_cache .ruff_cache *.egg-info
