"""Frozen parameters are constants: they neither train nor cross, on any engine, and are the same everywhere."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import polyfed
from laws.rows import ROWS
from laws.test_laws import params, world
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, ModelError, TooFewReplies
from polyfed.core.tree import block_of, size_bytes
from polyfed.engines.work_count import MeteredClientData
from polyfed.experiment.checks.check import Check, check
from polyfed.experiment.checks.check_tables import check_tables
from polyfed.experiment.recipes.recipe import CheckpointSpec, EngineSpec, Recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.model import Model, ModelSpec, build_model
from polyfed.training.optimisers import Train
from refusals import refuses
from stacks import steps_of_programs
from world import FROZEN, WHOLE, FrozenBackbone, algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
BACKBONE = [f"layers.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
STATISTICS = ["layers.1.running_mean", "layers.1.running_var"]


def one(kind: str, **options: Any) -> Model:
    return build_model(ModelSpec(embedding=4, encoders={"x": {"kind": kind, **options}}), {"x": (5,)}, 3)


def both(kind: str) -> dict[str, Any]:
    return {modality: {"kind": f"frozen_encoders:{kind}"} for modality in "ab"}


def batch(key: int | None = None) -> Batch:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    return Batch(x={"x": x}, y=torch.arange(7) % 3, rows=torch.arange(7), key=key)


def crossed(rows: list[dict[str, Any]], block: str) -> set[int]:
    """Bytes of all parts of models that crossed of a block."""
    return {row["bytes"] for row in rows if row["kind"] == "parameters" and row["block"] == block}


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_neither_change_nor_cross(engine: str) -> None:
    made = recipe(algorithm("fedavg"), engine, FROZEN)
    parts, state, ledger = played(made)
    expected = {f"{m}.encoder.{name}" for m in "ab" for name in BACKBONE}
    assert parts.model.frozen.keys() == expected
    assert same(parts.model.frozen, assemble(made).model.frozen)
    assert not expected & state.params.keys()
    moved = [n for n, v in state.params.items() if not torch.equal(v, parts.initial[n])]
    assert moved == list(state.params), "all the rest trains"
    last, fusion, statistics = 12 * 6 + 6, 6 * 4, 2 * 12
    assert crossed(ledger, "a") == {4 * (last + fusion + statistics)}
    assert crossed(ledger, "b") == {4 * (last + fusion)}, "statistics of what stays in evaluation are constants"
    assert parts.model.num_parameters(["a"]) == last + fusion + 4


@pytest.mark.parametrize("name", sorted(ROWS))
def test_engines_agree_and_no_method_knows_a_frozen_name(name: str) -> None:
    made = replace(world(name, "sequential", FROZEN), rounds=2)
    one, state_one, ledger_one = played(made)
    many, state_many, ledger_many = played(replace(made, engine=replace(made.engine, name="vectorised")))
    assert ledger_one == ledger_many
    assert furthest(params(state_one), params(state_many)) < ROWS[name].tolerance
    for client, tree in one.engine.locals.items():
        assert furthest(tree, many.engine.locals[client]) < 10 * ROWS[name].tolerance
    held = {name for tree in (params(state_one), *one.engine.locals.values()) for name in tree}
    assert not [name for name in held if any(name.endswith(frozen) for frozen in BACKBONE)]
    assert same(one.model.frozen, many.model.frozen)


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("fusion", ["concat", "sum"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"train": Train(lr=0.01, batch_size=16, optimiser="adamw", clip_norm=1.0)}),
        ("fedproto", {}),
        ("hfm", {"head_update": "server"}),
        ("pfmml", {}),
        ("split-learning", {}),
        ("splitfed", {"train": Train(lr=0.1, batch_size=16, momentum=0.9)}),
    ],
)
def test_an_encoder_that_is_wholly_frozen_trains_its_part_of_the_fusion_at_most(
    name: str, options: dict[str, Any], fusion: Any
) -> None:
    def made(engine: str) -> Recipe:
        base = world(name, engine, WHOLE, **options)
        return replace(base, model=replace(base.model, fusion=fusion), engine=replace(base.engine, debug=True))

    one, state_one, ledger_one = played(made("sequential"))
    _, state_many, ledger_many = played(made("vectorised"))
    assert ledger_one == ledger_many
    assert furthest(params(state_one), params(state_many)) < ROWS[name].tolerance
    block = {n for tree in (params(state_one), *one.engine.locals.values()) for n in tree if block_of(n) == "a"}
    assert block <= ({"a.fusion.weight"} if fusion == "concat" else set())
    assert check(made("sequential")).remarks == ()


def test_attention_that_stays_in_evaluation_runs_stacked_as_alone() -> None:
    def made(engine: Any) -> Recipe:  # an operation without a rule for vmap warns, and warnings are errors here
        return recipe(algorithm("fedavg"), EngineSpec(name=engine, debug=True), both("Attending"))

    one, state_one, _ = played(made("sequential"))
    _, state_many, _ = played(made("vectorised"))
    assert furthest(state_one.params, state_many.params) < 1e-5
    last = ["a.encoder.out.weight", "a.encoder.out.bias", "a.fusion.weight"]
    assert [name for name in state_one.params if block_of(name) == "a"] == last
    assert not one.model.has_batchnorm


def test_replayed_steps_are_the_plain_ones_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = steps_of_programs(monkeypatch)
    made = recipe(algorithm("fedavg", train=Train(lr=0.1, batch_size=16, epochs=5)), "vectorised", FROZEN)
    parts, state, _ = played(made)
    assert sum(taken) > 10
    _, plain, _ = played(replace(made, engine=EngineSpec(name="vectorised", replay=False)))
    assert furthest(state.params, plain.params) < 1e-5
    assert same(parts.model.frozen, assemble(made).model.frozen)


def test_a_model_is_its_encoder_with_the_frozen_and_the_trained_values() -> None:
    model = one("world:FrozenBackbone")
    w = model.init(7)
    plain = FrozenBackbone((5,), 4).eval()
    values = {n.removeprefix("x.encoder."): v for n, v in (w | model.frozen).items() if ".encoder." in n}
    assert plain.state_dict().keys() - values.keys() == {"layers.1.num_batches_tracked"}
    plain.load_state_dict(values, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model.features(w, batch())["x"], plain(batch().x["x"]))


def test_what_is_frozen_and_what_trains_come_from_one_draw_by_the_seed() -> None:
    drawn = []
    for seed in (0, 1, 1):
        made = recipe(algorithm("fedavg"), encoders=both("Halves"))
        parts = assemble(replace(made, seed=seed))
        for m in "ab":
            assert torch.equal(parts.initial[f"{m}.encoder.moving"], -parts.model.frozen[f"{m}.encoder.fixed"])
        drawn.append(parts.model.frozen["a.encoder.fixed"])
    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1]), "runs of other seeds draw other values"


def test_batchnorm_and_dropout_in_a_frozen_part_do_as_in_pytorch() -> None:
    follows, stays = one("world:FrozenBackbone"), one("world:KeptBackbone")
    names = [f"x.encoder.{name}" for name in STATISTICS]
    w, kept = follows.init(1), stays.init(1)
    before = {name: w[name].clone() for name in names}
    trained = follows.features(w, batch(key=3))["x"]
    assert not any(torch.equal(w[name], before[name]) for name in names)
    assert not torch.allclose(trained, follows.features(w, batch())["x"])
    assert not kept.keys() & names
    assert torch.equal(stays.features(kept, batch(key=3))["x"], stays.features(kept, batch())["x"])
    assert (follows.has_batchnorm, stays.has_batchnorm) == (True, False)


def test_a_lora_wrapper_sends_only_its_adapters() -> None:
    made = recipe(algorithm("fedavg"), encoders=both("Adapted"))
    parts, state, ledger = played(made)
    adapters = [f"a.encoder.{layer}.lora_{part}.weight" for layer in (0, 2) for part in "ab"]
    assert [name for name in state.params if name.startswith("a.encoder.")] == adapters
    sizes = {row["block"]: row["bytes"] for row in ledger if row["kind"] == "parameters"}
    assert sizes["a"] == 4 * (2 * (16 + 12) + 2 * (12 + 6) + 6 * 4)
    frozen = {"a": 16 * 12 + 12 + 12 * 6 + 6, "b": 24 * 12 + 12 + 12 * 6 + 6}
    assert {m: sum(v.numel() for n, v in parts.model.frozen.items() if block_of(n) == m) for m in "ab"} == frozen


def loaded(path: Path, **changes: Any) -> Recipe:
    """A run whose encoder of `a` has a frozen layer from a file."""
    torch.save(torch.randn(12, 16, generator=torch.Generator().manual_seed(3)), path)
    encoders = {"a": {"kind": "frozen_encoders:Loaded", "path": str(path)}, "b": {"kind": "mlp"}}
    return replace(recipe(algorithm("moon"), encoders=encoders), checkpoint=CheckpointSpec(every=1), **changes)


def stopped(made: Recipe, folder: Path) -> None:
    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, folder, listeners=[stop])


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_has_the_same_frozen_values(engine: Any, tmp_path: Path) -> None:
    made = recipe(algorithm("moon"), engine, FROZEN)
    whole = polyfed.run(made)
    stopped(made, tmp_path / "run")
    resumed = polyfed.run(made, tmp_path / "run", resume=True)
    assert resumed.result["state_sha256"] == whole.result["state_sha256"]
    assert len(resumed.model.frozen) == 2 * len(BACKBONE)
    assert same(resumed.model.frozen, whole.model.frozen)


def test_a_run_does_not_go_on_with_other_frozen_values(tmp_path: Path) -> None:
    made = loaded(tmp_path / "weights.pt")
    stopped(made, tmp_path / "run")
    torch.save(torch.zeros(12, 16), tmp_path / "weights.pt")
    with refuses(DataError, "file has changed"):
        polyfed.run(made, tmp_path / "run", resume=True)


def test_clients_elsewhere_have_the_servers_frozen_values_or_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import hub_of, joined
    from engines.direct import played as played_there

    made = loaded(tmp_path / "weights.pt", rounds=1, engine=EngineSpec(name="flower"))
    grid = hub_of(made, tmp_path / "clients")
    state, ledger = played_there(made, joined(made, grid))
    _, here, ledger_here = played(replace(made, engine=EngineSpec(name="sequential")))
    assert checkpoint.digest(state) == checkpoint.digest(here)
    assert ledger == ledger_here
    assert "a.encoder.layer.weight" not in state.params
    torch.save(torch.zeros(12, 16), tmp_path / "weights.pt")
    parts = joined(made, grid)  # the server reads the file anew, the clients have read it
    with refuses(TooFewReplies, "whose frozen"):
        played_there(made, parts)


def printed(checked: Check) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(check_tables(checked))
    return capture.get()


@pytest.mark.filterwarnings("ignore:.*measures nothing")
def test_check_counts_frozen_parameters_and_promises_nothing_of_them() -> None:
    made = recipe(algorithm("fedavg"), encoders=WHOLE)
    made = replace(made, model=replace(made.model, fusion="sum"))
    found = check(made)
    assert found.facts["frozen"]["parameters"] == {"a": 16 * 6 + 6, "b": 24 * 12 + 12 + 2 * 12}
    assert found.facts["blocks"]["a"] == 0
    assert [row for row in found.planned if (row.block, row.kind) == ("a", "parameters")] == []
    (planned,) = [row for row in found.planned if (row.block, row.kind) == ("b", "parameters")]
    parts = assemble(made)
    assert planned.bytes == size_bytes({n: v for n, v in parts.initial.items() if block_of(n) == "b"})
    assert f"{16 * 6 + 6}" in printed(found)
    assert "frozen parameters" in printed(found)
    assert "frozen parameters" not in printed(check(recipe(algorithm("fedavg"))))


def test_simulated_time_knows_the_forward_pass_of_a_frozen_encoder() -> None:
    made = recipe(algorithm("fedavg"), encoders=WHOLE)
    parts = assemble(replace(made, model=replace(made.model, fusion="sum")))
    model, counted = parts.model, []
    idle = SimpleNamespace(num_rows=torch.tensor(10), key=0, round=1, rounds=1, minimise=lambda *_, **__: None)
    view = MeteredClientData(idle, [10], ("a", "b"), model, lambda flops, rows: counted.append((flops, rows)))  # type: ignore[arg-type]
    view.minimise(lambda w, batch: 0, parts.initial, train=Train())
    assert counted == [(model.flops("a") + 3 * (model.flops("b") + model.flops("shared")), [10])]


@pytest.mark.parametrize("way", ["parameter", "train"])
def test_freezing_one_of_two_tied_layers_or_in_train_is_freezing(way: str) -> None:
    model = one("frozen_encoders:Tied", way=way)
    weight = "x.encoder.one.weight" if way == "parameter" else "x.encoder.two.weight"
    assert model.frozen.keys() == {weight, "x.encoder.two.bias"}
    assert not {*model.frozen, "x.encoder.two.weight"} & model.init(0).keys()


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("memory", "parameter that trains"),
        ("forward", "model.encoders.x: freezes"),
    ],
)
def test_what_cannot_be_held_to_is_refused(way: str, words: str) -> None:
    with refuses(ModelError, words):
        one("frozen_encoders:Tied", way=way)
