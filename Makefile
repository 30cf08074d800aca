# Two commands do everything on a machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/demo
# The release of Flower beside the one in constraints.txt that is supported; laid over the installed one, not installed.
FLOWER ?= 1.42.0
OTHER := $(CURDIR)/.venv/flower-$(FLOWER)

.PHONY: demo test check check-flower check-wheel check-all check-trackers federation bench bench-check bench-report gpu-wheels leaderboard docs notebooks format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: .venv/installed ## FedAvg and CMSFed side by side on the embedded digits, a report each and a table of both
	rm -rf $(OUT)
	$(BIN)/polyfed demo --out $(OUT)

test: .venv/installed ## all tests and doctests
	$(BIN)/pytest -n 2

check: .venv/installed ## what CI runs: format, lint, strict types, layer rule, tests, doctests, notebooks, the site of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	# mypy takes a minute of one core, so it runs beside the tests; both report before the target fails
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 && tests=0 || tests=1; wait $$types && exit $$tests

$(OTHER)/installed: .venv/installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(OTHER) flwr==$(FLOWER)
	touch $@

check-flower: $(OTHER)/installed ## what CI runs besides: simulations on the other supported release of Flower
	FLOWER_RELEASE=$(FLOWER) PYTHONPATH=$(OTHER) $(BIN)/pytest -n 0 tests/engines/test_flower_simulation.py
	FLOWER_RELEASE=$(FLOWER) PYTHONPATH=$(OTHER) $(BIN)/pytest -n 0 -m slow \
		'tests/engines/test_flower_simulation.py::test_ray_equals_sequential[fedavg]'

check-wheel: .venv/installed ## what CI runs besides: the wheel in empty environments, with the newest and the oldest allowed packages
	$(BIN)/pytest -n 0 -m slow tests/house/test_wheel.py

check-all: check ## check, then the slow tests: real processes (Ray, servers, devices), and large matrices whole (an hour)
	# one more try for what failed: a busy machine can make Ray or a device miss a time-out
	$(BIN)/pytest -m slow -n 2 --dist loadfile tests --ignore tests/house/test_wheel.py || \
		$(BIN)/pytest -m slow tests --ignore tests/house/test_wheel.py --last-failed

check-trackers: .venv/installed ## installs MLflow and Weights & Biases (200 MB) and runs the tests against them
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[mlflow,wandb]"
	$(BIN)/pytest -n 0 tests/experiment/test_trackers.py

federation: .venv/installed ## a server and three devices on this machine; see docs/deploy.md
	$(BIN)/polyfed app runs/federation --recipe recipes/federation-demo.toml --local

bench: .venv/installed ## writes docs/results/speed.md: speed beside a bare loop and other frameworks; see docs/performance.md
	$(BIN)/python benchmarks/bench.py

bench-check: .venv/installed ## compares the speed with docs/results/speed.json; fails if something is 25 % slower
	$(BIN)/python benchmarks/bench.py --check

bench-report: .venv/installed ## what CI prints at its end: two settings beside docs/results/speed.json; never fails, at most a minute
	-timeout 60 $(BIN)/python benchmarks/bench.py --report --peers --setting small --setting food --runs 1 --rounds 5

gpu-wheels: .venv/installed ## what benchmarks/gpu.sh needs on a machine without internet: wheels for Python 3.12 in .whl
	rm -rf .whl
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --dest .whl --requirement benchmarks/gpu-wheels.txt
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir .whl .
	test $$(du -sm .whl | cut -f1) -lt 64

leaderboard: .venv/installed ## all methods in thirteen scenarios (about six core-hours; goes on where it stopped); writes docs/results/leaderboard.md
	$(BIN)/python benchmarks/leaderboard.py

docs: .venv/installed ## docs/recipes.md from the docstrings, then the site in build/site; a broken link fails
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_site.py

notebooks: .venv/installed ## run the notebooks of docs/tutorials and keep what they print
	$(BIN)/python docs/notebooks.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
