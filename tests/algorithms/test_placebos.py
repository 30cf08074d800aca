"""Controls that remove the idea of a method and keep its cost: they change the run and keep the laws of the method."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.hfm.messages import Exchange, shuffled_peers
from polyfed.algorithms.modalities.fedogm import FedOgm
from polyfed.algorithms.pfmml.coefficients import shuffled
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.training.prototypes import Prototypes, random_like
from refusals import refuses
from sampled import one_in
from world import furthest, played, same

CASES = [
    ("partialfl", "noise"),
    ("partialfl", "shuffled"),
    ("partialfl", "frozen"),
    ("cmsfed", "random-picks"),
    ("cmsfed", "random-modality"),
    ("cmsfed", "random-prototypes"),
    ("pfmml", "uniform"),
    ("pfmml", "shuffled"),
    ("hfm", "shuffled"),
    ("vfl", "shuffled"),
    ("fedogm", "constant"),
    ("mfedmc", "random-blocks"),
    ("fedmchain", "random-phases"),
    ("fedmchain", "random-clusters"),
    ("pepsy", "shuffled"),
    ("pmcmfl", "random-class"),
    ("pmcmfl", "mean"),
    ("feddyn", "random"),
    ("fednova", "shuffled"),
    ("fedbuff", "shuffled"),
    ("ditto", "initial"),
    ("apfl", "initial"),
    ("pfedme", "initial"),
    ("pfedmma", "initial"),
    ("fedcouncil", "random"),
    ("fedcouncil", "momentum"),
    ("fedcouncil", "own"),
    ("fedcouncil", "adapted"),
    ("fedcouncil", "unimodal"),
    ("fedcouncil", "modality_loss"),
    ("fedcouncil", "modulation"),
    ("fedcouncil", "dropout"),
    ("fedbn", "random"),
    ("fedrep", "initial"),
    ("lg-fedavg", "initial"),
    ("fedavg-ft", "initial"),
]


def controlled(name: str, engine: str = "sequential", **options: Any) -> Any:
    """The world of the laws; personalised coefficients need more uploads and rounds before they can differ."""
    if name == "pfmml":
        return replace(world(name, engine, uploads=1.0, **options), rounds=4)
    return world(name, engine, **options)


def models(parts: Any, state: Any) -> dict[str, torch.Tensor]:
    """What was trained: the state's model and what the clients keep."""
    own = {f"{client}/{n}": v for client, tree in parts.engine.locals.items() for n, v in tree.items()}
    return dict(state.params) | own


def test_every_method_with_a_placebo_is_tried() -> None:
    having = {name for name, cls in ALGORITHMS.items() if "placebo" in cls.__dataclass_fields__}
    assert having == {name for name, _ in CASES}


@pytest.mark.parametrize(("name", "placebo"), CASES)
def test_a_placebo_changes_the_run_keeps_its_messages_and_engines_agree(name: str, placebo: str) -> None:
    parts, state, ledger = played(controlled(name, "vectorised"))
    control, other, ledger_control = played(controlled(name, placebo=placebo))
    many, state_many, ledger_many = played(controlled(name, "vectorised", placebo=placebo))
    assert not same(models(parts, state), models(control, other))
    assert furthest(models(control, other), models(many, state_many)) < 10 * ROWS[name].tolerance
    assert ledger_control == ledger_many
    if name not in ("cmsfed", "fedbn", "mfedmc", "pfmml"):  # other clients or layers are chosen there, of other sizes
        assert [row["bytes"] for row in ledger] == [row["bytes"] for row in ledger_control]
    kinds = [{(row["message"], row["field"]) for row in rows} for rows in (ledger, ledger_control)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("name", "placebo"), one_in(3, {name: (name, placebo) for name, placebo in CASES}.values()))
def test_a_resumed_placebo_equals_the_uninterrupted_one(name: str, placebo: str, tmp_path: Any) -> None:
    made = world(name, "vectorised", placebo=placebo)
    _, whole, _ = played(made)
    parts, state, _ = played(replace(made, rounds=2))
    modules = checkpoint.modules_of(made.algorithm)
    checkpoint.save(tmp_path, 2, {"state": state, "locals": parts.engine.locals}, modules)
    found = checkpoint.load(tmp_path, modules)
    assert found is not None
    again = assemble(made)
    state = found[1]["state"]
    again.resume(state, found[1]["locals"], 2)
    again.fed.begin(3)
    assert checkpoint.digest(made.algorithm.round(state, again.fed)) == checkpoint.digest(whole)


def test_noise_and_shuffled_teachers_say_nothing_about_their_rows() -> None:
    sent = {}
    for placebo in ("none", "noise", "shuffled"):
        parts, state, _ = played(replace(world("partialfl", placebo=placebo), rounds=1))
        plain = played(replace(world("partialfl"), rounds=1))[1]
        parts.fed.begin(2)
        sent[placebo] = parts.algorithm.outgoing(replace(state, tower=plain.tower), [0], parts.fed)[0].teacher["b"]
    order = torch.arange(len(sent["none"]))
    places = torch.cdist(sent["shuffled"], sent["none"]).argmin(1)
    assert sorted(places.tolist()) == order.tolist()
    assert not torch.equal(places, order)
    torch.testing.assert_close(sent["noise"].norm(dim=1), sent["none"].norm(dim=1))
    assert not torch.isin(sent["noise"], sent["none"]).any()


def test_a_frozen_tower_stays_as_it_was_drawn() -> None:
    parts, state, _ = played(world("partialfl", placebo="frozen"))
    parts.fed.begin(0)
    assert same(state.tower, parts.algorithm.init(parts.fed, parts.initial).tower)
    assert state.tower_steps > 0  # the server has trained one, for the cost


def test_random_prototypes_have_the_lengths_and_classes_of_the_real_ones() -> None:
    real = Prototypes(torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), torch.arange(5) != 2)
    control = random_like(real, 3)
    torch.testing.assert_close(control.mean.norm(dim=1), real.mean.norm(dim=1))
    assert torch.equal(control.active, real.active)
    assert torch.equal(control.mean, random_like(real, 3).mean)
    assert not torch.allclose(control.mean, real.mean, atol=0.1)


def test_uniform_coefficients_stay_and_shuffled_ones_keep_the_own() -> None:
    _, state, _ = played(world("pfmml", placebo="uniform"))
    size = len(state.blocks["shared"].logits)
    assert all(torch.equal(e.logits, torch.full_like(e.logits, 1 / size)) for e in state.blocks.values())
    logits = torch.arange(25.0).view(5, 5)
    mixed = shuffled(logits, 4)
    assert torch.equal(mixed.diagonal(), logits.diagonal())
    assert torch.equal(mixed.sort(1).values, logits.sort(1).values)
    assert not torch.equal(mixed, logits)


def test_shuffled_embeddings_leave_a_devices_own_in_place() -> None:
    h = {m: torch.arange(12.0).view(6, 2) for m in "ab"}
    got = shuffled_peers(Exchange({}, h, torch.arange(6)), ["a"], keys.key(1)).embeddings
    assert torch.equal(got["a"], h["a"])
    assert not torch.equal(got["b"], h["b"])
    assert torch.equal(got["b"].sort(0).values, h["b"])


def test_a_constant_scale_is_the_mean_of_the_coefficients() -> None:
    scales = {}
    for placebo in ("none", "constant"):
        parts = assemble(world("fedogm", ge=False, placebo=placebo))
        parts.fed.begin(1)
        method, context = parts.algorithm, parts.engine.context(0)
        assert isinstance(method, FedOgm)
        data: Any = SimpleNamespace(round=1, num_rows=torch.tensor(9))
        directed = method.direction(context, data, SimpleNamespace(params=parts.initial), {})
        assert directed is not None
        grads = {n: torch.ones_like(v) for n, v in parts.initial.items()}
        out, _ = directed[0](grads, {}, {"a": torch.tensor(3.0), "b": torch.tensor(1.0)}, directed[1])
        scales[placebo] = {m: float(out[f"{m}.encoder.0.weight"].mean()) for m in "ab"}
    mean = sum(scales["none"].values()) / 2
    assert scales["none"]["a"] < scales["none"]["b"] == 1.0
    assert scales["constant"] == pytest.approx({"a": mean, "b": mean})


TABLE: dict[str, Any] = {
    "data": {"name": "toy"},
    "clients": {"num": 4, "partition": "iid"},
    "model": {"encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
}


def test_a_preset_sets_what_the_recipe_leaves_out() -> None:
    made = parse_recipe(TABLE | {"algorithm": {"name": "pfmml", "preset": "paper", "max_age": 3}}).algorithm
    assert (made.scale, made.coefficient_lr, made.max_age) == ("raw", 0.01, 3)
    over = parse_recipe(TABLE | {"algorithm": {"name": "pfmml", "preset": "paper", "scale": "per-step"}}).algorithm
    assert over.scale == "per-step"
    for name in ("pfmml", "cmsfed"):
        plain = ALGORITHMS[name]
        assert any(plain.__dataclass_fields__[k].default != v for k, v in plain.presets["paper"].items())


@pytest.mark.parametrize(
    ("name", "preset", "words"),
    [
        ("pfmml", "papr", "Pfmml has no such preset; did you mean 'paper'? Allowed: paper. Or remove the line"),
        ("pfmml", 3, "Pfmml has no such preset; Allowed: paper. Or remove the line"),
        ("fedavg", "papers", "FedAvg has no such preset; it has no presets. Remove the line"),
    ],
)
def test_an_unknown_preset_is_one_problem(name: str, preset: Any, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(TABLE | {"algorithm": {"name": name, "preset": preset}})
    assert str(refused.value) == f"[algorithm] preset = {preset!r}: {words}"
    assert refused.value.key == ("algorithm", "preset")


def test_an_unknown_preset_hides_no_other_fault() -> None:
    with refuses(RecipeError, "algorithm.preset: no such preset") as refused:
        parse_recipe(TABLE | {"algorithm": {"name": "pfmml", "preset": "papr", "max_agee": 3}})
    assert [fault.key[-1] for fault in refused.value.several] == ["preset", "max_agee"]
