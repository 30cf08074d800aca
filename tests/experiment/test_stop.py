"""The best round and the end of a run before its last round: [stop], on every engine, killed, resumed, deployed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.core.tree import digest
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.settings import CheckpointSpec, StopSpec
from polyfed.experiment.running.stopping import Choice, best_row, out_of_patience
from polyfed.privacy.differential.section import Privacy
from refusals import refuses
from world import AWKWARD, algorithm, recipe

OWN = "personal_validation.weighted"


def scored(name: str = "fedavg", engine: str = "vectorised", rounds: int = 12, **stop: Any) -> Recipe:
    """A run with validation rows that is evaluated in every round."""
    made = recipe(algorithm(name, evaluation=Evaluation(every=1)), engine, AWKWARD, rounds=rounds)
    return replace(made, clients=replace(made.clients, validation=0.3, holdings=None), stop=StopSpec(**stop))


def told(done: Any) -> dict[str, Any]:
    """What a run says, without its times and what only the last row of a run has."""
    last = ("seconds", "confusion", "intervals", "moments")
    rows = [{k: v for k, v in row.items() if k not in last} for row in done.rounds]
    result = {k: v for k, v in done.result.items() if "seconds" not in k}
    return {"rows": json.dumps(rows, sort_keys=True), "result": json.dumps(result, sort_keys=True)}


def rows_of(values: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"round": number, **({} if value is None else {"metrics": {"validation": {"loss": value}}})}
        for number, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize(
    ("values", "patience", "delta", "best", "end"),
    [
        ([3.0, 2.0, 2.0, 2.0], 2, 0.0, 2, 4),
        ([3.0, None, 2.0, None, 2.5, None, 2.5], 2, 0.0, 3, 7),
        ([3.0, 2.9, 2.8, 2.7, 1.0], 2, 0.5, 3, 3),
        ([3.0, 2.9, 2.4, 2.3, 2.2], 2, 0.5, 5, 5),
        ([5.0, 4.0, 3.0], 1, 0.0, 3, None),
    ],
)
def test_patience_counts_evaluations_without_a_large_enough_improvement(
    values: list[float | None], patience: int, delta: float, best: int, end: int | None
) -> None:
    stop = StopSpec(metric="validation.loss", patience=patience, min_delta=delta)
    rows, choice = rows_of(values), Choice.of(stop)
    ends = [n for n in range(1, len(rows) + 1) if out_of_patience(stop, rows[:n], choice)]
    assert (ends or [None])[0] == end
    found = best_row(rows[: end or len(rows)], choice)
    assert found is not None
    assert found["round"] == best


def test_clients_own_validation_rows_stop_every_engine_at_the_round_at_which_the_pooled_rows_do(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import HubTransport, hub_of
    from polyfed.deploy.server.server import engine_by
    from polyfed.experiment.recipes.settings import EngineSpec
    from polyfed.experiment.running.assembly import population_of
    from polyfed.experiment.running.events import Emitter
    from polyfed.experiment.running.loop import execute

    pooled = polyfed.run(scored(metric="validation.accuracy", patience=2))
    assert 2 < pooled.result["stopped"]["round"] < 12, "the case has an early end"
    for name in ("sequential", "vectorised"):
        own = polyfed.run(scored(engine=name, metric=OWN, patience=2))
        assert own.result["stopped"]["by"] == "patience"
        assert own.result["stopped"]["round"] == pooled.result["stopped"]["round"]
        group = own.result["metrics"]
        assert group["personal_validation"]["weighted"] == pytest.approx(group["validation"]["accuracy"], abs=1e-6)
        assert (
            own.result["state_sha256"]
            == polyfed.run(scored(engine=name, rounds=own.result["rounds"])).result["state_sha256"]
        )
    made = replace(scored(metric=OWN, patience=2), engine=EngineSpec(name="flower"))
    transport = HubTransport(hub_of(made, tmp_path))
    transport.enrol(6, 30)
    engine = engine_by(transport, made)
    far = execute(made, None, Emitter([]), population=population_of(made), engine=engine)
    assert told(far)["rows"] == told(polyfed.run(scored(engine="sequential", metric=OWN, patience=2)))["rows"]


@pytest.mark.parametrize("name", ["fedavg", "local"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_killed_anywhere_has_the_same_end_and_the_same_best_model(
    name: str, every: int, tmp_path: Path
) -> None:
    made = replace(scored(name, metric=OWN, patience=2), checkpoint=CheckpointSpec(every=every))
    whole = polyfed.run(made, tmp_path / "whole")
    last, best = whole.result["rounds"], whole.result["best"]["round"]
    assert whole.best is not None
    for after in {best, min(best + 1, last)}:
        folder = tmp_path / f"after-{after}"

        def stop(event: str, after: int = after, **facts: Any) -> None:
            if event == "round-finished" and facts["row"]["round"] == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            polyfed.run(made, folder, listeners=[stop])
        again = polyfed.run(made, folder, resume=True)
        loaded = polyfed.load_run(folder)
        assert told(again) == told(whole)
        for found in (again, loaded):
            assert found.best is not None
            client = None if found.best.shared is not None else 0
            of = (lambda m: m.params) if client is None else (lambda m: m.personal[0])
            assert digest(of(found.best)) == digest(of(whole.best)), f"best of round {best} after {after}"
        assert [p.name for p in (folder / "checkpoint" / "best").iterdir()] == [f"{best:06d}"]


def test_the_best_model_is_the_last_one_of_a_run_with_so_many_rounds(tmp_path: Path) -> None:
    done = polyfed.run(scored(metric="validation.loss", rounds=8), tmp_path / "run")
    best = done.result["best"]["round"]
    short = polyfed.run(scored(rounds=best))
    assert done.best is not None
    assert digest(done.best.params) == digest(short.params)
    done.export(tmp_path / "best", best=True)
    again = polyfed.load_model(tmp_path / "best", imports=["polyfed.laws.federation:NormAndDropout"])
    assert digest(again.params) == digest(short.params)
    assert digest(done.params) != digest(short.params) or best == 8
    plain = polyfed.run(recipe(algorithm("fedavg")))
    with refuses(RecipeError, "no best round"):
        plain.export(tmp_path / "none", best=True)


def test_a_stopped_run_goes_on_with_more_patience_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    first = polyfed.run(scored(metric=OWN, patience=1), tmp_path / "run")
    assert first.result["rounds"] < 12
    same = polyfed.run(scored(metric=OWN, patience=1), tmp_path / "run", resume=True)
    assert told(same) == told(first), "nothing runs again"
    more = polyfed.run(scored(metric=OWN, patience=12), tmp_path / "run", resume=True)
    assert told(more) == told(polyfed.run(scored(metric=OWN, patience=12)))


def test_more_rounds_after_the_last_equal_the_longer_run(tmp_path: Path) -> None:
    for name in ("fedavg", "scaffold", "local"):
        polyfed.run(scored(name, rounds=2, metric=OWN), tmp_path / name)
        more = polyfed.run(scored(name, rounds=4, metric=OWN), tmp_path / name, resume=True)
        assert more.result["state_sha256"] == polyfed.run(scored(name, rounds=4, metric=OWN)).result["state_sha256"]


def test_bytes_and_seconds_end_a_run_after_the_round_that_reaches_them(tmp_path: Path) -> None:
    whole = polyfed.run(scored(rounds=4))
    spent = np.cumsum([r["bytes_up"] + r["bytes_down"] + sum(r["evaluation"].values()) for r in whole.rounds])
    done = polyfed.run(scored(rounds=4, max_bytes=int(spent[1]) - 1), tmp_path / "bytes")
    assert (done.result["rounds"], done.result["stopped"]["by"]) == (2, "max_bytes")
    assert "metrics" in done.rounds[-1], "the last round is evaluated"
    resumed = polyfed.run(scored(rounds=4, max_bytes=int(spent[1]) - 1), tmp_path / "bytes", resume=True)
    assert told(resumed) == told(done)
    brief = polyfed.run(scored(rounds=4, max_seconds=1e-6))
    assert (brief.result["rounds"], brief.result["stopped"]["by"]) == (1, "max_seconds")
    assert whole.result["stopped"] == {"round": 4, "by": "rounds", "why": "all 4 rounds ran"}


def test_epsilon_ends_a_run_before_the_round_that_would_exceed_it() -> None:
    privacy = Privacy(unit="client", noise_multiplier=0.5, clip_norm=1.0, delta=1e-3, unprotected=("statistic",))
    plain = recipe(algorithm("fedavg", evaluation=Evaluation(every=1), aggregation="uniform"), "vectorised", rounds=6)
    made = replace(plain, privacy=privacy)
    spent = [row["privacy"]["epsilon"] for row in polyfed.run(made).rounds]
    done = polyfed.run(replace(made, stop=StopSpec(max_epsilon=(spent[2] + spent[3]) / 2)))
    assert (done.result["rounds"], done.result["stopped"]["by"]) == (3, "max_epsilon")
    with refuses(RecipeError, "stop.max_epsilon: spends"):
        polyfed.run(replace(made, stop=StopSpec(max_epsilon=spent[0] / 2)))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"stop": {"metric": "global.accuracy"}}, "stop.metric: test rows"),
        ({"stop": {"metric": "loss"}}, "stop.metric: validation rows"),
        ({"stop": {"patience": 0}}, "stop.patience: 1 or more"),
        ({"stop": {"max_bytes": 0}}, "stop.max_bytes: 1 or more"),
        ({"stop": {"max_epsilon": 1.0}}, "stop.max_epsilon: section counts"),
        ({"stop": {"patience": 2}, "evaluate": {"every": 0}}, "stop.patience: needs evaluations"),
        ({"stop": {"patiense": 2}}, "stop.patiense: mean 'patience'"),
    ],
)
def test_a_wrong_section_is_refused_with_the_next_action(table: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        parse_recipe({"data": {"name": "cg-digits"}, "algorithm": {"name": "fedavg"}, **table})


@pytest.mark.parametrize("look", [check, polyfed.run])
@pytest.mark.parametrize(
    ("changes", "stop", "words"),
    [
        ({"validation": 0.0}, {"patience": 2}, "stop.metric: no validation"),
        ({"validation": 0.0}, {"metric": OWN}, "stop.metric: client has validation"),
        ({}, {"metric": "validation.los"}, "stop.metric: 'loss'"),
        ({}, {"metric": "personal_validation.pooled_mae"}, "stop.metric: measure"),
    ],
)
def test_a_metric_that_the_run_never_measures_is_refused_before_it(
    look: Callable[[Recipe], Any], changes: dict[str, Any], stop: dict[str, Any], words: str
) -> None:
    made = scored(**stop)
    with refuses(RecipeError, words):
        look(replace(made, clients=replace(made.clients, **changes)))


def test_rows_that_do_not_train_of_devices_end_a_deployment(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.devices import RECIPE, Devices

    text = RECIPE.replace("rounds = 2", "rounds = 9").replace("[clients]", "[clients]\nvalidation = 0.3")
    text += f'\n[stop]\nmetric = "{OWN}"\npatience = 1\n'
    devices = Devices(tmp_path, text)
    got = devices.serve(tmp_path / "run")
    one = polyfed.run(devices.recipe, tmp_path / "one", engine="sequential").result
    assert got["stopped"]["by"] == "patience"
    for key in ("stopped", "rounds", "state_sha256"):
        assert got[key] == one[key]
    assert got["metrics"]["personal_validation"] == one["metrics"]["personal_validation"]
    assert got["best"]["round"] == one["best"]["round"]
    assert polyfed.load_run(tmp_path / "run").best is not None
    with np.load(devices.places[0] / "data.npz") as arrays:
        assert (arrays["split"] == 2).any(), "the device has its validation rows"
