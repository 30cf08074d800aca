"""What `polyfed.run` gives back, and what it says of an author's slip."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import polyfed
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.cli import main
from polyfed.core.errors import RecipeError
from polyfed.data.columns import TEST
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses, warned
from world import algorithm, recipe


@dataclass(frozen=True, kw_only=True)
class Forgetful(Averaging):
    """Returns no local state."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        return Update(fit.params, fit.loss, data.num_rows)


@dataclass(frozen=True, kw_only=True)
class Broken(Averaging):
    """Raises in its loss."""

    def loss(self, context: Any, w: Any, batch: Any, got: Any, local: Any) -> Any:
        raise ValueError("boom")


def test_a_run_is_shown_in_short() -> None:
    done = polyfed.run(recipe(algorithm("fedavg"), rounds=2))
    assert repr(done).startswith("Run(fedavg on toy, 2 rounds, accuracy 0.")
    assert len(repr(done)) < 100


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_task_without_local_state_is_told_what_to_return(engine: str) -> None:
    with refuses(RecipeError, "return a message"):
        polyfed.run(recipe(Forgetful(train=Train(lr=0.1)), engine))


def test_a_check_says_what_the_authors_code_raised() -> None:
    found = check(recipe(Broken(train=Train(lr=0.1))))
    assert any("ValueError: boom" in remark for remark in found.remarks)


def test_clients_are_not_said_to_be_asked_for_what_is_switched_off() -> None:
    clients = recipe(algorithm("fedavg")).clients.__class__(partition="iid", num=6, personal_test=0.3)
    for personal in (True, False):
        method = algorithm("fedavg", evaluation=Evaluation(personal=personal))
        tasks = {row.task for row in check(recipe(method, clients=clients)).planned}
        assert ("score_own" in tasks) == personal


def test_one_line_allows_all_that_is_refused_of_a_block() -> None:
    found = check(recipe(algorithm("fedavg"), egress={"shared": {"server": []}}))
    assert found.fixes == ('[egress.shared] server = ["parameters", "statistic"]',)


def test_words_are_checked_in_python_as_in_a_recipe() -> None:
    with refuses(RecipeError, "engine.name: you mean"):
        EngineSpec(name="vectorized")  # type: ignore[arg-type]
    with refuses(RecipeError, "train.optimiser: adamw"):
        Train(lr=0.1, optimiser="adamm")  # type: ignore[arg-type]
    assert Uniform(participation=3).participation == 3


def test_predictions_are_those_that_were_judged() -> None:
    done = polyfed.run(recipe(algorithm("fedavg"), rounds=2))
    table = recipe(algorithm("fedavg")).data.load()
    rows = table.rows(TEST)
    logits = done.predict({m: table.column(m).take(rows) for m in ("a", "b")})
    right = (logits.argmax(1) == table.label[rows]).double().mean()
    assert float(right) == pytest.approx(done.result["metrics"]["global"]["accuracy"])
    alone = done.predict({"a": table.column("a").take(rows)})
    assert not torch.equal(alone, logits)


def test_a_way_of_judging_that_the_model_does_not_allow_is_refused_before_training() -> None:
    method = algorithm("fedavg", evaluation=Evaluation(every=0, unimodal="head"))
    made = recipe(method)
    with refuses(RecipeError, "evaluate.unimodal: logits"):
        polyfed.run(replace(made, model=replace(made.model, head=(8,))))


@dataclass(frozen=True, kw_only=True)
class Astray(Uniform):
    """Chooses somebody who is not there."""

    who: Any = 999

    def choose(self, memory: Any, params: Any, fed: Any) -> Any:
        return [self.who], memory


@pytest.mark.parametrize("who", [999, 1.0, True, torch.tensor(1), -3])
def test_a_selector_that_names_nobody_is_told(who: Any) -> None:
    with refuses(RecipeError, "clients are numbers"):
        polyfed.run(recipe(algorithm("fedavg", selector=Astray(who=who))))


@dataclass(frozen=True, kw_only=True)
class Idle(Averaging):
    """A method whose idea had no effect."""

    def concerns(self, logged: Any) -> list[str]:
        return ["the pull is zero in every round"]


def test_a_run_warns_of_parts_of_the_method_without_effect(tmp_path: Path) -> None:
    made = recipe(Idle(train=Train(lr=0.1)))
    with warned("effect"):
        done = polyfed.run(made)
    assert done.result["concerns"] == ["the pull is zero in every round"]
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe(algorithm("fedavg")).table() | {"algorithm": {"name": "test_run:Idle"}}))
    with warned("pull is zero"), pytest.raises(SystemExit) as end:
        main(["run", str(path), "--out", str(tmp_path / "out")])
    assert end.value.code == 0


def test_resume_without_a_folder_is_refused() -> None:
    with refuses(RecipeError, "run to continue"):
        polyfed.run(recipe(algorithm("fedavg")), resume=True)


@dataclass(frozen=True, kw_only=True)
class Lost(Averaging):
    """Its merge has no return."""

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        state.with_(params=replies.mean("params", self.weights(replies, fed)))


def test_a_merge_without_return_is_told_what_to_return() -> None:
    for ends in (polyfed.run, check):
        with refuses(RecipeError, "state.with_"):
            ends(recipe(Lost(train=Train(lr=0.1))))


class OwnEncoder(torch.nn.Module):
    """A linear encoder."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.line = torch.nn.Linear(shape[0], embedding)

    def forward(self, x: Any) -> Any:
        return self.line(x)


def test_the_class_of_an_encoder_is_named_by_its_path() -> None:
    given: dict[str, Any] = {"data": {"a": torch.randn(30, 4)}, "labels": torch.arange(30) % 3}
    for entry in ({"kind": OwnEncoder}, OwnEncoder):
        made = polyfed.make_recipe(**given, model={"encoders": {"a": entry}})
        assert made.table()["model"]["encoders"]["a"] == {"kind": "test_run:OwnEncoder"}

    class Inner(OwnEncoder):
        """Not at the top level."""

    with refuses(RecipeError, "model.encoders.a: test_run"):
        polyfed.make_recipe(**given, model={"encoders": {"a": {"kind": Inner}}})
