"""PmcmFL: against a bare loop with missing rows, its stand-ins wherever a model predicts, its control, its refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from algorithms.test_blockwise import plainly
from algorithms.test_mfedmc import federation
from laws.rows import PROTOTYPES
from oracles import pmcmfl as oracle
from polyfed.algorithms.modalities.pmcmfl import PmcmFL, contrast, dealt, without_prototypes
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.experiment.checks.idle_options import idle_options
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.model import ModelSpec
from polyfed.model.build import build_model
from polyfed.model.stand_ins import is_prototype, names_of, stand_ins
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes
from refusals import refuses
from world import AWKWARD, algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)


def made(engine: str = "sequential", encoders: Any = None, **options: Any) -> Any:
    """Six clients, of whom some lack a modality, and rows that lack one."""
    found = recipe(algorithm("pmcmfl", train=TRAIN, **options), engine, encoders, egress=PROTOTYPES)
    return replace(found, clients=replace(found.clients, missing_rows={"a": 0.2, "b": 0.4}))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"contrast": 0.0},
        {"contrast": 0.5, "temperature": 0.5},
        {"stand_in": "similarity", "contrast": 0.2},
        {"variant": "mfcpl", "contrast": 0.5, "temperature": 0.3},
    ],
    ids=str,
)
def test_three_rounds_equal_a_bare_loop_with_missing_rows(engine: str, options: dict[str, Any]) -> None:
    parts, state, ledger = played(made(engine, **options))
    assert parts.population.columns.present, "some rows lack a modality"
    told = parts.algorithm
    chosen = oracle.Options(told.variant, told.stand_in, told.contrast, told.temperature)
    initial = plainly(without_prototypes(assemble(parts.recipe).initial))
    rows = [{**row, "message": "Offer" if row["message"] == "Learned" else row["message"]} for row in ledger]
    w, library = oracle.pmcmfl(federation(parts, rows), initial, chosen)
    torch.testing.assert_close(plainly(state.params), w, rtol=1e-5, atol=1e-5)
    for m, near in state.library.items():
        assert near.active.nonzero().flatten().tolist() == sorted(library[m])
        for c, mean in library[m].items():
            torch.testing.assert_close(near.mean[c], mean, rtol=1e-5, atol=1e-5)
    columns, test = parts.population.columns, parts.population.train[0]
    x = {m: column.values[test].float() for m, column in columns.modalities.items()}
    present = {m: there[test] for m, there in columns.present.items()}
    batch = Batch(x, columns.label[test], torch.arange(len(test)), present=present)
    params, model = told.global_params(state), parts.fed.context.model
    for names in (("a", "b"), ("a",)):
        kept = replace(batch, x={m: x[m] for m in names}, present={m: p for m, p in present.items() if m in names})
        wanted = oracle.answers(w, library, dict(kept.x), dict(kept.present), told.variant)
        torch.testing.assert_close(model.logits(params, kept), wanted, rtol=1e-4, atol=1e-4)
    if told.variant == "pmcmfl":
        assert not torch.allclose(model.logits(state.params, kept), wanted, atol=1e-3), "the stand-ins change something"


def test_stand_ins_by_hand() -> None:
    near = {
        "a": (torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]), torch.tensor([True, True, False])),
        "b": (torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), torch.tensor([True, True, True])),
    }
    z = {"a": torch.tensor([[0.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([[0.0, 0.0], [0.0, 1.0]])}
    present = {"a": torch.tensor([True, False]), "b": torch.tensor([False, True])}
    found = stand_ins(near, z, present, ["a", "b"])
    share = torch.softmax(torch.tensor([0.0, -5.0]), 0)  # class 2 is unknown in a
    torch.testing.assert_close(found["b"][0][0], share @ near["b"][0][:2], atol=1e-5, rtol=1e-5)
    share = torch.softmax(-torch.tensor([2.0**0.5, 0.0]), 0)
    torch.testing.assert_close(found["a"][0][1], share @ near["a"][0][:2], atol=1e-5, rtol=1e-5)
    assert found["a"][1].all()
    nothing = {m: torch.zeros(2, dtype=torch.bool) for m in "ab"}
    assert not any(bool(has.any()) for _, has in stand_ins(near, z, nothing, ["a", "b"]).values()), "rows without all"
    empty = {m: (mean, torch.zeros(3, dtype=torch.bool)) for m, (mean, _) in near.items()}
    assert not any(bool(has.any()) for _, has in stand_ins(empty, z, present, ["a", "b"]).values()), "no prototypes"


def test_the_contrast_by_hand() -> None:
    near = Prototypes(torch.tensor([[2.0, 0.0], [0.0, 3.0], [9.0, 9.0]]), torch.tensor([True, True, False]))
    z = torch.tensor([[5.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    batch = Batch({}, torch.tensor([0, 2, 1]), torch.arange(3), present={"a": torch.tensor([True, True, False])})
    wanted = -torch.log_softmax(torch.tensor([1.0, 0.0]) / 0.5, 0)[0]  # row 1 has no prototype, row 2 no modality
    torch.testing.assert_close(contrast(near, z, batch, "a", 0.5), wanted)
    nobody = Prototypes(near.mean, torch.zeros(3, dtype=torch.bool))
    assert float(contrast(nobody, z, batch, "a", 0.5)) == 0.0


FUSIONS = [("concat", ()), ("concat", (5,)), ("sum", ()), ("gated", ()), ("attention", ())]


@pytest.mark.parametrize(("fusion", "head"), FUSIONS)
def test_a_row_with_a_stand_in_is_predicted_as_one_with_this_embedding(fusion: str, head: tuple[int, ...]) -> None:
    recurrent = {m: {"kind": "conv-gru", "channels": [4]} for m in "ab"}
    encoders = recurrent if fusion == "attention" else {m: {"kind": "mlp"} for m in "ab"}
    spec = ModelSpec(embedding=4, fusion=fusion, head=head, encoders=encoders, absent="prototypes")
    shape = (12, 3) if fusion == "attention" else (3,)
    model = build_model(spec, {"a": shape, "b": shape}, 2)
    w = model.init(1)
    mean, known = names_of("b")
    x = {m: torch.randn(4, *shape, generator=torch.Generator().manual_seed(ord(m))) for m in "ab"}
    batch = Batch(x, torch.zeros(4, dtype=torch.int64), torch.arange(4))
    half = replace(batch, present={"b": torch.tensor([True, False, True, False])})
    alone = replace(batch, x={"a": x["a"]})
    zero = model.logits(w, half)
    assert torch.equal(model.logits(model.trainable(w), half), zero), "without known classes, absent is zero"
    w[mean], w[known] = torch.tensor([[1.0, -2.0, 3.0, 0.5]] * 2), torch.ones(2)
    w[names_of("a")[1]] = torch.ones(2)
    features = model.features(w, batch)
    features["b"] = w[mean][0].expand_as(features["b"])
    wanted = model.fuse(w, features, batch)
    torch.testing.assert_close(model.logits(w, alone), wanted)
    torch.testing.assert_close(model.logits(w, half)[1::2], wanted[1::2])
    torch.testing.assert_close(model.logits(w, half)[::2], zero[::2])
    torch.testing.assert_close(model.classify(w, model.joint(w, model.features(w, alone), alone), alone), wanted)


def test_prototypes_cross_as_prototypes_and_never_as_parameters() -> None:
    _, _, ledger = played(made())
    rows = [row for row in ledger if row["field"] == "prototypes"]
    assert {row["kind"] for row in rows} == {"prototypes"}
    assert {row["block"] for row in rows} == {"a", "b"}
    assert all(row["shape"] == [4, 6] or row["shape"] == [1, 4, 6] or row["bytes"] == 4 * 24 for row in rows)
    plain = played(replace(made(), algorithm=algorithm("fedavg", train=TRAIN)))[2]

    def sizes(rows: list[dict[str, Any]]) -> list[int]:
        return [row["bytes"] for row in rows if row["kind"] == "parameters"]

    assert sizes(ledger) == sizes(plain)


@pytest.mark.parametrize("variant", ["pmcmfl", "mfcpl"])
def test_with_complete_rows_and_no_contrast_it_is_fedavg(variant: str) -> None:
    options: dict[str, Any] = {"train": TRAIN, "contrast": 0.0, "variant": variant}
    ours = played(recipe(algorithm("pmcmfl", **options), "vectorised", AWKWARD, egress=PROTOTYPES))[1]
    theirs = played(recipe(algorithm("fedavg", train=TRAIN), "vectorised", AWKWARD))[1]
    assert same(ours.params, theirs.params)


def test_the_median_of_prototypes_bounds_a_liar() -> None:
    _, state, _ = played(made(server=ServerOptimiser(aggregate="median")))
    _, mean, _ = played(made())
    assert not same({m: p.mean for m, p in state.prototypes.items()}, {m: p.mean for m, p in mean.prototypes.items()})


def test_the_control_deals_the_same_prototypes_to_other_classes() -> None:
    parts, state, _ = played(made(placebo="random-class"))
    for m, near in state.prototypes.items():
        assert not torch.equal(near.mean, state.library[m].mean)
        assert torch.equal(near.mean.sort(0).values, state.library[m].mean.sort(0).values)
    _, state, _ = played(made(placebo="mean"))
    for m, near in state.prototypes.items():
        mean = near.mean[near.active].mean(0)
        torch.testing.assert_close(state.library[m].mean, mean.expand_as(near.mean))
    near = state.prototypes["a"]
    assert not torch.equal(dealt(near, "a", parts.fed).mean, dealt(near, "b", parts.fed).mean)


def test_a_run_predicts_exports_and_is_evaluated_with_stand_ins(tmp_path: Path) -> None:
    found = replace(made("vectorised", selector=Uniform()), rounds=2, name="p")
    found = replace(
        found,
        clients=replace(found.clients, personal_test=0.3),
        algorithm=replace(found.algorithm, evaluation=replace(found.algorithm.evaluation, subsets="all")),
    )
    run = polyfed.run(found, out=tmp_path / "run")
    x = {m: torch.randn(5, shape[0]) for m, shape in run.models.model.shapes.items()}
    params = run.models.params
    assert any(map(is_prototype, params))
    whole, alone = run.predict(x), run.predict({"a": x["a"]})
    bare = run.models.model.logits(
        without_prototypes(params), Batch({"a": x["a"]}, torch.zeros(5, dtype=torch.int64), torch.arange(5))
    )
    assert not torch.allclose(alone, bare, atol=1e-4)
    again = polyfed.load_model(run.export(tmp_path / "model"))
    assert torch.equal(again.predict(x), whole)
    assert torch.equal(again.predict({"a": x["a"]}), alone)
    holes = x | {"b": x["b"].clone().index_fill_(0, torch.tensor([1]), torch.nan)}
    torch.testing.assert_close(again.module()(holes)[1], alone[1])
    scores = run.result["metrics"]["personal"]
    told = polyfed.evaluate(tmp_path / "run").content["pooled"]["metrics"]["accuracy"]["value"]
    assert told == pytest.approx(scores["pooled_accuracy"] if "pooled_accuracy" in scores else scores["weighted"])


def test_a_warm_start_takes_the_prototypes_and_a_model_without_them_starts_with_none(tmp_path: Path) -> None:
    first = polyfed.run(replace(made("vectorised"), rounds=2, name="p"), out=tmp_path / "one")
    first.export(tmp_path / "model")
    warm = made("vectorised")
    warm = replace(warm, model=replace(warm.model, init=str(tmp_path / "model")))
    state = assemble(warm).start()
    assert all(torch.equal(near.sent, first.models.params[names_of(m)[0]]) for m, near in state.library.items())
    plain = replace(warm, algorithm=algorithm("fedavg", train=TRAIN), model=replace(warm.model, init=""), name="f")
    polyfed.run(plain, out=tmp_path / "two").export(tmp_path / "plain")
    warm = replace(warm, model=replace(warm.model, init=str(tmp_path / "plain")))
    assert not any(bool(near.active.any()) for near in assemble(warm).start().library.values())


def test_frozen_blocks_have_prototypes_too(tmp_path: Path) -> None:
    first = polyfed.run(replace(made("vectorised"), rounds=1, name="p"), out=tmp_path / "one")
    first.export(tmp_path / "model")
    found = made("vectorised")
    found = replace(found, model=replace(found.model, init=str(tmp_path / "model"), freeze=("a",)))
    _, state, _ = played(found)
    assert state.library["a"].active.any()
    assert not any(name.startswith("a.") for name in state.params)


def test_what_cannot_be_or_has_no_effect_is_said() -> None:
    with refuses(RecipeError, "algorithm.temperature: above 0"):
        PmcmFL(temperature=0.0)
    with refuses(RecipeError, "algorithm.private: model_spec"):
        PmcmFL(private=("a",))
    parts = assemble(made(contrast=0.0))
    assert set(parts.algorithm.idle_options(parts.fed)) >= {"temperature", "model.absent"}
    whole = recipe(algorithm("pmcmfl", stand_in="similarity"), egress=PROTOTYPES)
    assert [text for text in idle_options(whole, assemble(whole)) if "stand_in" in text and "every modality" in text]
    holed = made(stand_in="similarity")
    assert not [text for text in idle_options(holed, assemble(holed)) if "stand_in" in text]
    parts = assemble(made(variant="mfcpl"))
    assert set(parts.algorithm.idle_options(parts.fed)) >= {"stand_in"}
    assert not any(map(is_prototype, parts.initial))


def test_engines_agree_with_norms_and_dropped_modalities() -> None:
    dropping = replace(TRAIN, modality_dropout=0.3)
    states = []
    for engine in ENGINES:
        found = made(engine, AWKWARD, stand_in="similarity", contrast=0.1)
        states.append(played(replace(found, algorithm=replace(found.algorithm, train=dropping)))[1])
    assert furthest(states[0].params, states[1].params) < 1e-4
