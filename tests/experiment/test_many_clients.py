"""A run's work does not grow with the number of its clients: calls, memory and files, at 200,000 clients."""

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.core import keys
from polyfed.core.errors import CheckpointError
from polyfed.experiment.results.models import ClientModalities
from polyfed.federation.client_registry import ClientNumbers, ClientRegistry
from polyfed.federation.links.network import Network
from polyfed.report import write_report
from polyfed.report.pages.charts import MOST_POINTS
from polyfed.report.pages.client_charts import _times
from refusals import refuses

FEW, MANY = 2_000, 200_000
ROWS_EACH, TEST_ROWS = 3, 100
BYTES_EACH = 200
"""Bytes of Python and NumPy for each client while its rows are dealt, at most. Sorting 3 row numbers takes 170 of them,
and a list with a Python number for each client would take 40 more."""

RECIPE = """
seed = 1
rounds = 2
[data]
name = "toy"
rows = {rows}
test_share = {share}
shapes = {{ a = [1], b = [1] }}
natural_clients = {clients}
[clients]
partition = "by-client"
participation = 20
{of_clients}
[model]
embedding = 4
[train]
batch_size = 2
[algorithm]
name = "fedavg"
[engine]
workers = 1
{more}
"""

SECTIONS = {
    "plain": {"of_clients": "", "more": ""},
    "all": {
        "of_clients": "personal_test = 0.4\nmissing = { a = 0.3 }",
        "more": '[evaluate]\nclients = 30\n[network]\ncompute_flops_per_s = 1e6\n[selection]\nname = "pow-d"\nd = 40'
        "\nallow_incongruent = true",
    },
}


@dataclass(frozen=True)
class Effort:
    """The calls and the peak of memory, in bytes, of some work in Python and NumPy."""

    calls: int
    peak: int


def effort(work: Callable[[], object]) -> Effort:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    return Effort(calls, peak)


def recipe(folder: Path, clients: int, sections: str) -> Path:
    rows = clients * ROWS_EACH
    path = folder / f"{sections}-{clients}.toml"
    path.write_text(RECIPE.format(rows=rows, share=TEST_ROWS / rows, clients=clients, **SECTIONS[sections]))
    return path


@pytest.fixture(scope="module", params=list(SECTIONS))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Effort]]:
    folder = tmp_path_factory.mktemp("many")
    polyfed.run(recipe(folder, 100, request.param), folder / "imports")
    write_report(folder / "imports")
    found = {}
    for clients in (FEW, MANY):
        made, out = recipe(folder, clients, request.param), folder / str(clients)
        found[clients] = out, effort(lambda made=made, out=out: polyfed.run(made, out))  # type: ignore[misc]
    return found


def test_a_run_makes_no_call_and_no_number_for_each_client(runs: dict[int, tuple[Path, Effort]]) -> None:
    (_, few), (_, many) = runs[FEW], runs[MANY]
    assert many.calls - few.calls < 0.2 * (MANY - FEW)
    assert many.peak - few.peak < BYTES_EACH * (MANY - FEW)


def test_a_report_of_many_clients_is_small_and_costs_little(runs: dict[int, tuple[Path, Effort]]) -> None:
    few, many = (effort(lambda out=out: write_report(out)) for out, _ in runs.values())  # type: ignore[misc]
    assert many.calls - few.calls < 0.2 * (MANY - FEW)
    assert many.peak - few.peak < 20 * (MANY - FEW)
    assert (runs[MANY][0] / "report.html").stat().st_size < 2**20


def test_loading_a_run_makes_nothing_for_each_client(runs: dict[int, tuple[Path, Effort]]) -> None:
    few, many = (effort(lambda out=out: polyfed.load_run(out)) for out, _ in runs.values())  # type: ignore[misc]
    assert many.calls < few.calls + 2_000
    assert many.peak < few.peak + 200_000
    loaded = polyfed.load_run(runs[MANY][0])
    assert len(loaded.models.clients) == MANY
    assert "a" in loaded.models.clients[MANY - 1] or "b" in loaded.models.clients[MANY - 1]


def test_a_checkpoint_does_not_repeat_the_facts_about_clients(runs: dict[int, tuple[Path, Effort]]) -> None:
    sizes = {
        clients: sum(path.stat().st_size for path in (out / "checkpoint").glob("round-*/*"))
        for clients, (out, _) in runs.items()
    }
    assert sizes[MANY] < sizes[FEW] + 1_000
    (facts,) = (runs[MANY][0] / "checkpoint").glob("clients-*.safetensors")
    assert facts.stat().st_size < 11 * MANY  # eight bytes for the rows, a byte for each modality


def test_run_json_lists_a_thousand_clients(runs: dict[int, tuple[Path, Effort]]) -> None:
    assert (runs[MANY][0] / "run.json").stat().st_size < 300_000
    assert (runs[MANY][0] / "result.json").stat().st_size < 10_000


def test_only_some_clients_are_evaluated_and_others_each_time(tmp_path: Path) -> None:
    run = polyfed.run(recipe(tmp_path, 200, "all"))
    scores = [row["personal_accuracy"].keys() for row in run.rounds]
    assert [len(asked) for asked in scores] == [30, 30]
    assert scores[0] != scores[1]
    again = polyfed.run(recipe(tmp_path, 200, "all"))
    assert [row["personal_accuracy"].keys() for row in again.rounds] == scores


def test_a_damaged_file_of_facts_about_clients_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    polyfed.run(recipe(tmp_path, 100, "plain"), out)
    (facts,) = (out / "checkpoint").glob("clients-*.safetensors")
    content = bytearray(facts.read_bytes())
    content[-1] ^= 1
    facts.write_bytes(content)
    with refuses(CheckpointError, f"{facts.name} is damaged"):
        polyfed.load_run(out)
    facts.unlink()
    with refuses(CheckpointError, f"{facts.name} cannot be"):
        polyfed.load_run(out)


def test_client_numbers_are_a_sequence() -> None:
    numbers = ClientNumbers(torch.tensor([False, True, True, False, True]))
    assert list(numbers) == [1, 2, 4]
    assert (len(numbers), numbers[0], numbers[-1], numbers[1:]) == (3, 1, 4, [2, 4])
    assert [client in numbers for client in (0, 1, 4, 5, "1")] == [False, True, True, False, False]
    assert all(type(client) is int for client in (*numbers, numbers[0]))


def test_models_know_the_modalities_of_a_client_when_asked() -> None:
    registry = ClientRegistry(("a", "b"), torch.tensor([3, 0, 2]), torch.tensor([[1, 0], [0, 0], [1, 1]]).bool())
    found = ClientModalities(registry, registry.owned)
    assert dict(found) == {0: ("a",), 2: ("a", "b")}
    assert (len(found), 1 in found, 3 in found, -1 in found) == (2, False, False, False)
    with pytest.raises(KeyError):
        found[1]


def test_numbers_at_some_positions_are_those_of_the_whole_stream() -> None:
    places = torch.tensor([0, 7, 3, 999_999])
    assert torch.equal(keys.uniform_at(5, places), keys.uniform(5, 1_000_000)[places])
    links = Network().links(50, 7)
    some = torch.tensor([3, 44])
    assert torch.equal(links.rates(2, some).up_bps, links.rates(2).up_bps[some])
    fixed = Network(channel="fixed", rate_up_bps=5.0).links(50, 7)
    assert fixed.rates(2, some).up_bps.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("clients", [10, 1_000_000])
def test_the_chart_of_picks_has_as_many_points_as_a_chart_can_show(clients: int) -> None:
    chart = _times([1] * 5 + [3], clients)
    values = [value for value in chart.series[0].values if value is not None]
    assert len(chart.x) == len(values) <= MOST_POINTS
    width = -(-clients // MOST_POINTS)
    last = clients - width * (len(values) - 1)
    assert width * sum(values[:-1]) + last * values[-1] == pytest.approx(8)
    assert 0 < chart.x[0] < chart.x[-1] < 100
