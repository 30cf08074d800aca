"""pFedMMA: against a bare loop with missing rows, what crosses, its frozen base, its refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from algorithms.test_mfedmc import federation, holed
from oracles import pfedmma as oracle
from polyfed.algorithms.averaging.private_blocks import PRIVATE
from polyfed.core.errors import RecipeError
from polyfed.core.tree import under
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, played, recipe, same

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)


def made(engine: str = "sequential", init: str = "", **options: Any) -> Any:
    """Six clients, of whom some lack a modality, and rows that lack one; adapters that are not zero at first."""
    base = holed(engine)
    model = replace(base.model, embedding=8, init=init)
    return replace(base, model=model, algorithm=algorithm("pfedmma", train=TRAIN, **options))


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Values of a whole model, as a warm start."""
    w, draw = assemble(made()).initial, torch.Generator().manual_seed(5)
    save_file({n: 0.4 * torch.randn(v.shape, generator=draw) for n, v in w.items()}, tmp_path / "base.safetensors")
    return str(tmp_path / "base.safetensors")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["averaged", "frozen"])
def test_three_rounds_equal_a_bare_loop_with_missing_rows(engine: str, kind: str, base: str) -> None:
    parts, state, ledger = played(made(engine, base, base=kind))
    assert parts.population.columns.present, "some rows lack a modality"
    clients = federation(parts, ledger, {0: 2}, "Update")
    common, own = oracle.pfedmma(clients, assemble(parts.recipe).initial, kind == "frozen")
    torch.testing.assert_close(dict(state.params), common, rtol=1e-5, atol=1e-6)
    for client, local in parts.engine.locals.items():
        torch.testing.assert_close(dict(under(PRIVATE, local)), own[client], rtol=1e-5, atol=1e-6)
    first = assemble(parts.recipe).initial
    moved = {n for n, v in under(PRIVATE, parts.engine.locals[clients.cohorts[0][0]]).items() if not v.equal(first[n])}
    assert moved
    assert all(oracle.projection(n) for n in moved), "a frozen base stands still"


def test_of_a_frozen_base_only_the_shared_projection_crosses(base: str) -> None:
    _, state, ledger = played(made(init=base, base="frozen"))
    assert set(state.params) == {"shared.between.weight", "shared.between.bias"}
    rows = [row for row in ledger if row["kind"] == "parameters"]
    assert {row["block"] for row in rows} == {"shared"}
    assert {row["bytes"] for row in rows} == {4 * (2 * 2 + 2)}


def test_an_adapter_changes_nothing_at_first() -> None:
    ours = assemble(made())
    plain = assemble(replace(ours.recipe, algorithm=algorithm("fedavg", train=TRAIN)))
    batch = ours.fed.context.model.zero_batch(3, ("a", "b"))
    batch = replace(batch, x={m: x + 1.5 for m, x in batch.x.items()})
    w = {n.replace(".top.", "."): v for n, v in ours.initial.items() if n.replace(".top.", ".") in plain.initial}
    torch.testing.assert_close(
        ours.fed.context.model.logits(ours.initial, batch), plain.fed.context.model.logits(w, batch)
    )


def test_what_it_cannot_train_is_refused(base: str) -> None:
    with refuses(RecipeError, "algorithm.base: init"):
        assemble(made(base="frozen"))
    with refuses(RecipeError, "model.fusion: adapters"):
        assemble(replace(made(), model=replace(made().model, fusion="sum")))
    with refuses(RecipeError, "algorithm.private_epochs: base"):
        algorithm("pfedmma", base="frozen", private_epochs=1)
    with refuses(RecipeError, "algorithm.private: parameters that train"):
        assemble(recipe(algorithm("fedavg", private=("projections",))))


def test_other_methods_keep_projections_too() -> None:
    fedprox = algorithm("fedprox", mu=0.0, private=("projections",), train=TRAIN)
    spec = replace(made().model, fusion="adapted")
    assert same(played(replace(made(), model=spec, algorithm=fedprox))[1].params, played(made())[1].params)
