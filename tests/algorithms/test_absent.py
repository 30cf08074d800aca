"""`[model] absent = "input"`: against a bare loop, what crosses, private blocks beside it, refusals and notes."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.algorithms.averaging.private_blocks import PRIVATE
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, RecipeError
from polyfed.core.tree import Tree, block_of, under
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check_before_run
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.warm_start import warmed
from polyfed.model import Fusion, ModelSpec
from polyfed.model.stand_ins import zero_input_name
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses, warned
from world import AWKWARD, PLAIN, algorithm, furthest, played, recipe

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=1)


def made(engine: str = "sequential", fusion: str = "concat", encoders: Any = PLAIN, **options: Any) -> Recipe:
    """Six clients, of whom some lack a modality, and rows that lack one."""
    model = ModelSpec(embedding=6, head=(7,), fusion=fusion, encoders=encoders, absent="input")
    found = recipe(algorithm("fedavg", **({"train": TRAIN} | options)), engine, model=model)
    return replace(found, clients=replace(found.clients, missing_rows={"a": 0.2, "b": 0.4}))


class Bare(nn.Module):
    """The model without any code of polyfed, on a Tree of the whole model; all encoders read every row."""

    def __init__(self, tree: Tree, fusion: str, own: tuple[str, ...]) -> None:
        super().__init__()
        self.fusion, self.names = fusion, list(tree)
        trained = {n: v.clone().requires_grad_(block_of(n) in (*own, "shared")) for n, v in tree.items()}
        self.w = nn.ParameterList([nn.Parameter(v.detach(), requires_grad=v.requires_grad) for v in trained.values()])

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        w = dict(zip(self.names, self.w, strict=True))

        def layer(z: Tensor, path: str) -> Tensor:
            return z @ w[f"{path}.weight"].T + w.get(f"{path}.bias", torch.zeros(()))

        z = {m: layer(torch.relu(layer(x[m], f"{m}.encoder.0")), f"{m}.encoder.2") for m in x}
        if self.fusion == "sum":
            joint = z["a"] + z["b"]
            return layer(torch.relu(layer(joint, "shared.head.0")), "shared.head.2")
        parts = {m: layer(z[m], f"{m}.fusion") for m in z}
        if self.fusion == "gated":
            joint = torch.sigmoid(parts["a"]) * parts["b"]
            return layer(torch.relu(layer(joint, "shared.head.0")), "shared.head.2")
        return layer(torch.relu(parts["a"] + parts["b"] + w["shared.bias"]), "shared.head.1")


def bare_rounds(parts: Assembly, ledger: list[dict[str, Any]], fusion: str) -> Tree:
    """Return the model after the rounds: a client sends the blocks of its modalities, which it trains."""
    columns = parts.population.columns
    w = {n: v.clone() for n, v in parts.initial.items() if "zero_input" not in n}
    for round in range(1, parts.recipe.rounds + 1):
        cohort = {r["client"] for r in ledger if r["round"] == round and r["destination"] == "server"}
        replies: list[tuple[int, Tree]] = []
        for client in sorted(cohort):
            rows, own = parts.population.train[client], parts.fed.clients.owned(client)
            model = Bare(w, fusion, own)
            x = {m: torch.zeros(len(rows), *parts.model.shapes[m]) for m in ("a", "b")}
            for m in own:
                x[m] = columns.modalities[m].values[rows].float()
                if m in columns.present:
                    x[m] = x[m] * columns.present[m][rows].view(-1, 1)
            key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), 0)
            optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=TRAIN.lr)
            for step in keys.permutation(keys.fold_in(key, 0), len(rows)).split(TRAIN.batch_size):
                optimiser.zero_grad()
                out = model({m: value[step] for m, value in x.items()})
                nn.functional.cross_entropy(out, columns.label[rows][step]).backward()
                optimiser.step()
            sent = {n: v.detach() for n, v in zip(model.names, model.w, strict=True) if v.requires_grad}
            replies.append((len(rows), sent))
        for name in w:
            found = [(n, sent[name]) for n, sent in replies if name in sent]
            if found:
                w[name] = sum(n * v for n, v in found) / sum(n for n, _ in found)  # type: ignore[assignment]
    return w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fusion", ["concat", "sum", "gated"])
def test_three_rounds_equal_a_bare_loop_in_which_every_client_has_all_encoders(engine: str, fusion: str) -> None:
    parts, state, ledger = played(made(engine, fusion))
    expected = bare_rounds(parts, ledger, fusion)
    assert any(parts.fed.clients.owned(k) != ("a", "b") for k in range(6))
    assert furthest({n: state.params[n] for n in expected}, expected) < 1e-4


def test_the_server_fills_the_buffers_and_a_client_without_the_block_computes_the_same_as_one_with_it() -> None:
    parts, state, ledger = played(made(encoders=AWKWARD))
    model, w = parts.model, state.params
    x = torch.randn(5, *model.shapes["b"])
    batch = Batch(x={"b": x}, y=torch.zeros(5, dtype=torch.int64), rows=torch.arange(5))
    whole = model.logits(w, batch)
    without = {n: v for n, v in w.items() if block_of(n) != "a"}
    assert torch.allclose(whole, model.logits(without, batch), atol=1e-6)
    zeros = Batch(x={"a": torch.zeros(5, *model.shapes["a"]), "b": x}, y=batch.y, rows=batch.rows)
    assert torch.allclose(whole, model.logits(w, zeros), atol=1e-6)
    rest = replace(zeros, x={"a": torch.full((5, *model.shapes["a"]), 9.0), "b": x}, present={"a": zeros.y > 0})
    assert torch.allclose(whole, model.logits(w, rest), atol=1e-6)
    other = {**without, zero_input_name("a"): torch.ones_like(w[zero_input_name("a")])}
    assert not torch.allclose(whole, model.logits(other, batch), atol=1e-3)
    held = {k: set(parts.fed.clients.owned(k)) for k in range(6)}
    assert all(r["block"] in held[r["client"]] | {"shared"} for r in ledger if r["kind"] == "parameters")


@pytest.mark.parametrize(("word", "kept"), [("classifier", "shared.head.2."), ("fusion", "shared.head.0.")])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_head_has_two_parts_and_the_buffers_are_never_private(word: str, kept: str, engine: str) -> None:
    parts, state, _ = played(made(engine, "sum", private=(word,)))
    private = parts.algorithm.private_names(parts.model)
    assert private == {n for n in parts.initial if n.startswith(kept)}
    trained = [under(PRIVATE, tree) for tree in parts.engine.locals.values()]
    assert all(tree.keys() == private for tree in trained)
    buffers = [zero_input_name(m) for m in ("a", "b")]
    assert all(bool(state.params[name].any()) for name in buffers)
    whole = parts.model.with_zero_inputs(state.params)
    assert all(torch.equal(whole[name], state.params[name]) for name in buffers)
    both = assemble(made(engine, "sum", private=("fusion", "classifier")))
    head = assemble(made(engine, "sum", private=("head",)))
    assert both.algorithm.private_names(both.model) == head.algorithm.private_names(head.model)


def test_private_encoders_leave_the_buffers_at_the_initial_encoders() -> None:
    parts, state, _ = played(made(fusion="sum", private=("encoders",)))
    first = parts.model.with_zero_inputs(parts.initial)
    name = zero_input_name("a")
    assert torch.equal(state.params[name], first[name])
    assert bool(first[name].any())


def test_a_head_of_one_layer_has_no_fusion_and_a_linear_fusion_is_its_classifier() -> None:
    one = recipe(algorithm("fedavg", private=("fusion",)), model=ModelSpec(embedding=6, fusion="sum", encoders=PLAIN))
    with refuses(RecipeError, "algorithm.private: head"):
        assemble(one)
    parts = assemble(recipe(algorithm("fedavg", private=("classifier",))))
    assert set(parts.algorithm.private_names(parts.model)) == set(parts.model.head())


@pytest.mark.parametrize("fusion", ["cross-modal", "controlled", "adapted"])
def test_fusions_that_need_more_than_a_result_refuse_it(fusion: str) -> None:
    with refuses(ModelError, "model.absent: completes"):
        ModelSpec(fusion=fusion, absent="input")


class WithParts(Fusion):
    """A fusion of one's own with a part for each modality."""

    @staticmethod
    def part(embedding: int, width: int) -> nn.Module:
        return nn.Linear(embedding, width)

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        return sum(parts[m].weight.sum() * value for m, value in z.items())  # type: ignore[no-any-return]


def test_an_own_fusion_with_parts_refuses_it() -> None:
    own = made()
    with refuses(ModelError, "model.absent: part"):
        assemble(replace(own, model=replace(own.model, fusion="test_absent:WithParts", head=())))


def test_it_is_noted_where_nothing_is_absent_and_not_where_subsets_are_scored() -> None:
    own = made()
    whole = replace(own, clients=replace(own.clients, holdings=[["a", "b"]], missing_rows=0.0))
    with warned("no effect"):
        check_before_run(assemble(whole))
    scored = replace(whole.algorithm, evaluation=Evaluation(every=0, subsets="all"))
    assert not [t for t in _told(replace(whole, algorithm=scored)) if "absent" in t]
    assert not [t for t in _told(own) if "absent" in t]


def _told(own: Recipe) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_before_run(assemble(own))
    return [str(one.message) for one in caught]


def test_a_warm_start_may_come_from_a_model_with_zeros_and_the_other_way_round() -> None:
    own = assemble(made())
    other = assemble(replace(made(), model=replace(made().model, absent="zero")))
    assert warmed(own.initial, own.model, other.initial, own.recipe).keys() == own.initial.keys()
    assert warmed(other.initial, other.model, own.initial, other.recipe).keys() == other.initial.keys()
