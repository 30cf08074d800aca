"""Recipes that train on so few rows, or ask so often, that rows can be read off what leaves: a device's [limits]."""

import json
import re
import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.smuggling import ENGINES, up
from attacks.test_requirements import Hostile, left, text
from attacks.test_requirements import device as requiring
from attacks.test_shared_block import CLIENTS, exposed, recovered
from engines.devices import RECIPE, Devices
from polyfed.algorithms.averaging import Averaging
from polyfed.cli import main
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.tree import Tree
from polyfed.deploy.device.configuration import node_from
from polyfed.deploy.device.memory.request_limits import admit
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.engines.protocol import FAILED, REFUSED, REPLY, hello
from polyfed.experiment.checks.limit_checks import unfit_options
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.objective.multi_label import MultiLabel
from polyfed.objective.regression import Regression
from polyfed.privacy.egress.limits import Limits
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import steps_trained, usable_rows
from refusals import refuses
from world import algorithm, on_device, recipe, through

FLOOR = Limits(min_batch_size=8, min_steps=3)


def refused(made: Recipe, limits: Limits, words: str) -> None:
    """Refused under these limits before anything leaves, and let out without them."""
    through(assemble(made), 1)
    parts = on_device(made, limits=limits)
    with refuses(EgressError, words):
        through(parts, 1)
    assert parts.ledger.bytes_up == 0
    assert not up(parts)


def test_one_step_on_one_row_gives_the_row_away_and_a_floor_keeps_it() -> None:
    made = exposed("fedavg", {})
    assert recovered(assemble(made)) == CLIENTS, "the default policy allows it"
    refused(made, FLOOR, "a smaller batch")
    refused(made, FLOOR, "batch of 1")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (Train(lr=0.1, batch_size=4, epochs=9), "batch of 4"),
        (Train(lr=0.1, batch_size=16, steps=2), "takes 2 steps"),
        (Train(lr=0.1, batch_size=0, epochs=1), "takes 1 steps"),
    ],
)
def test_batch_and_steps_of_the_recipe_are_held_against_the_limits(train: Train, words: str) -> None:
    refused(recipe(algorithm("fedavg", train=train), rounds=1), FLOOR, words)


@dataclass(frozen=True, kw_only=True)
class Narrow(Averaging):
    """Says that it trains on large batches, and trains otherwise."""

    how: str = "batch"

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
        train, one = Train(lr=0.1, batch_size=8, epochs=3), torch.zeros(8, dtype=torch.int64)
        loss = lambda w, batch: self.loss(context, w, batch, got, local)  # noqa: E731
        try:
            if self.how == "batch":
                data.minimise(loss, got.params, train=replace(train, batch_size=1))
            elif self.how == "the same row eight times":
                data.at(one).minimise(loss, got.params, train=train)
            elif self.how == "a batch cut by hand":
                whole = data.batch(train, 1)
                small = replace(whole, x={m: x[:1] for m, x in whole.x.items()}, y=whole.y[:1], rows=whole.rows[:1])
                data.minimise(loss, got.params, train=train, on=small)
            elif self.how == "the last batch of an epoch":
                data.batch(replace(train, batch_size=int(data.num_rows) - 1), 2)
            elif self.how == "test rows":
                data.test.minimise(loss, got.params, train=replace(train, batch_size=1))
            elif self.how == "one step":
                data.minimise(loss, got.params, train=replace(train, epochs=1, steps=1))
        except Exception:  # a method may catch what stops it: nothing leaves all the same
            return super().reply(context, data, fit, got, local)
        return super().reply(context, data, fit, got, local)


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ("batch", "batch of 1"),
        ("the same row eight times", "batch of 1"),
        ("a batch cut by hand", "batch of 1"),
        ("the last batch of an epoch", "batch of 1"),
        ("test rows", "batch of 1"),
        ("one step", "takes 1 steps"),
    ],
)
def test_what_is_really_run_counts_and_not_what_the_recipe_says(how: str, rows: str) -> None:
    made = recipe(Narrow(train=Train(lr=0.1, batch_size=16, epochs=3), how=how), rounds=1)
    made = replace(made, clients=replace(made.clients, personal_test=0.2))
    refused(made, FLOOR, rows)


@pytest.mark.parametrize("name", ["fedavg", "fedpmr", "cmsfed"])
def test_a_training_above_the_limits_is_what_it_is_without_them(name: str) -> None:
    train = Train(lr=0.1, batch_size=8, epochs=3)
    egress = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in "ab"}
    made = recipe(algorithm(name, train=train), rounds=2, egress=egress)
    free = assemble(made)
    last = min(int(n) % 8 or 8 for n in free.engine.registry.num_rows)  # so no batch is left out
    bound = on_device(made, limits=Limits(min_rows=5, min_batch_size=last, min_steps=3))
    a, b = through(free, 2).params, through(bound, 2).params
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_client_with_too_few_rows_takes_no_part() -> None:
    refused(recipe(algorithm("fedavg"), rounds=1), Limits(min_rows=500), "min_rows = 500")


def rows_seen(limits: Limits, train: Train) -> list[int]:
    """The number of rows in every batch that the first client's training used."""
    made = recipe(algorithm("fedavg", train=train), rounds=1)
    parts, seen = on_device(made, limits=limits), list[int]()
    loss = parts.model.logits

    def counting(w: Any, batch: Any) -> Any:
        seen.append(len(batch.rows)) if batch.training else None
        return loss(w, batch)

    parts.model.logits = counting  # type: ignore[method-assign]
    through(parts, 1)
    return seen


def test_the_short_last_batch_of_an_epoch_is_left_out_on_a_device_with_the_limit() -> None:
    train = Train(lr=0.1, batch_size=7, epochs=3)
    assert min(rows_seen(Limits(), train)) < 7, "otherwise this test shows nothing"
    assert set(rows_seen(Limits(min_batch_size=7), train)) == {7}
    sizes = {int(n) for n in assemble(recipe(algorithm("fedavg", train=train))).engine.registry.num_rows}
    short = {n % 7 for n in sizes} - {0}
    least = max(short)
    assert set(rows_seen(Limits(min_batch_size=least), train)) <= {7, *(n for n in short if n >= least)}


def test_an_epoch_has_no_batch_below_the_limit_unless_it_is_the_only_one() -> None:
    for n, size, smallest, skip in product(range(1, 24), (0, 1, 2, 5, 8), (0, 1, 3, 5), (False, True)):
        end = usable_rows(n, size, skip, smallest)
        batches = [min(size or n, end - start) for start in range(0, end, size or n)]
        assert n - end < max(smallest, 2) or (skip and size == 1), "nothing else is left out"
        assert all(rows >= min(smallest, size or n, n) for rows in batches)
        assert steps_trained(n, Train(batch_size=size), skip_single=skip, smallest=smallest) == len(batches)
        assert usable_rows(n, size, skip) == usable_rows(n, size, skip, 0)


TASK = '[task]\nname = "classification"\nclass_weights = '


@pytest.mark.parametrize(
    ("limits", "edit", "words"),
    [
        ("min_batch_size = 8", ("[train]", TASK + "[1e-30, 1.0, 1e-30, 1e-30]\n[train]"), "class_weights weighs some"),
        ("min_batch_size = 8", ("[train]", TASK + "[0.0, 1.0, 0.0, 0.0]\n[train]"), "class_weights weighs some"),
        ("min_rows = 8", ("[train]", TASK + "[1.0, 1.0, 1.0, 10.1]\n[train]"), r"min_rows = 8 .* more than 10 times"),
        ("min_steps = 2", ("lr = 0.1", "lr = 10.0\nweight_decay = 0.1"), r"lr \* weight_decay = 1 lets a step undo"),
        ("min_steps = 2", ('"scaffold"', '"fedprox"\nmu = 10.0'), r"lr \* mu = 1 lets a step undo"),
        ("min_steps = 2", ('"scaffold"', '"fednova"\nmu = 9.0'), r"lr \* mu = 0.9 lets a step undo"),
        ("min_steps = 2", ('"scaffold"', '"feddyn"\nalpha = 10.0'), r"lr \* alpha = 1 lets a step undo"),
        ("min_steps = 2", ('"scaffold"', '"fedmsplit"\nlam = 5.0'), r"lr \* 2 \* lam = 1 lets a step undo"),
        ("min_steps = 2", ('"scaffold"', '"fedamp"\nlam = 10.0\nalpha = 1.0'), r"lr \* lam / alpha = 1 lets a step"),
    ],
)
def test_options_that_let_few_rows_or_one_step_decide_are_refused(
    limits: str, edit: tuple[str, str], words: str, tmp_path: Path, capsys: Any
) -> None:
    text = RECIPE.replace(*edit)
    devices = device(tmp_path, limits, text)
    place = devices.places[1]
    with pytest.raises(SystemExit) as stop:
        main(("check", str(devices.recipe), "--node", f"{place}/policy.toml", "--json"))
    assert stop.value.code == 3
    (breach,) = json.loads(capsys.readouterr().out)["breaches"]
    assert re.search(words, breach)
    if "weight_decay" not in text:  # this one is found in training, for algorithms may change their [train]
        answer = devices.handler(hello(), devices.configs[1])
        assert re.search(f"client 1 refused the recipe: .*{words}", answer.header["reason"])


def test_options_within_the_bounds_are_allowed(tmp_path: Path) -> None:
    text = RECIPE.replace("[train]", TASK + "[1.0, 2.0, 5.0, 10.0]\n[train]\nweight_decay = 1.0")
    limits = "min_batch_size = 2\nmin_rows = 2\nmin_steps = 2"
    assert device(tmp_path, limits, text).serve(tmp_path / "run")["rounds"] == 2


def test_decay_counts_at_the_rate_with_which_training_really_runs() -> None:
    train = Train(
        lr=0.1, lr_end=50.0, lr_schedule="step", lr_step=0, weight_decay=0.02, batch_size=8, epochs=3, clip_norm=1e-3
    )
    refused(recipe(algorithm("fedavg", train=train), rounds=1), FLOOR, "lr * weight_decay")
    assert any("weight_decay" in why for why in FLOOR.foreseen(train, 1, None))


def test_weights_of_positive_labels_are_compared_with_those_of_negative_ones() -> None:
    made = replace(recipe(algorithm("fedavg")), task=MultiLabel(positive_weights=(11.0, 11.0)))
    assert any("positive_weights" in why for why in unfit_options(Limits(min_batch_size=2), made))
    assert not list(unfit_options(Limits(), made)), "without limits, weights are free"
    made = replace(made, task=MultiLabel(positive_weights=(10.0, 1.0)))
    assert not list(unfit_options(Limits(min_batch_size=2), made))


def test_weights_of_targets_are_compared_because_few_rows_may_know_a_target() -> None:
    made = replace(recipe(algorithm("fedavg")), task=Regression(target_weights=(1.0, 11.0)))
    assert any("target_weights" in why for why in unfit_options(Limits(min_rows=2), made))
    assert any(
        "target_weights" in why
        for why in unfit_options(Limits(min_rows=2), replace(made, task=Regression(target_weights=(1.0, 0.0))))
    )
    made = replace(made, task=Regression(target_weights=(1.0, 10.0)))
    assert not list(unfit_options(Limits(min_rows=2), made))


def device(folder: Path, limits: str, recipe: str = RECIPE) -> Devices:
    """Three devices, of which the second has these limits."""
    devices = Devices(folder, recipe)
    with (devices.places[1] / "policy.toml").open("a") as file:
        file.write(f"\n[limits]\n{limits}\n")
    return devices


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("min_batch_size = 1000", "min_batch_size"),
        ("max_rounds = 1", "max_rounds"),
        (
            "max_requests = 1",
            "max_requests",
        ),
        ("min_rows = 1000", "refused to enrol"),
    ],
)
def test_a_device_refuses_in_its_own_words(limits: str, words: str, tmp_path: Path) -> None:
    with refuses(EgressError, words):
        device(tmp_path, limits).serve(tmp_path / "run")


def test_a_device_under_generous_limits_takes_part(tmp_path: Path) -> None:
    limits = "min_rows = 2\nmin_batch_size = 2\nmin_steps = 1\nmax_rounds = 50\nmax_requests = 50"
    assert device(tmp_path, limits).serve(tmp_path / "run")["rounds"] == 2


def test_a_restart_of_the_server_does_not_reset_the_count(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"))
    parts, limits = assemble(made), Limits(max_requests=2)
    seen: list[Any] = []
    answer = parts.engine.answer
    parts.engine.answer = lambda request, *rest: (seen.append(request), answer(request, *rest))[1]  # type: ignore
    through(parts, 1)

    def ask(run: str) -> None:
        with DeviceStore(tmp_path).transaction(run, 3) as memory:
            admit(memory, limits, seen[0])

    ask("run")
    ask("run")
    with refuses(EgressError, "request 3"):
        ask("run")
    ask("other")


def test_check_node_says_which_limits_a_recipe_breaks(tmp_path: Path, capsys: Any) -> None:
    devices = device(tmp_path, "min_batch_size = 1000\nmax_rounds = 1")
    place = devices.places[1]
    config = f'data="{place}/data.npz" client=1 modalities="a" policy="{place}/policy.toml"'
    for words in (("--node", config), ("--node", f"{place}/policy.toml")):
        with pytest.raises(SystemExit) as stop:
            main(("check", str(devices.recipe), *words))
        assert stop.value.code == 3
        told = " ".join(capsys.readouterr().out.split())
        assert "would be refused by [limits] max_rounds = 1 of the device, and this is round 2" in told
        assert "[limits] min_batch_size = 1000 of the device" in told
    with pytest.raises(SystemExit):
        main(("check", str(devices.recipe), "--node", config, "--json"))
    assert len(json.loads(capsys.readouterr().out)["breaches"]) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_row = 5", "limits.min_row: mean 'min_rows'"),
        ("min_rows = -1", "limits.min_rows: must be"),
        ("max_rounds = 0", "limits.max_rounds: must be"),
        ('min_steps = "3"', "limits.min_steps: a whole number"),
        ("min_steps = true", "limits.min_steps: a whole number"),
    ],
)
def test_a_wrong_limit_is_told(text: str, words: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f"[limits]\n{text}\n")
    with refuses(RecipeError, words):
        node_from(f'data="x.npz" client=0 modalities="a" policy="{policy}"').rules  # noqa: B018


STATED = "[limits]\nmin_batch_size = 16\nmax_rounds = 5\nmin_rows = 3\n"


def test_a_recipe_states_limits_and_the_devices_own_win(tmp_path: Path, capsys: Any) -> None:
    devices = device(
        tmp_path, "min_batch_size = 4\nmax_rounds = 3", RECIPE.replace("[deployment]", STATED + "[deployment]")
    )
    place = devices.places[1]
    config = f'data="{place}/data.npz" client=1 modalities="a" policy="{place}/policy.toml"'
    with pytest.raises(SystemExit) as stop:
        main(("check", str(devices.recipe), "--node", config, "--json"))
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    limits = {"min_rows = 3 (of the recipe)", "min_batch_size = 16 (of the recipe)", "max_rounds = 3 (of the device)"}
    assert set(found["limits"]) == limits
    assert found["breaches"] == []
    with pytest.raises(SystemExit):
        main(("check", str(devices.recipe), "--node", config))
    assert "[limits] max_rounds = 3 (of the device)" in capsys.readouterr().out
    assert devices.serve(tmp_path / "run")["rounds"] == 2


def test_a_device_refuses_what_breaks_the_limits_that_the_recipe_states(tmp_path: Path) -> None:
    devices = device(
        tmp_path, "min_rows = 2", RECIPE.replace("[deployment]", "[limits]\nmin_rows = 1000\n[deployment]")
    )
    with refuses(EgressError, "1000 of the"):
        devices.serve(tmp_path / "run")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            "max_rounds = 1",
            "limits: max_rounds",
        ),
        ("min_batch_size = 17", "limits: min_batch_size"),
        ("min_row = 1", "limits.min_row: mean 'min_rows'"),
    ],
)
def test_a_recipe_that_breaks_its_own_limits_is_refused_when_it_is_read(limits: str, words: str) -> None:
    with refuses(RecipeError, words):
        parse_recipe(tomllib.loads(RECIPE + f"[limits]\n{limits}\n"))


def test_a_simulated_client_with_fewer_rows_than_the_recipe_wants_is_refused_before_the_run() -> None:
    made = parse_recipe(tomllib.loads(RECIPE + "[limits]\nmin_rows = 500\n"))
    with refuses(RecipeError, "limits: min_rows"):
        assemble(made)
    assert parse_recipe(made.table()).limits == made.limits
    assert "limits" not in parse_recipe(tomllib.loads(RECIPE)).table()


def test_engines_are_without_limits_in_a_simulation() -> None:
    for engine in ENGINES:
        assert assemble(recipe(algorithm("fedavg"), engine)).engine.limits == Limits()


NO_STATISTIC = '[egress."*"]\nserver = ["parameters"]\n[egress.shared]\nserver = ["parameters"]\n'


@pytest.mark.parametrize(
    ("limits", "train"),
    [
        ("min_rows = 1000", "batch_size = 16"),
        ("min_batch_size = 1000", "batch_size = 0"),
        ("min_steps = 1000", "batch_size = 1"),
    ],
)
@pytest.mark.parametrize("enrols", [True, False])
def test_a_refusal_tells_no_number_of_rows(
    limits: str, train: str, enrols: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that reads the refusals, or asks a device that would not enrol, learns which limit, and no count."""
    server = Hostile(requiring(tmp_path, "", text("").replace("batch_size = 16", train)))
    place = server.devices.places[1]
    rows = int((dict(np.load(place / "data.npz"))["split"] == 0).sum())
    statistic = '["parameters", "statistic"]'
    egress = NO_STATISTIC.replace('["parameters"]', statistic) if enrols else NO_STATISTIC
    (place / "policy.toml").write_text(f"{egress}[limits]\n{limits}\n")
    answer = server.ask()
    assert answer.header["verdict"] == REFUSED
    told = str(answer.header["reason"])
    assert not {str(rows), str(rows - 1)} & set(re.findall(r"\d+", told)), told
    key, _, value = limits.partition(" = ")
    if not enrols:
        assert "refused to enrol" in told
        assert server.enrol().header["reason"] == told
        assert key not in told, "whether the device has fewer rows than its limit is a statistic too"
    elif key != "min_rows":
        assert f"[limits] {key} = {value} of the device" in told
        assert re.search(rf"\b{rows}\b", caplog.text), "the owner reads the number in the device's log"
    assert not left(server.devices)


@pytest.mark.parametrize("content", ["", "# half written\n", "\ufeff"])
def test_a_policy_file_without_a_section_opens_no_device(content: str, tmp_path: Path) -> None:
    """An editor that truncates the file before it writes would let a request meet a device without its policy."""
    server = Hostile(requiring(tmp_path, "secure_aggregation = true", text("")))
    assert server.ask().header["verdict"] == REFUSED
    policy = server.devices.places[1] / "policy.toml"
    policy.write_text(content, encoding="utf-8")
    for answer in (server.enrol(), server.ask(round=2)):
        assert answer.header["verdict"] == FAILED
        assert "its policy file is not valid" in str(answer.header["reason"])
    assert not left(server.devices)
    with refuses(RecipeError, "[[device]]"):
        node_from(f'data="x.npz" client=0 modalities="a" policy="{policy}"').rules  # noqa: B018


@pytest.mark.parametrize(
    ("limits", "words"),
    [("max_rounds = 1", "max_rounds = 1"), ("max_requests = 1", "max_requests"), ("min_batch_size = 99", "min_batch")],
)
def test_a_refusal_before_a_reply_is_in_the_log_of_the_device_and_not_in_its_ledger(
    limits: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/deploy-reference.md says so. Whoever reads only the ledger misses that a server tried."""
    server = Hostile(requiring(tmp_path, "", text("")))
    place = server.devices.places[1]
    assert server.ask().header["verdict"] == REPLY
    with (place / "policy.toml").open("a") as file:
        file.write(f"\n[limits]\n{limits}\n")
    answers = [server.ask(round=2), server.ask(round=2)]
    assert answers[-1].header["verdict"] == REFUSED
    assert words in caplog.text
    rows = [json.loads(row) for path in place.rglob("egress.jsonl") for row in path.read_text().splitlines()]
    assert {row["verdict"] for row in rows} == {"allowed"}
