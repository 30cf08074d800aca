"""Attacks on messages: known answers, and `polyfed audit` on whole runs."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import polyfed
from polyfed.cli import main
from polyfed.cli.leakage import _tables
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.messages import map_tensors
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.data.sources import Npz
from polyfed.experiment.leakage import Finding, audit, write
from polyfed.experiment.leakage import labels as label_attacks
from polyfed.experiment.leakage.audit import LeakageAudit
from polyfed.experiment.leakage.capture import Capture, capture
from polyfed.experiment.leakage.findings import Tally, Target, interval, measured
from polyfed.experiment.leakage.labels import assigned, clusters, output_scores, presence
from polyfed.experiment.leakage.membership import (
    Candidates,
    candidates_of,
    likelihood_ratio,
    loss_threshold,
    losses_of,
    public_rows,
)
from polyfed.experiment.leakage.reconstruction import first_layer_rows, inverted, match_gradient, nearest
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.attack import Attack
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Uniform
from polyfed.training import SingleClientData
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, recipe

SIGMA = math.sqrt(2 * math.log(1.25 / 1e-5))
"""Noise of the Gaussian mechanism for epsilon = 1, delta = 1e-5 and sensitivity 1 (Dwork and Roth, Theorem A.1)."""


@pytest.fixture(scope="module")
def parts() -> Assembly:
    return assemble(recipe(algorithm("fedavg", selector=Uniform()), clients=ClientsSpec(num=6)))


def gradient_of(parts: Assembly, row: int) -> tuple[Tree, Batch]:
    """The gradient of the loss of one row, at the initial model."""
    columns = parts.population.columns
    rows = torch.tensor([row])
    batch = Batch({m: c.take(rows) for m, c in columns.modalities.items()}, columns.label[rows], torch.zeros(1).long())
    w = {name: value.clone().requires_grad_() for name, value in parts.initial.items()}
    values = torch.autograd.grad(parts.fed.context.loss(w, batch), list(w.values()))
    return dict(zip(w, values, strict=True)), batch


def noisy(gradient: Tree, seed: int) -> Tree:
    """The gradient, clipped to norm 1, with noise for epsilon = 1."""
    norm = torch.cat([value.flatten() for value in gradient.values()]).norm()
    draw = torch.Generator().manual_seed(seed)
    return {n: v / norm + SIGMA * torch.randn(v.shape, generator=draw) for n, v in gradient.items()}


def one(name: str, tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key.startswith(f"{name}.")}


# known answers


def test_the_gradient_of_one_row_holds_the_row_and_noise_hides_it(parts: Assembly) -> None:
    public = torch.cat([parts.population.columns.modalities["a"].take(parts.population.test_rows)])
    raw, hidden = {}, {}
    for row in range(8):
        gradient, batch = gradient_of(parts, row)
        rebuilt = first_layer_rows(one("a", gradient), batch.x["a"].shape[1])
        torch.testing.assert_close(rebuilt.float(), batch.x["a"].expand_as(rebuilt), atol=1e-3, rtol=1e-3)
        raw[row] = nearest(rebuilt, batch.x["a"], public)
        hidden[row] = nearest(first_layer_rows(one("a", noisy(gradient, row)), public.shape[1]), batch.x["a"], public)
    target = Target("samples rebuilt", "gradients", "a")
    assert measured(target, "", raw).value == pytest.approx(1.0, abs=1e-3)
    assert measured(target, "", raw).significant
    assert not measured(target, "", hidden).significant


@pytest.mark.parametrize("layer", ["bias", "weight"])
def test_the_gradient_of_one_row_holds_its_label_and_noise_hides_it(parts: Assembly, layer: str) -> None:
    raw, hidden = {}, {}
    label = parts.population.columns.label
    for row in range(40):
        gradient, _ = gradient_of(parts, row)
        part = {n: v for n, v in gradient.items() if n.endswith(layer) and len(v) == 4}
        assert part
        for found, given in ((raw, gradient), (hidden, noisy(gradient, row))):
            score = output_scores({name: given[name] for name in part}, 4)
            assert score is not None
            found[row] = Tally.of(float(score.argmax() == label[row]), float(torch.bincount(label[:40]).max()) / 40)
    target = Target("label", "gradients", "shared")
    assert measured(target, "", raw).value == 1.0
    low, high = interval(list(hidden.values()))
    assert low <= 0 <= high or high < 0


def test_matching_a_gradient_rebuilds_one_row_in_both_modalities(parts: Assembly) -> None:
    gradient, batch = gradient_of(parts, 3)
    start = {m: keys.normal(keys.key(1, m), tuple(x.shape)) for m, x in batch.x.items()}
    found = match_gradient(parts.fed.context.loss, parts.initial, gradient, start, batch.y)
    wrong = match_gradient(parts.fed.context.loss, parts.initial, noisy(gradient, 0), start, batch.y)
    for m, x in batch.x.items():
        assert torch.nn.functional.cosine_similarity(found[m], x).item() > 0.95
        assert torch.nn.functional.cosine_similarity(wrong[m], x).item() < 0.9


def rows_of(seed: int, n: int = 60, size: int = 6) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def test_embeddings_are_inverted_if_they_are_the_samples_or_linear_and_not_if_they_are_random() -> None:
    x = {client: rows_of(client) for client in range(6)}
    mixing = rows_of(99, 6, 6)
    views: dict[str, Callable[[int], Tensor]] = {
        "identity": lambda client: x[client],
        "linear": lambda client: x[client] @ mixing,
        "random": lambda client: rows_of(100 + client),
    }
    found = {}
    for name, view in views.items():
        tallies = {client: inverted(view(client), x[client], 1) for client in x}
        found[name] = measured(Target("r", "embeddings", "a"), "", {c: t for c, t in tallies.items() if t is not None})
    assert found["identity"].value == pytest.approx(1.0)
    assert found["linear"].value is not None
    assert found["linear"].value > 0.99
    low, high = found["random"].low, found["random"].high
    assert low is not None
    assert high is not None
    assert low <= 0.0 < high + 0.05
    assert inverted(rows_of(1, 7), rows_of(2, 7), 1) is None, "half of seven rows teach nothing"


def test_clusters_find_labels_that_embeddings_hold_and_none_in_random_embeddings() -> None:
    label = torch.arange(80) % 4
    held = torch.nn.functional.one_hot(label, 4) + 0.1 * rows_of(0, 80, 4)
    assert assigned(clusters(held, 4, 1), label, 4, 1).value.mean() == 1.0
    tallies = [assigned(clusters(rows_of(seed, 80, 4), 4, 1), label, 4, seed) for seed in range(100, 115)]
    low, high = interval(tallies)
    assert low <= 0.0 <= high
    assert np.concatenate([tally.value for tally in tallies]).mean() > 0.25, "best assignment beats a coin by itself"


def trained(parts: Assembly, epochs: int) -> tuple[Tensor, Tensor]:
    """Losses of the candidates of client 0 after local training on its rows, and which are members."""
    found = Capture(parts, 6)
    others, name = public_rows(found)
    assert name == "test rows"
    candidates = Candidates.draw(found.rows(0), others, parts.population.columns.label, 1)
    own, context = candidates.rows[candidates.member], parts.engine.context(0)
    data = SingleClientData(parts.population.columns, own, context.modalities, context.model, 1, 1, 1)
    fit = data.minimise(
        context.loss, dict(parts.initial), train=Train(lr=0.05, epochs=epochs, batch_size=0, optimiser="adam")
    )
    return losses_of(found, context, context.modalities, fit.params, candidates.rows), candidates.member


def test_members_of_an_overfitted_model_are_found_and_those_of_an_untrained_one_are_not(parts: Assembly) -> None:
    loss, member = trained(parts, 200)
    assert len(loss) >= 40
    assert interval([loss_threshold(loss, member)])[0] > 0.0
    loss, member = trained(parts, 0)
    low, high = interval([loss_threshold(loss, member)])
    assert low <= 0.0 <= high


def test_candidates_have_equally_many_rows_of_each_class_on_both_sides(parts: Assembly) -> None:
    label = parts.population.columns.label
    found = Candidates.draw(parts.population.train[0], parts.population.test_rows, label, 1)
    inside, outside = (torch.bincount(label[found.rows[side]], minlength=4) for side in (found.member, ~found.member))
    assert torch.equal(inside, outside)
    assert len(found.rows.unique()) == len(found.rows)


def test_no_public_row_is_a_candidate_of_two_clients() -> None:
    found = capture(recipe(algorithm("fedavg", selector=Uniform()), clients=ClientsSpec(num=5)), 1, 5)
    others = [one.rows[~one.member] for one in candidates_of(found, 1).values()]
    assert len(torch.cat(others).unique()) == sum(map(len, others)) > 40
    public, train = public_rows(found)[0], found.population.train
    assert bool(torch.isin(torch.cat(others), public).all())
    for client, one in candidates_of(found, 1).items():
        assert bool(torch.isin(one.rows[one.member], train[client]).all())


def test_lira_finds_members_that_the_loss_alone_does_not() -> None:
    draw = torch.Generator().manual_seed(1)
    hardness = 3 * torch.randn(200, generator=draw).double()  # rows differ more than membership shifts them
    member = torch.arange(200) < 100
    inside = torch.rand(8, 200, generator=draw) < 0.5

    def confidence(trained_on: Tensor) -> Tensor:
        return hardness + trained_on.double() + 0.3 * torch.randn(trained_on.shape, generator=draw).double()

    own = confidence(member)
    lira = likelihood_ratio(own, confidence(inside), inside, member)
    assert lira.value.mean() > loss_threshold(-own, member).value.mean() + 0.2
    nobody = likelihood_ratio(confidence(torch.zeros(200)), confidence(inside), inside, member)
    low, high = interval([nobody])
    assert low <= 0.0 <= high


def test_class_counts_rank_present_classes_first_and_equal_scores_are_a_coin() -> None:
    truth = {0: torch.tensor([3, 0, 1]), 1: torch.tensor([0, 2, 0]), 2: torch.tensor([1, 1, 1])}
    exact = presence({client: counts.double() for client, counts in truth.items()}, truth)
    assert {client: tally.value.tolist() for client, tally in exact.items()} == {0: [1.0], 1: [1.0]}
    coin = presence({client: torch.zeros(3).double() for client in truth}, truth)
    assert [tally.value.item() for tally in coin.values()] == [0.5, 0.5]


# intervals


def test_an_interval_is_exactly_binomial_with_few_clients_and_resamples_clients_otherwise() -> None:
    low, high = interval([Tally.of(np.ones(10), 0.5)])
    assert (low, high) == (pytest.approx(0.05 ** (1 / 10) * 0 + 0.025 ** (1 / 10) - 0.5), 0.5)
    pairs = [Tally.of(np.full(50, float(client % 2)), 0.5) for client in range(8)]
    low, high = interval(pairs)
    assert low < -0.2
    assert high > 0.2, "fifty guesses about one client are not fifty independent guesses"
    together = measured(Target("x", "k", "b"), "", dict(enumerate(pairs)), owners=dict.fromkeys(range(8), 0))
    assert together.low is not None
    assert together.low > -0.06, "clients with the same rows are one client"


def test_an_attack_without_guesses_has_no_number() -> None:
    found = measured(Target("x", "k", "b"), "m", {}, empty="why")
    assert (found.status, found.value, found.advantage, found.remark) == ("no attack", None, None, "why")


# captured messages


def test_the_captured_replies_are_those_after_a_simulated_attack() -> None:
    base = recipe(algorithm("fedavg", selector=Uniform()), clients=ClientsSpec(num=4))
    honest = capture(base, 1, 10)
    lied = capture(replace(base, attack=Attack(name="sign-flip", clients=(2,), scale=2.0)), 1, 10)
    for before, after in zip(honest.replies, lied.replies, strict=True):
        factor = -2.0 if before.client == 2 else 1.0
        for name, value in before.update("parameters").items():
            torch.testing.assert_close(after.update("parameters")[name], factor * value, atol=1e-5, rtol=1e-4)


def test_the_limit_keeps_the_first_clients_and_all_their_rounds() -> None:
    found = capture(recipe(algorithm("fedavg", selector=Uniform()), clients=ClientsSpec(num=6)), 2, 2)
    assert [(reply.round, reply.client) for reply in found.replies] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_masked_integers_are_read_as_numbers_and_tell_nothing_about_the_next_round() -> None:
    made = recipe(algorithm("fedavg", selector=Uniform()), clients=ClientsSpec(num=4))
    found = capture(made, 1, 4)
    (first, *_), honest = found.replies, found.replies[0].tree("parameters")
    integers = {n: torch.randint(-(2**31), 2**31 - 1, v.shape, dtype=torch.int32) for n, v in honest.items()}
    masked = replace(first, message=replace(first.message, params=integers))  # type: ignore[type-var]
    for name, value in masked.tree("parameters").items():
        assert value.dtype == honest[name].dtype
        assert float(value.abs().max()) <= 1.0
    again = Capture(found.assembly, 4)
    found.assembly.fed.begin(2)
    again.watch(first.sent, Replies([ReplyStack((0,), map_tensors(masked.message, lambda t: t[None]))]))
    again.watch(first.sent, Replies([ReplyStack((0,), map_tensors(first.message, lambda t: t[None]))]))
    assert all(torch.equal(again.replies[1].known[name], value) for name, value in first.known.items())


# whole runs


def audited(folder: Path, method: Any, **changes: Any) -> dict[tuple[str, str, str], Finding]:
    """Run a recipe, audit it, and return the findings by (attack, kind, block)."""
    polyfed.run(recipe(method, rounds=2, **changes), out=folder)
    return {(f.attack, f.kind, f.block): f for f in audit(folder, rounds=1, clients=4).findings}


def test_an_audit_attacks_what_crossed_and_names_what_did_not(tmp_path: Path) -> None:
    row = {"server": ["parameters", "gradients", "prototypes", "statistic"]}
    found = audited(tmp_path / "run", algorithm("cmsfed", gradient_split="exact"), egress={"a": row, "b": row})
    for kind in ("statistic", "prototypes"):
        blocks = [block for attack, of, block in found if (attack, of) == (label_attacks.PRESENT, kind)]
        exact = [found[label_attacks.PRESENT, kind, block] for block in blocks]
        assert any(one.status == "measured" and one.value == 1.0 for one in exact), kind
    assert found["samples rebuilt", "gradients", "a"].status == "measured"
    absent = found["label of each row", "embeddings", "a"]
    assert (absent.status, absent.value, absent.advantage) == ("did not cross", None, None)
    assert found["membership of rows", "parameters", "every block"].status == "measured"
    fedavg = audited(tmp_path / "fedavg", algorithm("fedavg", selector=Uniform()))
    counts = fedavg[label_attacks.PRESENT, "statistic", "a"]
    assert counts.status == "did not cross"
    assert fedavg["samples rebuilt", "gradients", "a"].status == "did not cross"


def test_the_words_of_a_client_are_read_from_the_table_that_it_changed(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    client = np.arange(80) % 4
    own = np.where(draw.random((80, 5)) < 0.5, draw.integers(1, 10, (80, 5)), 10 + 5 * client[:, None] + 1)
    photo = draw.normal(size=(80, 6)).astype(np.float32)
    label = draw.integers(0, 3, 80)
    folder = tmp_path / "run"
    data = {"text": own, "photo": photo}
    encoders = {"text": {"kind": "token-transformer", "vocabulary": 40}, "photo": {"kind": "mlp", "hidden": [8]}}
    polyfed.run(
        data=data, labels=label, standardise=False, clients=client, model={"encoders": encoders}, rounds=1, out=folder
    )
    result = audit(folder, data=data, labels=label, standardise=False, rounds=1, natural_clients=client)
    found = {(one.attack, one.kind, one.block): one for one in result.findings}
    words = found["words present", "parameters", "text"]
    assert words.value == 1.0
    assert words.guess is not None
    assert words.guess < 0.9
    assert ("words present", "parameters", "photo") not in found
    assert found["samples rebuilt", "parameters", "photo"].status == "measured"


def test_ids_are_what_the_encoder_reads_and_not_what_looks_like_ids(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    few, label = draw.integers(0, 3, (40, 2)), np.arange(40) % 2
    few[:, 0] = few[:, 0].clip(1)  # a row of zeros is padding
    encoders = {"code": {"kind": "token-transformer", "vocabulary": 5}}
    options: Any = {"labels": label, "standardise": False}
    polyfed.run(
        data={"code": few},
        clients=np.arange(40) % 4,
        model={"encoders": encoders},
        rounds=1,
        out=tmp_path / "run",
        **options,
    )
    result = audit(
        tmp_path / "run", data={"code": few}, rounds=1, natural_clients=np.arange(40) % 4, clients=2, **options
    )
    assert "words present" in {one.attack for one in result.findings}


def test_embeddings_that_a_silo_sees_are_attacked_on_the_rows_that_were_asked(tmp_path: Path) -> None:
    clients = ClientsSpec(partition="silos", silos=2)
    method = algorithm("hfm", train=Train(lr=0.1))
    found = audited(tmp_path / "run", method, clients=clients, egress=SILOS)
    one = found["label of each row", "embeddings", "a"]
    assert (one.status, one.seen_by, one.field) == ("measured", "silo", "Embedded.embeddings")
    assert one.raw is not None
    assert found["modalities held", "any", "every block"].status == "measured"


def test_labels_and_samples_that_cross_are_known_without_an_attack(tmp_path: Path) -> None:
    row = {"server": ["raw", "statistic"]}
    policy = {"a": row, "b": row, "shared": {"server": ["statistic"]}, "labels": {"server": ["labels"]}}
    found = audited(tmp_path / "run", algorithm("centralized", train=Train(lr=0.1)), egress=policy)
    assert found["samples rebuilt", "raw", "a"].value == 1.0
    assert found["label of each row", "labels", "labels"].value == 1.0
    assert found["label of each row", "labels", "labels"].significant
    assert found["membership of rows", "parameters", "every block"].status == "did not cross"


def test_the_ledger_of_the_run_decides_what_is_attacked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    polyfed.run(recipe(algorithm("fedavg", selector=Uniform()), rounds=1), out=folder)
    lines = [json.loads(line) for line in (folder / "egress.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["block"], line["destination"]) != ("a", "server")]
    (folder / "egress.jsonl").write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in kept))
    found = {(f.attack, f.kind, f.block): f for f in audit(folder, rounds=1, clients=3).findings}
    assert found["samples rebuilt", "parameters", "a"].status == "did not cross"
    assert found["samples rebuilt", "parameters", "b"].status == "measured"


SILOS = {
    "a": {"silo": ["parameters", "embeddings"]},
    "b": {"silo": ["parameters", "embeddings"]},
    "shared": {"server": ["parameters", "statistic"], "silo": ["parameters", "statistic", "ids"]},
}


def test_the_verb_prints_json_and_writes_the_file_and_the_page(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    polyfed.run(recipe(algorithm("fedavg", selector=Uniform()), rounds=1), out=folder)
    assert "What messages give away" not in (folder / "report.html").read_text()
    with pytest.raises(SystemExit) as stop:
        main(["audit", str(folder), "--rounds", "1", "--clients", "3", "--shadows", "2", "--json"])
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "leakage.json").read_text())
    assert any(one["method"] == "LiRA, 2 shadow models" for one in printed["findings"])
    page = (folder / "report.html").read_text()
    assert "What messages give away" in page
    assert "did not cross: " in page
    with pytest.raises(SystemExit):
        main(["audit", str(folder), "--rounds", "1", "--clients", "3"])
    out = capsys.readouterr().out
    assert "advantage" in out
    assert "did not cross: " in out
    for text in (printed["notes"][0], page, " ".join(out.split())):
        assert "WARNING: membership is measured against test rows" in text
    assert "* the whole interval of the advantage lies above 0" in out


def test_notes_say_what_membership_is_measured_against_and_where_the_noise_is_added(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg", selector=Uniform(), aggregation="uniform"), rounds=1)
    made = replace(made, clients=replace(made.clients, validation=0.3))
    polyfed.run(made, out=tmp_path / "plain")
    assert audit(tmp_path / "plain", rounds=1, clients=3).notes == ()
    for place, noted in (("server", True), ("client", False)):
        section = Privacy(unit="client", delta=0.01, epsilon=50.0, noise_at=place)  # type: ignore[arg-type]
        polyfed.run(replace(made, privacy=section), out=tmp_path / place)
        notes = audit(tmp_path / place, rounds=1, clients=3).notes
        assert any("after it has received the replies" in note for note in notes) == noted


def test_a_finding_above_zero_has_a_star() -> None:
    found = Finding("a", "raw", "x", "server", "", "measured", "how", 1.0, 0.5, 0.5, 0.4, 0.6)
    result = LeakageAudit(Path(), "fedavg", "toy", 1, 1, 1, 0, (), (found, replace(found, low=-0.1)))
    screen = Console(file=StringIO(), width=150)
    for part in _tables(result):
        screen.print(part)
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("+0.50*") == 1
    assert printed.count("+0.50 ") == 1


def test_other_data_and_wrong_options_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    polyfed.run(recipe(algorithm("fedavg"), rounds=1), out=folder)
    for options in ({"rounds": 0}, {"clients": 0}, {"shadows": 1}):
        with refuses(RecipeError, f"--{next(iter(options))}"):
            audit(folder, **options)
    facts = json.loads((folder / "run.json").read_text())
    facts["data"]["sha256"] = "0" * 64
    (folder / "run.json").write_text(json.dumps(facts))
    with refuses(DataError, "of the run"):
        audit(folder, rounds=1)
    with refuses(DataError, "holds no run"):
        audit(tmp_path)


def test_a_task_without_classes_has_no_labels_to_attack(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    arrays = {m: draw.standard_normal((120, 5)).astype(np.float32) for m in ("a", "b")}
    np.savez(
        tmp_path / "t.npz", **arrays, label=draw.standard_normal(120).astype(np.float32), split=np.arange(120) % 4 == 0
    )
    data = Npz(path=str(tmp_path / "t.npz"), modalities=("a", "b"))
    found = audited(tmp_path / "run", algorithm("fedavg"), data=data, clients=ClientsSpec(partition="iid", num=4))
    one = found[label_attacks.PRESENT, "parameters", "shared"]
    assert (one.status, one.remark) == ("no attack", "the labels are no classes")
    assert found["membership of rows", "parameters", "every block"].status == "measured"
    assert found["samples rebuilt", "parameters", "a"].status == "measured"


def test_a_run_on_data_in_memory_is_refused_with_a_reason(tmp_path: Path) -> None:
    x = torch.randn(40, 3).numpy()
    polyfed.run(data={"a": x}, labels=np.arange(40) % 2, rounds=1, out=tmp_path / "run")
    with refuses(RecipeError, "command line"):
        audit(tmp_path / "run")


def test_the_file_is_written_into_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    polyfed.run(recipe(algorithm("fedavg"), rounds=1), out=folder)
    result = audit(folder, rounds=1, clients=1)
    assert write(result) == folder / "leakage.json"
    assert result.clients == 1
