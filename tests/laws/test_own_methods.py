"""The laws as a command for methods of a user's own, and the lines that `polyfed algorithms NAME --recipe` prints."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import polyfed
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging.fedprox import FedProx
from polyfed.algorithms.base import Algorithm
from polyfed.cli.init import egress_of, lines_for
from polyfed.core.errors import RecipeError
from polyfed.core.registry import find
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.laws import LAWS, Trial
from polyfed.laws.__main__ import BROKEN, main, verdict
from polyfed.training.optimisers import Train
from refusals import refuses

METHOD = """
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms import Averaging
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree


@message
class Means(Message):
    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    means: Tree = carries("prototypes", shape=(3,))


@dataclass(frozen=True, kw_only=True)
class Sender(Averaging):
    replies: ClassVar[type[Message]] = Means
    scale: float = 0.0

    def reply(self, context, data, fit, got, local):
        assert self.scale == 2.0, "the option of the recipe"
        return Means(fit.params, fit.loss, data.num_rows, {m: torch.ones(3) for m in context.modalities}), local


def stacked(batch):
    return torch._C._functorch.is_batchedtensor(batch.y)


class Unlike(Averaging):
    def loss(self, context, w, batch, got, local):
        return super().loss(context, w, batch, got, local) * (1.01 if stacked(batch) else 1.0)


class Random(Averaging):
    def merge(self, state, replies, fed):
        after = super().merge(state, replies, fed)
        return after.with_(params={n: v + 1e-6 * torch.rand(()) for n, v in after.params.items()})


class Forgetful(Averaging):
    rounds = {}

    def merge(self, state, replies, fed):
        after = super().merge(state, replies, fed)
        turn = self.rounds[id(fed)] = self.rounds.get(id(fed), 0) + 1
        return after.with_(params={n: v + 1e-6 * turn for n, v in after.params.items()})


class InPlace(Averaging):
    def merge(self, state, replies, fed):
        after = super().merge(state, replies, fed)
        for value in state.params.values():
            value.zero_()
        return after


class Restless(Averaging):
    def merge(self, state, replies, fed):
        after = super().merge(state, replies, fed)
        return after.with_(params={n: v + 0.01 if v.is_floating_point() else v for n, v in after.params.items()})


class Idle(Averaging):
    def merge(self, state, replies, fed):
        return state


class Wordless(Averaging):
    def observe(self, state):
        return {"secret/number": 1.0}


class Greedy(Averaging):
    def merge(self, state, replies, fed):
        after = super().merge(state, replies, fed)
        everybody = all("b" in fed.clients.owned(client) for client in replies)
        rare = 1.0 if everybody else math.nan
        return after.with_(params={n: v * rare if n.startswith("b") else v for n, v in after.params.items()})


class UnlikeInHoles(Averaging):
    def loss(self, context, w, batch, got, local):
        return super().loss(context, w, batch, got, local) * (1.1 if batch.present and stacked(batch) else 1.0)


class Trusting(Averaging):
    def merge(self, state, replies, fed):
        for client in replies:
            math.sqrt(float(replies[client].loss))
        return super().merge(state, replies, fed)
"""
RECIPE = '[algorithm]\nscale = 2.0\n[egress."*"]\nserver = ["parameters", "statistic", "prototypes"]\n'


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the methods above."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine_on_trial.py").write_text(METHOD)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


Laws = Callable[..., tuple[int, str, str]]


@pytest.fixture
def laws(capsys: pytest.CaptureFixture[str]) -> Laws:
    """Calls the command; gives exit code, standard output and standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


def test_a_method_with_a_policy_and_options_keeps_the_laws(mine: Path, laws: Laws) -> None:
    """In a process of its own, whose path has the folder; the other tests call the command in this one."""
    (mine / "mine.toml").write_text(RECIPE)
    few = ("--law", "announced", "--law", "dry-run")
    words = [sys.executable, "-m", "polyfed.laws", "mine_on_trial:Sender", "--recipe", "mine.toml", *few]
    done = subprocess.run(words, cwd=mine, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, last = done.stdout.splitlines()
    assert re.fullmatch(r"kept     announced  +\d+\.\d s  nothing leaves a client that .*", first)
    assert second.startswith("kept     dry-run")
    assert last == "mine_on_trial:Sender: 2 laws kept, 0 broken, 0 skipped"
    code, out, _ = laws("mine_on_trial:Sender", *few)
    assert code == 1
    assert "BROKEN   announced" in out
    assert out.splitlines()[-1] == "mine_on_trial:Sender: 0 laws kept, 2 broken, 0 skipped"


def test_a_wrong_call_is_a_sentence(mine: Path, laws: Laws) -> None:
    (mine / "wrong.toml").write_text(RECIPE.replace('"*"', "audio").replace("scale", "skale"))
    code, out, err = laws("mine_on_trial:Sender", "--recipe", mine / "wrong.toml")
    assert (code, out) == (2, "")
    for words in ("wrong.toml", "2 problems", "no option 'skale'; did you mean 'scale'", "no row 'audio'"):
        assert words in err
    assert "there is no such law; did you mean 'announced'" in laws("mine_on_trial:Sendre", "--law", "anounced")[2]
    for name in ("nowhere:Method", "fedavgg"):
        code, out, err = laws(name)
        assert (code, out) == (2, "")
        assert err.startswith("polyfed: ")


BREAKS = {
    "Unlike": ("engines", "engines-batchnorm"),
    "Random": ("one-seed", "own-numbers"),
    "Forgetful": ("resume", "resume-vectorised"),
    "InPlace": ("pure-round",),
    "Restless": ("zero-steps",),
    "Idle": ("learns",),
    "Wordless": ("captions",),
    "Greedy": ("rare-modality",),
    "UnlikeInHoles": ("missing-rows", "modality-dropout"),
    "Trusting": ("corrupt-replies",),
}
"""Methods that break laws, and which."""


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("name", "law"), [(name, law) for name, broken in BREAKS.items() for law in broken])
def test_a_method_that_breaks_a_law_is_found(name: str, law: str) -> None:
    found, why = verdict(LAWS[law], Trial(find(f"mine_on_trial:{name}", {}, Algorithm)))
    assert found == BROKEN
    assert why
    assert "\n" not in why


def test_a_row_has_what_the_recipe_says_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[algorithm]\nmu = 0.3\n[train]\nlr = 0.2\n[data]\nname = 'toy'\n")
    assert Trial.under(FedProx, tmp_path / "r.toml").row.options == {"mu": 0.3, "train": Train(lr=0.2)}
    (tmp_path / "r.toml").write_text("[algorithm]\nname = 'fedavg'\n")
    with refuses(RecipeError, "method on trial"):
        Trial.under(FedProx, tmp_path / "r.toml")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_printed_policy_allows_a_method_and_no_kind_less_would(name: str) -> None:
    rows = egress_of(name)
    assert parse_toml(lines_for(name)).get("egress", {}) == rows
    policy = {"b" if block == "a" else block: row for block, row in rows.items()}
    defaults = {key: ROWS[name].options[key] for key in ("train", "selector") if key in ROWS[name].options}
    made = world(name, **defaults)
    fits = {
        key: ROWS[name].options[key] for key in ("scale_params",) if key in ROWS[name].options
    }  # changes no message
    made = replace(made, algorithm=type(made.algorithm)(evaluation=made.algorithm.evaluation, **fits))
    assert not [row for row in plan(assemble(replace(made, egress=policy))) if not row.allowed]
    try:
        enough = all(row.allowed for row in plan(assemble(replace(made, egress={}))))
    except RecipeError:  # the method needs a row to know what it may share
        enough = False
    assert enough == (not rows), "rows are printed exactly if the default does not do"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_printed_recipe_is_accepted_and_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "printed.toml").write_text(lines_for(name))
    recipe = load_recipe(tmp_path / "printed.toml", ["rounds=1"])
    assert check(recipe).exit_code == 0
    assert len(polyfed.run(recipe).rounds) == 1


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_needed_section_stands_in_the_printed_recipe(name: str) -> None:
    table = parse_toml(lines_for(name))
    for section, options in ALGORITHMS[name].needs.items():
        assert options.items() <= table[section].items()


def test_an_unknown_method_is_told() -> None:
    with refuses(RecipeError, "mean 'fedavg'"):
        lines_for("fedavgg")
    with refuses(RecipeError, "needs the name"):
        lines_for(None)
