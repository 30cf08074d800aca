"""FedMAC and PEPSY: against bare loops with missing rows, by hand, what crosses, the placebo, attacks, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from laws.rows import PROFILES
from oracles import completion as oracle
from polyfed.algorithms.modalities.pepsy import CONTROLS, Pepsy, _centres, clustered
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError
from polyfed.experiment.checks.check import check, refuse_forbidden
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.model import ModelSpec
from polyfed.objective import Retrieval
from polyfed.training.client_data import ORDER
from polyfed.training.losses import between_modalities
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, PLAIN, algorithm, furthest, played, recipe

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=1)
JOIN = 0.9999
"""A similarity at which some controls of these clients are shared, and others are not."""


def made(name: str, engine: str = "sequential", **options: Any) -> Recipe:
    """Six clients, of whom some lack a modality, and rows that lack one; three controls, of which one is chosen."""
    model = ModelSpec(embedding=6, encoders=PLAIN, **({"controls": 3, "controls_chosen": 2} if name == "pepsy" else {}))
    found = recipe(algorithm(name, **({"train": TRAIN} | options)), engine, model=model, egress=PROFILES)
    clients = replace(found.clients, missing_rows={"a": 0.2, "b": 0.4})
    return replace(found, clients=clients, data=replace(found.data, rows=110))


def plain(parts: Assembly, ledger: list[dict[str, Any]]) -> tuple[list[oracle.Client], list[list[int]]]:
    columns, clients = parts.population.columns, []
    rounds = range(1, parts.recipe.rounds + 1)
    for client in range(len(parts.population.train)):
        rows, owned = parts.population.train[client], parts.fed.clients.owned(client)
        steps = []
        for round in rounds:
            key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), 0)
            steps.append([*keys.permutation(keys.fold_in(key, 0), len(rows)).split(TRAIN.batch_size)])
        x = {m: columns.modalities[m].values[rows].float() for m in owned}
        has = {m: there[rows] for m, there in columns.present.items() if m in owned}
        clients.append(oracle.Client(x, has, columns.label[rows], steps))
    sent = {(row["round"], row["client"]) for row in ledger if row["destination"] == "server"}
    return clients, [sorted(k for r, k in sent if r == round) for round in rounds]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_three_rounds_of_fedmac_equal_a_bare_loop_with_missing_rows(engine: str, lam: float) -> None:
    parts, state, ledger = played(made("fedmac", engine, lam=lam, temperature=0.4))
    assert parts.population.columns.present, "some rows lack a modality"
    initial = dict(assemble(parts.recipe).initial)
    found = oracle.fedmac(*plain(parts, ledger), initial, [*parts.model.modalities], TRAIN.lr, lam, 0.4)
    torch.testing.assert_close(state.params, found, rtol=1e-5, atol=1e-6)
    assert float((state.params["shared.missing"] - initial["shared.missing"]).abs().max()) > 1e-3, "stand-ins train"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("join", [-1.0, JOIN])
def test_three_rounds_of_pepsy_equal_a_bare_loop_with_missing_rows(engine: str, join: float) -> None:
    parts, state, ledger = played(made("pepsy", engine, lam=0.5, eta=0.7, temperature=0.4, join=join))
    initial = dict(assemble(parts.recipe).initial)
    w, common, profiles, clusters = oracle.pepsy(
        *plain(parts, ledger), initial, [*parts.model.modalities], TRAIN.lr, 0.5, 0.4, 0.7, join, 2
    )
    torch.testing.assert_close(state.params, w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.common, common, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.profiles, profiles, rtol=1e-5, atol=1e-6)
    assert state.clusters == clusters[-1]
    assert (clusters[-1] == 3) is (join == -1.0), "some controls are shared and others are not"
    assert clusters[-1] < 3 * len(plain(parts, ledger)[1][-1])


def test_clusters_by_hand() -> None:
    east, north, west = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 0.0])
    sent = {4: torch.stack([2 * north, east]), 1: torch.stack([east, north]), 7: torch.stack([west, 3 * west])}
    rows = {1: 10.0, 4: 30.0, 7: 10.0}
    assert clustered(sent, rows, 0.9) == {1: [0, 1], 4: [1, 0], 7: [2, 3]}, "two of a client's are never one"
    assert clustered(sent, rows, -1.0)[7] in ([0, 1], [1, 0]), "everything is aligned"
    equal = {1: sent[1], 2: sent[1].clone(), 3: sent[1] + 0.1}
    assert clustered(equal, dict.fromkeys(equal, 1.0), 1.0)[2] == [0, 1], "equal controls are shared at any similarity"
    assert clustered(equal, dict.fromkeys(equal, 1.0), 1.0)[3] == [2, 3]


def test_the_contrast_between_modalities_leaves_out_padding_and_rows_without_one() -> None:
    z = {m: torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i, m in enumerate("ab")}
    rows = torch.tensor([True, True, False, True, True, False])
    there = {"a": rows, "b": torch.tensor([True, True, True, False, True, False])}
    both = [0, 1, 4]
    expected = oracle.pairs({m: {r: z[m][r] for r in both} for m in z}, 0.3)
    torch.testing.assert_close(between_modalities(z, there, 0.3), expected)
    assert float(between_modalities({"a": z["a"]}, there, 0.3)) == 0.0


def test_a_row_chooses_the_controls_that_point_its_way_and_padding_changes_nothing() -> None:
    parts = assemble(made("pepsy"))
    model, w = parts.model, dict(parts.initial)
    batch = Batch(
        x={"a": torch.randn(5, 16), "b": torch.randn(5, 24)},
        y=torch.zeros(5, dtype=torch.int64),
        rows=torch.arange(5),
        present={"b": torch.tensor([True, False, True, False, True])},
    )
    views = model.views(w, model.features(w, batch), batch)
    assert views["reconfigured"].shape == (5, 2, 6)
    torch.testing.assert_close(views["logits"], model.logits(w, batch))
    near = w | {CONTROLS: torch.cat([w[CONTROLS][:2], w[CONTROLS][:1]])}  # the third equals the first
    logits = model.logits(near, batch)
    swapped = near | {CONTROLS: near[CONTROLS][[2, 1, 0]]}
    torch.testing.assert_close(model.logits(swapped, batch), logits)  # equal controls count alike
    lone = model.views(w, {"a": model.features(w, batch)["a"]}, batch)
    assert not bool(lone["there"][:, 1].any())


def test_controls_cross_in_a_field_of_their_own_that_the_policy_rules() -> None:
    parts, state, ledger = played(made("pepsy"))
    up = [row for row in ledger if row["destination"] == "server"]
    controls = [row for row in up if row["field"] == "controls"]
    assert {(row["kind"], row["block"], row["bytes"]) for row in controls} == {("prototypes", "shared", 3 * 6 * 4)}
    assert CONTROLS not in state.params
    assert CONTROLS in parts.algorithm.global_params(state)
    checked = check(made("pepsy"))
    assert "which modalities the client's rows lack" in str(checked)
    for row in ({"server": ["parameters", "statistic"]}, {"server": ["prototypes", "statistic"]}):
        with pytest.raises(EgressError):
            refuse_forbidden(assemble(replace(made("pepsy"), egress={"shared": row})))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_placebo_sends_each_client_the_profile_of_another(engine: str) -> None:
    parts, state, _ = played(made("pepsy", engine, join=1.0))
    method = replace(parts.algorithm, placebo="shuffled")
    assert isinstance(method, Pepsy)
    known = sorted(state.profiles)
    for which, other in ((parts.algorithm, False), (method, True)):
        send: Any = which.evaluation_message(state, parts.fed, known)
        own = [torch.equal(send[k].controls, state.profiles[k]) for k in known]
        assert not any(own) if other else all(own)
        somebodys = [any(torch.equal(send[k].controls, p) for p in state.profiles.values()) for k in known]
        assert all(somebodys)


def test_a_liar_moves_no_profile_out_of_the_honest_range_under_a_robust_rule() -> None:
    honest = torch.eye(3)
    sent = {k: honest + 0.01 * k for k in range(4)} | {4: 1e6 * honest}
    parts = assemble(made("pepsy", server=ServerOptimiser(aggregate="median"), join=-1.0))
    rows = dict.fromkeys(sent, 1.0)
    centres, _ = _centres(sent, clustered(sent, rows, parts.algorithm.join), rows, robust=True)
    assert float(centres.abs().max()) <= 1.04
    loud, _ = _centres(sent, clustered(sent, rows, -1.0), rows, robust=False)
    assert float(loud.abs().max()) > 1e4, "the weighted mean does not bound it"


@pytest.mark.parametrize("name", ["fedmac", "pepsy"])
def test_other_fusions_and_pairs_of_modalities_are_refused(name: str) -> None:
    spec = ModelSpec(embedding=6, encoders=PLAIN, fusion="gated")
    with pytest.raises(RecipeError) as refused:
        check(recipe(algorithm(name), model=spec, egress=PROFILES))
    assert refused.value.key == ("model", "fusion")
    with refuses(RecipeError, "model.controls_chosen: only 8 controls"):
        ModelSpec(embedding=6, encoders=PLAIN, fusion="controlled", controls_chosen=9)
    with pytest.raises(RecipeError) as refused:
        check(recipe(algorithm(name), task=Retrieval(), egress=PROFILES))
    assert refused.value.key == ("task", "name")


@pytest.mark.parametrize("name", ["fedmac", "pepsy"])
def test_a_client_without_a_modality_trains_its_stand_in(name: str) -> None:
    """A client that has only `a` changes what the shared block says about `b`, and sends no block `b`."""
    parts, _, ledger = played(replace(made(name), rounds=1))
    lacking = [k for k in parts.fed.clients if parts.fed.clients.owned(k) == ("a",)]
    assert lacking
    assert not [r for r in ledger if r["destination"] == "server" and r["client"] in lacking and r["block"] == "b"]


def test_the_engines_agree_on_a_deep_head_with_batchnorm_and_missing_rows() -> None:
    for name in ("fedmac", "pepsy"):
        ends = []
        for engine in ENGINES:
            found = made(name, engine)
            ends.append(played(replace(found, model=replace(found.model, encoders=AWKWARD, head=(5,))))[1].params)
        assert furthest(*ends) < 1e-4
