"""Fusions and whole modules of one's own: laws, engines, what crosses, and every mistake as a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from ended_runs import samples
from own_models import BLOCKS, OWN_BLOCKS, Encoding, Product, Whole
from polyfed.algorithms import ALGORITHMS
from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, NotAllowed, RecipeError
from polyfed.core.registry import Allowance, only
from polyfed.core.tree import block_of
from polyfed.deploy.device.configuration import used_on
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.model import ModelSpec, build_model
from refusals import refuses
from world import PLAIN, algorithm, furthest, played, recipe

WHOLE = ModelSpec(module="own_models:Whole", blocks=BLOCKS, module_options={"width": 7})
SPECS = {
    "fusion": ModelSpec(
        fusion="own_models:Product", fusion_options={"scale": 0.5}, embedding=6, dropout=0.1, encoders=PLAIN
    ),
    "module": WHOLE,
    "encoding": ModelSpec(module="own_models:Encoding", blocks=OWN_BLOCKS),
}
SHAPES = {"a": (16,), "b": (24,)}
METHODS = ["fedavg", "scaffold", "fedmsplit", "fedfomo", "pfmml", "local"]


def made(case: str, name: str = "fedavg", engine: str = "sequential", **options: Any) -> Recipe:
    from laws.rows import ROWS

    row = ROWS[name]
    found = recipe(algorithm(name, **row.options, **options), engine, model=SPECS[case], egress=row.egress)
    return replace(found, clients=replace(found.clients, personal_test=0.3))


@pytest.mark.parametrize(
    ("name", "case"), [("fedavg", "fusion"), ("fedavg", "encoding"), *((name, "module") for name in METHODS)]
)
def test_engines_agree(name: str, case: str) -> None:
    one, state_one, ledger_one = played(made(case, name))
    many, state_many, ledger_many = played(made(case, name, "vectorised"))
    assert furthest(state_one.params, state_many.params) < 1e-4
    assert all(furthest(tree, many.engine.locals[c]) < 1e-3 for c, tree in one.engine.locals.items())
    assert ledger_one == ledger_many
    assert furthest(state_one.params, one.initial) > 1e-3 or one.engine.locals


@pytest.mark.parametrize("name", ["moon", "fedogm", "fedproto", "cmsfed", "creamfl"])
def test_a_module_with_embeddings_trains_with_methods_that_need_them(name: str) -> None:
    found = made("encoding", name)
    if name == "creamfl":
        found = replace(found, clients=replace(found.clients, validation=0.15))
    state = played(replace(found, rounds=2))[1]
    assert all(bool(v.isfinite().all()) for v in state.params.values())


@pytest.mark.parametrize("name", sorted(n for n, c in ALGORITHMS.items() if c.needs_embeddings))
def test_methods_that_need_embeddings_say_so(name: str) -> None:
    from laws.test_laws import world

    # partialfl reads one modality, and pmcmfl fills in embeddings
    said = {"partialfl": "model.module: own_models:Whole", "pmcmfl": "model.module: replaces embeddings"}
    with refuses(RecipeError, said.get(name, "embedding of each")):
        check(replace(world(name), model=WHOLE))


@pytest.mark.parametrize("case", SPECS)
def test_a_resumed_run_is_exact_and_a_run_repeats(case: str, tmp_path: Path) -> None:
    whole = made(case)
    _, state, _ = played(whole)
    half, before, _ = played(replace(whole, rounds=2))
    modules = checkpoint.modules_of(whole.algorithm)
    checkpoint.save(tmp_path, 2, {"state": before, "locals": half.engine.locals}, modules)
    found = checkpoint.load(tmp_path, modules)
    assert found is not None
    again = assemble(whole)
    again.resume(found[1]["state"], {}, 2)
    again.fed.begin(3)
    assert checkpoint.digest(whole.algorithm.round(found[1]["state"], again.fed)) == checkpoint.digest(state)


def test_blocks_follow_the_prefixes_and_clients_send_only_their_own() -> None:
    parts, state, ledger = played(made("module"))
    by_block = {b: {n for n in state.params if block_of(n) == b} for b in ("a", "b", "shared")}
    assert by_block["a"] == {"a.net_a.0.weight", "a.net_a.0.bias"}
    assert {n.split(".")[1] for n in by_block["b"]} == {"net_b", "bias_b"}
    assert {n.split(".")[1] for n in by_block["shared"]} == {"norm", "top"}
    assert {n.split(".")[1] for n in parts.model.frozen} == {"frozen"}
    for row in ledger:
        if row["block"] in "ab":
            assert row["block"] in parts.fed.clients.owned(row["client"])
    assert not parts.model.has_embeddings
    assert parts.model.flops("shared") > 0


def test_the_logits_are_those_of_the_plain_module() -> None:
    torch.manual_seed(3)
    plain = Whole(SHAPES, 4).eval()
    model = build_model(ModelSpec(module=plain, blocks=BLOCKS), SHAPES, 4)
    w = model.init(9)
    x = {m: torch.randn(5, *s) for m, s in SHAPES.items()}
    everyone = {m: torch.ones(5, dtype=torch.bool) for m in x}
    batch = Batch(x, torch.zeros(5, dtype=torch.int64), torch.arange(5))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(w, batch), plain(x, everyone))
        there = torch.tensor([True, False, True, False, True])
        torch.testing.assert_close(
            model.logits(w, replace(batch, present={"b": there})),
            plain({"a": x["a"], "b": x["b"] * there.unsqueeze(1)}, everyone | {"b": there}),
        )
        none = torch.zeros(5, dtype=torch.bool)
        alone = model.unimodal_logits(w, model.features(w, batch), "a", batch, "zero")
        torch.testing.assert_close(alone, plain({"a": x["a"], "b": 0 * x["b"]}, everyone | {"b": none}))


def test_gradients_of_a_client_without_a_block_are_those_of_its_own_rows() -> None:
    """The module's own parameters of a block that a client lacks get no gradient that the next client would inherit."""
    parts, _, _ = played(made("module"))
    own = [parts.model._slots.own(n) for n in parts.model._slots.names]
    assert all(p.grad is None and not p.requires_grad for p in own)


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize("private", [(), ("shared",)], ids=["global", "private-head"])
def test_a_run_predicts_exports_and_loads(case: str, private: tuple[str, ...], tmp_path: Path) -> None:
    told = replace(made(case, private=private), rounds=2)
    run, parts = polyfed.run(told, tmp_path / "run"), assemble(told)
    folder = run.export(tmp_path / "model")
    with refuses(NotAllowed, "importing"):
        polyfed.load_model(folder)
    back, later = polyfed.load_model(folder, imports=["own_models.*"]), polyfed.load_run(tmp_path / "run")
    x = samples(parts.population.columns, parts.population.test_rows)
    for client in parts.fed.clients:
        assert torch.equal(back.predict(x, client=client), run.predict(x, client=client))
        assert torch.equal(later.predict(x, client=client), run.predict(x, client=client))
    if not private:
        assert torch.equal(back.predict(x), run.predict(x))
        assert run.result["metrics"]["unimodal"].keys() == {"a", "b"}


def test_classes_and_objects_in_python() -> None:
    assert ModelSpec(module=Whole, blocks=BLOCKS).module == "own_models:Whole"
    assert ModelSpec(fusion=Product, encoders=PLAIN).fusion == "own_models:Product"
    told = replace(made("module"), model=replace(WHOLE, module=Whole, module_options={}))
    assert parse_recipe(told.table()).model == told.model
    net = Whole(SHAPES, 4)
    start = {n: p.clone() for n, p in net.named_parameters()}
    run = polyfed.run(replace(told, model=ModelSpec(module=net, blocks=BLOCKS), rounds=1))
    assert all(torch.equal(p, start[n]) for n, p in net.named_parameters()), "training works on copies"
    assert not torch.equal(run.params["shared.top.weight"], start["top.weight"])
    with refuses(RecipeError, "and model.json"):
        run.export("nowhere")


def test_a_device_imports_only_what_its_owner_allows() -> None:
    told = made("fusion")
    assert used_on(told).imports == ("own_models:Product",)
    assert used_on(made("module")).imports == ("own_models:Whole",)
    table = told.table()["model"]
    with only(Allowance()), refuses(NotAllowed, "model.fusion: been allowed"):
        ModelSpec(fusion=table["fusion"], encoders=PLAIN)
    with only(Allowance()), refuses(NotAllowed, "model.module: been allowed"):
        ModelSpec(module="own_models:Whole", blocks=BLOCKS)
    with only(Allowance(imports=("own_models.*",))):
        build_model(WHOLE, SHAPES, 4)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"fusion": "conkat", "encoders": PLAIN}, "model.fusion: mean 'concat'"),
        ({"fusion": "own_models:NoFusion", "encoders": PLAIN}, "model.fusion: extends polyfed.model.Fusion"),
        ({"fusion": "own_models:Nowhere", "encoders": PLAIN}, "model.fusion: cannot be imported"),
        ({"fusion": int, "encoders": PLAIN}, "model.fusion: extend polyfed.model.fusion.Fusion"),
        ({"fusion": "own_models:WrongWidth", "encoders": PLAIN}, "WrongWidth fails on"),
        ({"fusion": "own_models:NoJoint", "encoders": PLAIN}, "NoJoint fails on"),
        (
            {"fusion": "own_models:Product", "fusion_options": {"size": 1}, "encoders": PLAIN},
            "model.fusion: calling it",
        ),
        ({"fusion": "sum", "fusion_options": {"size": 1}, "encoders": PLAIN}, "model.fusion_options: remove them"),
        ({"module": "own_models:Whole", "encoders": PLAIN, "blocks": BLOCKS}, "model.module: remove [model.encoders]"),
        ({"module": "own_models:Whole"}, "model.blocks.b: the modality 'b'"),
        ({}, "model.encoders.a: the modality 'a'"),
        (
            {"module": "own_models:OnlyX", "blocks": BLOCKS},
            "calls forward(x, present)",
        ),
        (
            {"module": "own_models:NoOutputs", "blocks": BLOCKS},
            "model.module: __init__(self, shapes, num_outputs)",
        ),
        (
            {"module": "own_models:OnlyZ", "blocks": OWN_BLOCKS},
            "calls fuse(z, present)",
        ),
        ({"module": "own_models:Whole", "blocks": {**BLOCKS, "c": ()}}, "model.blocks.c: no such modality"),
        ({"module": "own_models:Whole", "blocks": {"a": "net_x", "b": "net_b"}}, "model.blocks.a: 'net_x'"),
        ({"module": "own_models:Whole", "blocks": {"a": "net_a", "b": ("net_b", "net_a.0")}}, "model.blocks: and to b"),
        (
            {"module": "own_models:Whole", "blocks": BLOCKS, "module_options": {"size": 1}},
            "model.module: calling it",
        ),
        ({"module": "own_models:Whole", "blocks": BLOCKS, "embedding": 32, "head": (8,)}, "model.embedding: no effect"),
        ({"module": "own_models:Leaky", "blocks": BLOCKS}, "without a depend"),
        ({"module": "own_models:Mixing", "blocks": BLOCKS}, "without a depend"),
        (
            {"module": "own_models:Tied", "blocks": BLOCKS},
            "model.blocks: the same parameter",
        ),
        ({"module": "own_models:Narrow", "blocks": BLOCKS}, "give (2, 4)"),
        ({"module": "own_models:NoFusion", "blocks": BLOCKS}, "model.module: extends torch.nn.Module"),
        ({"module": 3, "blocks": BLOCKS}, "model.module: extend torch.nn.Module"),
        ({"blocks": BLOCKS, "encoders": PLAIN}, "model.blocks: whole module"),
        (
            {"module": Encoding(SHAPES, 4), "module_options": {"a": 1}, "blocks": OWN_BLOCKS},
            "model.module_options: been made",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_the_cure(spec: dict[str, Any], words: str) -> None:
    with refuses(ModelError, words):
        build_model(ModelSpec(**spec), SHAPES, 4)


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_an_lstm_is_that_of_pytorch(layers: int, both: bool) -> None:
    from torch import nn
    from torch.func import vmap

    from polyfed.model.modules.layer_replacement import adopt
    from polyfed.model.modules.layers import Rows

    theirs = nn.LSTM(5, 7, layers, batch_first=True, bidirectional=both)
    ours = adopt(theirs, Rows(), "x")
    assert {n for n, _ in theirs.named_parameters()} == {n for n, _ in ours.named_parameters()}
    x = torch.randn(3, 6, 5)
    for mine, other in zip(_flat(ours(x)), _flat(theirs(x)), strict=True):
        torch.testing.assert_close(mine, other)
    assert vmap(lambda v: ours(v)[0])(x.unsqueeze(1)).shape == (3, 1, 6, 14 if both else 7)
    for wrong in (
        nn.LSTM(3, 3),
        nn.LSTM(3, 3, 2, batch_first=True, dropout=0.1),
        nn.LSTM(3, 3, batch_first=True, proj_size=2),
    ):
        with refuses(ModelError, "not supported"):
            adopt(wrong, Rows(), "x")


def _flat(out: Any) -> list[torch.Tensor]:
    return [out[0], *out[1]]


def test_a_whole_module_in_a_file() -> None:
    told = made("module")
    assert parse_recipe(told.table()).model == told.model


def test_the_check_gives_valid_ids_and_the_same_samples_every_time() -> None:
    state = torch.get_rng_state()
    for _ in range(2):
        build_model(ModelSpec(module="own_models:Ids", blocks={"a": ("net_a",), "b": ("net_b",)}), SHAPES, 4)
    assert torch.equal(state, torch.get_rng_state())


def test_a_weight_that_two_modalities_share_belongs_to_the_shared_block() -> None:
    blocks = {"a": ("net_a.bias",), "b": ("net_b.bias",)}
    model = build_model(ModelSpec(module="own_models:Tied", blocks=blocks), {"a": (16,), "b": (16,)}, 4)
    assert "shared.net_a.weight" in model.template


def test_values_of_one_client_do_not_reach_a_client_that_lacks_their_block() -> None:
    model = build_model(WHOLE, SHAPES, 4)
    whole = model.init(1)
    lacking = {name: value for name, value in model.init(2).items() if block_of(name) != "a"}
    broken = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    batch = Batch({"b": torch.ones(3, 24)}, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    expected = model.logits(lacking, batch)
    with model.live(broken) as lent:
        assert torch.equal(model.logits(lacking, batch), expected), "while another Tree trains"
        with torch.no_grad():
            for value in lent.values():
                value.add_(1.0)
    assert torch.equal(model.logits(lacking, batch), expected)
    with model.live(lacking) as lent:
        assert torch.equal(model.logits(lent, batch), expected)
