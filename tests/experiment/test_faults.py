"""Clients that misbehave, recipes that are wrong, data that is odd: a clear error, and the round goes on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.errors import DataError, EgressError, PolyfedError, RecipeError, TooFewReplies
from polyfed.core.option_checks import ranges, simple_types
from polyfed.core.tree import Tree, block_of
from polyfed.data import SOURCES, ClientsSpec
from polyfed.data.sources import Npz, Toy
from polyfed.experiment.checks.idle_options import idle_options
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.replies import Replies
from polyfed.model import ModelSpec
from polyfed.objective import CLASSES
from polyfed.selection import SELECTORS, Uniform
from polyfed.training.optimisers import Train
from refusals import refuses, warned
from world import AWKWARD, PLAIN, algorithm, furthest, played, recipe

ENGINES = ["sequential", "vectorised"]
ALL = Uniform(participation=1.0)


@dataclass(frozen=True, kw_only=True)
class Faulty(Averaging):
    """FedAvg in which clients with few rows answer badly."""

    fault: str = "nan"
    below: int = 45

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
        bad = data.num_rows < self.below
        if self.fault == "raise":
            if bool(bad):  # a branch on data: works alone, stops a stack
                raise ZeroDivisionError("the sensor is unplugged")
            return Update(fit.params, fit.loss, data.num_rows), local
        params = dict(fit.params)
        first = next(iter(params))
        if self.fault == "nan":
            params[first] = torch.where(bad, torch.nan, params[first])
        elif self.fault == "names":
            params[f"{block_of(first)}.zoo"] = params.pop(first)
        elif self.fault == "block":
            params["zoo.weight"] = params.pop(first)
        elif self.fault == "shape":
            params[first] = params[first].flatten()
        elif self.fault == "type":
            return Broadcast(params), local
        return Update(params, fit.loss, data.num_rows), local


def faulty(fault: str, engine: str, **options: Any) -> Any:
    clients = ClientsSpec(partition="dirichlet", num=6, alpha=1.0)
    method = Faulty(fault=fault, selector=ALL, train=Train(lr=0.1, batch_size=16), **options)
    return recipe(method, engine, clients=clients, rounds=1)


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("fault", "words"), [("nan", "is not finite"), ("raise", "the sensor is unplugged")])
def test_a_bad_reply_is_dropped_and_the_round_goes_on(engine: str, fault: str, words: str) -> None:
    made = faulty(fault, engine)
    events: list[tuple[str, dict[str, Any]]] = []
    result = polyfed.run(made, listeners=[lambda event, **facts: events.append((event, facts))])
    sizes = assemble(made).fed.clients.num_rows
    small = {str(k) for k in range(6) if int(sizes[k]) < 45}
    assert small
    assert set(result.rounds[0]["missing"]) == small
    assert all(words in reason for reason in result.rounds[0]["missing"].values())
    kept = ClientsSpec(partition="dirichlet", num=6, alpha=1.0)
    healthy = assemble(recipe(algorithm("fedavg", selector=ALL, train=made.algorithm.train), engine, clients=kept))
    healthy.fed.begin(1)
    good = [k for k in range(6) if str(k) not in small]
    replies = healthy.fed.ask(healthy.algorithm.update, good, Broadcast(healthy.initial))
    mean = replies.mean("params", replies.numbers("num_rows"))
    assert furthest(result.params, mean) < 1e-6
    assert ("looped" in {event for event, _ in events}) == (engine == "vectorised" and fault == "raise")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("names", ".zoo', which the model does not have"),
        ("shape", "expected torch.float32"),
    ],
)
def test_replies_of_the_wrong_form_are_refused_with_the_reason(engine: str, fault: str, words: str) -> None:
    with refuses(TooFewReplies, "6 clients") as error:
        played(faulty(fault, engine))
    assert words in str(error.value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("block", "holds parameters"),
        ("type", "task declares"),
    ],
)
def test_replies_that_check_does_not_announce_do_not_leave(engine: str, fault: str, words: str) -> None:
    with refuses(EgressError, words):
        played(faulty(fault, engine))


def test_debug_lets_a_clients_exception_through_with_its_circumstances() -> None:
    made = faulty("raise", "sequential")
    with pytest.raises(ZeroDivisionError) as error:
        played(replace(made, engine=replace(made.engine, debug=True)))
    assert "round 1, task update" in "".join(error.value.__notes__)


def test_debug_names_the_step_too() -> None:
    seen: list[int] = []

    class Third(Averaging):
        def loss(self, *parts: Any) -> Any:
            seen.append(1)
            if len(seen) == 3:
                raise ZeroDivisionError("the sensor is unplugged")
            return super().loss(*parts)

    made = recipe(Third(selector=ALL, train=Train(lr=0.1, batch_size=4)), "sequential", rounds=1)
    with pytest.raises(ZeroDivisionError) as error:
        played(replace(made, engine=replace(made.engine, debug=True)))
    assert "in step 3 of local training, on 4 rows" in "".join(error.value.__notes__)


def test_min_replies_ends_the_run_with_its_exit_code() -> None:
    made = faulty("nan", "sequential")
    with pytest.raises(TooFewReplies) as error:
        played(replace(made, engine=replace(made.engine, min_replies=6)))
    assert error.value.exit_code == 4


def test_an_empty_cohort_is_a_round_without_effect() -> None:
    parts = assemble(recipe(algorithm("fedavg")))
    parts.fed.begin(1)
    assert parts.fed.ask(parts.algorithm.update, [], Broadcast(parts.initial)) == Replies([])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_clients_of_one_row_and_batches_of_one_row_train(engine: str, encoders: Any, rows: int) -> None:
    made = recipe(algorithm("fedavg", selector=ALL), engine, encoders, data=Toy(rows=rows * 4 * 5 // 4, classes=2))
    made = replace(made, clients=ClientsSpec(partition="iid", num=4))
    if rows == 1 and encoders is AWKWARD:  # one row has no batch statistics
        with refuses(RecipeError, "train.batch_size: BatchNorm"):
            played(made)
        return
    state = played(made)[1]
    assert all(bool(torch.isfinite(v).all()) for v in state.params.values())


def test_one_class_trains() -> None:
    with warned("label 0", UserWarning):
        state = played(recipe(algorithm("fedavg"), "vectorised", data=Toy(rows=200, classes=1)))[1]
    assert all(bool(torch.isfinite(v).all()) for v in state.params.values())


BASE: dict[str, Any] = {
    "data": {"name": "toy"},
    "clients": {"num": 4},
    "model": {"encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
    "algorithm": {"name": "fedprox"},
}


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("algorithm", {"name": "fedprx"}, "did you mean 'fedprox'"),
        ("algorithm", {"mue": 0.1}, "[algorithm] has no option 'mue'; did you mean 'mu'"),
        ("algorithm", {"mu": "much"}, "[algorithm] mu = 'much': must be a number"),
        ("train", {"lr": -1.0}, "[train] lr = -1.0: must be 0 or more"),
        ("train", {"epochs": 1.5}, "[train] epochs = 1.5: must be a whole number"),
        ("train", {"epochs": 0}, "[train] epochs = 0: must be 1 or more"),
        ("train", {"steps": 0}, "[train] steps = 0: must be 1 or more"),
        ("train", {"batch_size": -1}, "[train] batch_size = -1: must be 0 or more"),
        ("evaluate", {"every": -1}, "[evaluate] every = -1: must be 0 (only the last round) or more"),
        ("evaluate", {"personal": 1}, "[evaluate] personal = 1: must be true or false"),
        ("checkpoint", {"every": -1}, "[checkpoint] every = -1: must be 0 (only the last round) or more"),
        ("engine", {"min_nodes": 2}, "[engine] has no option 'min_nodes'; did you mean deployment.min_nodes?"),
        ("engine", {"min_replies": -1}, "[engine] min_replies = -1: must be 0 or more"),
        ("deployment", {"client_cpus": 0.0}, "[deployment] client_cpus = 0.0: must be above 0"),
        ("clients", {"missing": {"a": "half"}}, "[clients] missing.a = {'a': 'half'}: must be a number"),
        ("model", {"head": ["a"]}, "[model] head[0] = ['a']: must be a whole number"),
        ("egress", {"a": 5}, '[egress] a = 5: write [egress.a] and below it server = ["parameters"]'),
        ("egress", {"a": {"server": "raw"}}, "[egress.a] server = 'raw': must be a list of kinds"),
        ("train", {"optimiser": "sdg"}, "[train] optimiser = 'sdg'"),
        ("clients", {"participation": 0}, "participation = 0"),
        ("clients", {"participation": 1.5}, "participation = 1.5"),
        ("clients", {"alpha": 0.0}, "alpha = 0.0"),
        ("clients", {"partition": "dirichlett"}, "did you mean 'dirichlet'"),
        ("data", {"name": "toys"}, "did you mean 'toy'"),
        ("model", {"fusion": "concatenate"}, "concat"),
        ("model", {"encoders": {"a": {"kind": "mpl"}}}, "mlp"),
        ("egress", {"a": {"sever": []}}, "did you mean 'server'"),
        ("engine", {"name": "vectorized"}, "'vectorised'"),
        ("selection", {"name": "unifrom"}, "did you mean 'uniform'"),
        ("trian", {"lr": 0.1}, "did you mean 'train'"),
    ],
)
def test_a_wrong_recipe_says_where_what_and_the_nearest_name(section: str, change: Any, words: str) -> None:
    table = {**BASE, section: {**BASE.get(section, {}), **change}}
    with pytest.raises(RecipeError) as error:
        assemble(parse_recipe(table))
    assert words in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 0}, "rounds = 0: must be 1 or more, as nothing would be trained"),
        ({"rounds": 1.5}, "rounds = 1.5: must be a whole number"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
    ],
)
def test_a_wrong_key_before_the_sections_is_named_as_it_is_written(change: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(BASE | change)
    assert str(error.value) == words


OUTSIDE = (float("nan"), -1.0, 0.0, 2.0, -1, -7)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in [*ALGORITHMS.values(), *SELECTORS.values(), Train, ServerOptimiser, EngineSpec]
        for name in ranges(kind)
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_every_option_with_a_range_is_refused_outside_of_it(kind: Any, name: str) -> None:
    within = ranges(kind)[name]
    whole = int in simple_types(kind)[name]
    outside = [value for value in OUTSIDE if not within.holds(value) and not (whole and isinstance(value, float))]
    assert len(outside) >= 2
    for value in outside:
        with pytest.raises(RecipeError) as refused:
            kind(**{name: value})
        assert f"] {name} = {value}: must be {within.words}" in str(refused.value)


def test_a_share_of_clients_that_an_algorithm_does_not_draw_is_told() -> None:
    table = {**BASE, "algorithm": {"name": "fedamp"}, "clients": {**BASE["clients"], "participation": 0.5}}
    made = parse_recipe(table)
    (text,) = idle_options(made, assemble(made))
    assert text.startswith("[clients] participation = 0.5 has no effect beside algorithm 'fedamp', which asks every")


@pytest.mark.parametrize(
    ("section", "table", "words"),
    [
        ("train", {"lr_end": 0.01}, "[train] lr_end = 0.01 has no effect beside lr_schedule = 'constant'"),
        ("train", {"beta1": 0.5}, "[train] beta1 = 0.5 has no effect beside optimiser = 'sgd'"),
        (
            "train",
            {"optimiser": "adam", "momentum": 0.9},
            "[train] momentum = 0.9 has no effect beside optimiser = 'adam'",
        ),
        ("server", {"momentum": 0.5}, "[server] momentum = 0.5 has no effect beside optimiser = 'none'"),
        (
            "server",
            {"optimiser": "adagrad", "beta2": 0.5},
            "[server] beta2 = 0.5 has no effect beside optimiser = 'adagrad'",
        ),
    ],
)
def test_an_option_without_effect_is_told(section: str, table: dict[str, Any], words: str) -> None:
    made = parse_recipe({**BASE, section: table})
    assert [*idle_options(made)] == [words]
    with warned("no effect") as caught:
        polyfed.run(replace(made, rounds=1))
    assert [str(one.message) for one in caught if "no effect" in str(one.message)] == [words], "not once per assembly"
    assert not [*idle_options(parse_recipe({**BASE, section: {"optimiser": "none" if section == "server" else "sgd"}}))]
    assert not [*idle_options(parse_recipe(parse_recipe(BASE).table()))], "a resolved recipe contains all defaults"


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_no_recipe_of_ours_has_an_option_without_effect(path: Path) -> None:
    assert [*idle_options(polyfed.load_recipe(path))] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Train(lr="x"), "train.lr: a number"),
        (lambda: Train(epochs=2.5), "train.epochs: a whole number"),
        (lambda: Train(epochs=True), "train.epochs: a whole number"),
        (lambda: Train(nesterov=1), "train.nesterov: true or false"),
        (lambda: Train(steps="3"), "train.steps: number or None"),
        (lambda: ALGORITHMS["fedprox"](mu="big"), "algorithm.mu: a number"),
        (lambda: ClientsSpec(num="4"), "clients.num: a whole number"),
    ],
)
def test_objects_made_in_python_are_checked_for_types(make: Any, words: str) -> None:
    with refuses(RecipeError, words):
        make()


def test_run_and_check_take_a_recipe_or_its_path() -> None:
    path = Path("recipes/fedavg-cg-digits.toml")
    resolved = replace(polyfed.load_recipe(path), task=CLASSES)
    assert polyfed.check(path).recipe == polyfed.check(str(path)).recipe == resolved
    for verb in (polyfed.run, polyfed.check):
        with refuses(RecipeError, "a dict"):
            verb({"data": {"name": "toy"}})


def test_numbers_of_numpy_are_numbers() -> None:
    train = Train(lr=np.float32(0.5), epochs=np.int64(2))
    assert (train.lr, train.epochs) == (0.5, 2)


def test_steps_make_up_for_no_epochs_and_objects_may_train_nothing() -> None:
    assert parse_recipe({**BASE, "train": {"epochs": 0, "steps": 3}}).algorithm.train.steps == 3
    assert replace(parse_recipe(BASE), rounds=0).rounds == 0


def test_more_clients_than_there_are_is_an_error() -> None:
    with refuses(RecipeError, "clients.participation: 4 clients"):
        polyfed.run(parse_recipe({**BASE, "clients": {"num": 4, "participation": 5}}))


def test_a_section_without_effect_is_an_error() -> None:
    with refuses(RecipeError, "server: effect"):
        parse_recipe({**BASE, "algorithm": {"name": "local"}, "server": {"optimiser": "adam"}})


@pytest.mark.parametrize("override", ["train.lr", "=3", "seed.x.y=1", "train..lr=1"])
def test_a_malformed_override_is_told(override: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('seed = 1\n[data]\nname = "toy"\n')
    with refuses(RecipeError, "--set"):
        polyfed.load_recipe(path, [override])


@pytest.mark.parametrize("text", ["seed = ", "\x00", "[data\n"])
def test_a_broken_file_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with refuses(RecipeError, "around words"):
        polyfed.load_recipe(tmp_path / "r.toml")
    with refuses(RecipeError, "No such file"):
        polyfed.load_recipe(tmp_path / "nowhere.toml")
    with refuses(RecipeError, "a method"):
        polyfed.run("fedavg")


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    base = {
        "a": rng.normal(size=(40, 5)).astype(np.float32),
        "label": np.arange(40) % 3,
        "split": np.repeat([0, 1], [30, 10]),
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": np.full((40, 5), np.nan, np.float32)}, "NaN"),
        ({"a": np.zeros((39, 5), np.float32)}, "39 rows"),
        ({"label": np.full(40, -1)}, "-1"),
        ({"split": np.full(40, 7)}, "split"),
        ({"split": np.ones(40, int)}, "no training row to split over clients"),
        ({"a": np.zeros((40, 0), np.float32)}, "no numbers"),
        ({"label": np.r_[np.arange(39) % 3, 10**7]}, "10000001 classes of 40 rows"),
    ],
    ids=["nan", "unequal", "label", "split", "all-test", "empty-samples", "a-label-that-is-none"],
)
def test_odd_arrays_are_told_by_name(changes: Any, words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays(**changes))
    made = recipe(algorithm("fedavg"), data=Npz(path=str(tmp_path / "d.npz"), modalities=("a",)))
    one = ModelSpec(encoders={"a": {"kind": "mlp"}})
    with pytest.raises(DataError) as error:
        assemble(replace(made, model=one, clients=ClientsSpec(num=3)))
    assert words in str(error.value)


def test_labels_that_are_also_a_modality_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **arrays(both=np.eye(4, dtype=np.float32)[np.arange(40) % 4]))
    for role in ("label", "client", "split"):
        with refuses(RecipeError, f"data.{role}: 'both'"):
            Npz(path=str(tmp_path / "one.npz"), modalities=("a", "both"), **{role: "both"})
    with refuses(RecipeError, "data.label: column"):
        SOURCES["hf"](path="rows", modalities={"a": "values"}, columns={"a": "x"}, label="x")


def test_classes_without_a_row_and_modalities_of_nobody_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **arrays(label=np.arange(40) % 3 + 1))
    with warned("1 class"):
        Npz(path=str(tmp_path / "one.npz"), modalities=("a",)).load()
    names = np.array(["none", "x", "y", "z"])
    np.savez(tmp_path / "named.npz", **arrays(label=np.arange(40) % 3 + 1, label_name=names))
    Npz(path=str(tmp_path / "named.npz"), modalities=("a",)).load()
    np.savez(tmp_path / "absent.npz", **arrays(b=np.zeros((40, 2), np.float32), b_present=np.zeros(40, bool)))
    data = Npz(path=str(tmp_path / "absent.npz"), modalities=("a", "b"))
    with warned("client has training"):
        assemble(recipe(algorithm("fedavg"), data=data, clients=ClientsSpec(partition="iid", num=3)))


def test_a_recipe_that_windows_wrote_is_read(tmp_path: Path) -> None:
    text = Path("recipes/fedavg-cg-digits.toml").read_text(encoding="utf-8")
    (tmp_path / "r.toml").write_bytes(text.encode("utf-8-sig"))
    assert polyfed.load_recipe(tmp_path / "r.toml").rounds == 30


@pytest.mark.parametrize("name", ["fedgkt", "creamfl"])
def test_methods_that_take_rows_for_complete_refuse_data_in_which_some_are_not(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    there = draw.random(60) > 0.5
    arrays = {"a": draw.normal(size=(60, 4)), "b": draw.normal(size=(60, 3)), "label": np.arange(60) % 3}
    np.savez(tmp_path / "gaps.npz", **arrays, b_present=there)
    np.savez(tmp_path / "whole.npz", **arrays, b_present=np.ones(60, bool))
    made = recipe(algorithm(name), clients=ClientsSpec(partition="iid", num=3))
    assemble(replace(made, data=Npz(path=tmp_path / "whole.npz", modalities=("a", "b"))))
    with refuses(RecipeError, "client lack"):
        assemble(replace(made, data=Npz(path=tmp_path / "gaps.npz", modalities=("a", "b"))))


def test_a_truncated_or_missing_file_and_a_missing_modality_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays())
    whole = (tmp_path / "d.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    for name, modality, words in (
        ("half.npz", "a", "half.npz"),
        ("none.npz", "a", "none.npz"),
        ("d.npz", "aa", "mean 'a'"),
    ):
        with refuses(PolyfedError, words):
            Npz(path=str(tmp_path / name), modalities=(modality,)).load()
