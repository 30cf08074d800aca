"""A candidate is planned exactly if `polyfed check` accepts its recipe, by the recipe's and by a device's policy."""

import random
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from study_world import RECIPE, table

from polyfed.algorithms import ALGORITHMS
from polyfed.cli import main
from polyfed.core.messages import KINDS
from polyfed.core.option_checks import PLACEBO, choices, not_searched
from polyfed.core.system.openmp import using_threads
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.study.plan import planned
from polyfed.recommendation.candidates import REFERENCES, SERVERS, Candidate, Planner, reason_of
from polyfed.training.single_data import SingleClientData

TABLE: dict[str, Any] = {
    "seed": 1,
    "rounds": 2,
    "data": {"name": "toy", "rows": 200, "classes": 3},
    "clients": {"num": 4, "validation": 0.2},
    "model": {
        "embedding": 4,
        "encoders": {"a": {"kind": "mlp", "hidden": [4]}, "b": {"kind": "mlp", "hidden": [4]}},
    },
    "train": {"lr": 0.05, "batch_size": 16},
    "algorithm": {"name": "fedavg"},
}


def random_policy(draws: random.Random) -> dict[str, Any]:
    """Random [egress] rows, from none to all, and now and then [limits] and [require]."""
    likely = draws.choice([0.3, 0.6, 0.9])
    policy: dict[str, Any] = {"egress": {}}
    for block in ("a", "b", "shared", "labels", "*"):
        if draws.random() < 0.6:
            kinds = [kind for kind in KINDS if draws.random() < likely]
            allowed = (["labels"] if draws.random() < likely else []) if block == "labels" else kinds
            policy["egress"][block] = {draws.choice(["server", "server", "silo"]): allowed}
    if draws.random() < 0.3:
        policy["limits"] = draws.choice([{"max_rounds": 1}, {"min_batch_size": 64}, {"min_steps": 1}])
    if draws.random() < 0.2:
        policy["require"] = draws.choice([{"max_epsilon": 8.0, "delta": 1e-3}, {"secure_aggregation": True}])
    return policy


def accepted(table: dict[str, Any], folder: Path, policy: Path | None) -> bool:
    """Whether the command `polyfed check` accepts a recipe, and accepts it under the policy file of a device."""
    path = folder / "candidate.toml"
    path.write_text(tomli_w.dumps(table))
    for words in ([], ["--node", str(policy)]):
        if words and policy is None:
            continue
        try:
            main(["check", str(path), *words])
        except SystemExit as end:
            if end.code:
                return False
    return True


def disagreements(seed: int, folder: Path, count: int) -> tuple[list[str], int]:
    """Candidates whose verdict differs from that of the command under a random policy, and how many were planned."""
    draws = random.Random(seed)
    policy = folder / "policy.toml"
    policy.write_text(tomli_w.dumps(random_policy(draws)))
    of_devices = seed % 2 == 0
    table = TABLE if of_devices else {**TABLE, "egress": random_policy(draws)["egress"]}
    planner = Planner(table, policy if of_devices else None)
    judged = [planner.judge(candidate) for candidate in draws.sample(list(planner.all()), count)]
    wrong = [
        f"policy {seed}: {one.name} planned: {one.planned} ({one.refused})"
        for one in judged
        if accepted(planner.recipe_table(one.changes), folder, policy if of_devices else None) != one.planned
    ]
    assert all(reason_of(one) and one.code for one in judged if not one.planned)
    return wrong, sum(one.planned for one in judged)


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_planned_is_accepted_and_not_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [disagreements(seed, tmp_path, 3) for seed in range(4)]
    assert [text for wrong, _ in found for text in wrong] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_over_a_hundred_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [disagreements(seed, tmp_path, 1) for seed in range(4, 108)]
    assert [text for wrong, _ in found for text in wrong] == []
    assert 10 < sum(count for _, count in found) < 94  # both verdicts occur


def test_every_method_and_every_choice_is_a_candidate_once() -> None:
    names = [candidate.name for candidate in Planner(TABLE).all()]
    assert len(names) == len(set(names))
    assert set(names) >= {
        *ALGORITHMS,
        *SERVERS,
        "cmsfed prototypes=local",
        "cmsfed preset=paper",
        "apfl adaptive=false",
    }
    for name, cls in ALGORITHMS.items():
        for option, values in choices(cls).items():
            idle = not_searched(cls).get(option)
            wanted = 0 if idle == PLACEBO or (idle is not None and "same for every" in idle.why) else len(values) - 1
            assert sum(entry.startswith(f"{name} {option}=") for entry in names) == wanted


def test_the_recipe_of_a_candidate_keeps_the_users_own_options() -> None:
    table = {**TABLE, "algorithm": {"name": "fedproto", "mode": "original"}, "server": {"optimiser": "avgm", "lr": 0.5}}
    planner = Planner(table)
    made = {candidate.name: planner.recipe_table(candidate.changes) for candidate in planner.all()}
    assert made["fedproto"]["algorithm"] == {"name": "fedproto", "mode": "original"}
    assert made["fedproto mode=mm_fedavg"]["algorithm"]["mode"] == "mm_fedavg"
    assert "server" not in made["fedavg"], "FedAvgM is a method of its own"
    assert made["fedavgm"]["server"] == {"optimiser": "avgm"}
    assert table["server"] == {"optimiser": "avgm", "lr": 0.5}, "the user's table is not changed"


def test_methods_without_the_metric_are_accepted_but_not_compared() -> None:
    planner = Planner(TABLE)
    assert planner.metrics == ("global.accuracy", "global_by_client.accuracy")
    found = planner.judge(Candidate("pfmml", "pfmml", {"algorithm": {"name": "pfmml"}}))
    assert found.planned
    assert "give clients test rows of their own" in found.unmeasured
    personal = Planner({**TABLE, "clients": {**TABLE["clients"], "personal_test": 0.2}})
    assert personal.metrics == ("personal.mean",)
    found = personal.judge(Candidate("pfmml", "pfmml", {"algorithm": {"name": "pfmml"}}))
    assert found.planned
    assert not found.unmeasured


def test_a_policy_file_replaces_the_egress_of_the_recipe_and_adds_what_it_requires(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[egress.a]\nserver = ["parameters", "statistic"]\n[egress.other]\nserver = []\n'
        "[require]\nmax_epsilon = 4.0\ndelta = 1e-3\n"
    )
    planner = Planner({**TABLE, "egress": {"b": {"server": []}}}, policy)
    assert planner.table["egress"] == {"a": {"server": ["parameters", "statistic"]}}
    assert planner.table["privacy"] == {"unit": "client", "epsilon": 4.0, "delta": 1e-3, "noise_at": "client"}
    assert set(REFERENCES) == {"local", "centralized"}
    assert "seed = 1" in RECIPE


def test_the_data_are_read_once_for_all_candidates_and_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    load = Table.load
    monkeypatch.setattr(Table, "load", lambda self: read.append(self) or load(self))
    rows = [f"{n % 3},{n % 2},{n}.5,{n}" for n in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["label,kind,a_0,b_0", *rows]))
    policy = tmp_path / "policy.toml"
    policy.write_text(tomli_w.dumps({"egress": {"*": {"server": ["parameters"]}}}))
    data = {
        "name": "table",
        "path": str(tmp_path / "mine.csv"),
        "label": "label",
        "modalities": {"a": "a_*", "b": "b_*"},
    }
    planner = Planner({**TABLE, "data": data | {"test_share": 0.2}}, policy)
    for one in list(planner.all())[:5]:
        planner.judge(one)
    assert len(read) == 1


def test_bytes_of_a_reply_are_those_of_the_announced_parameters() -> None:
    planner = Planner(TABLE)
    plain = planner.judge(Candidate("fedavg", "fedavg", {"algorithm": {"name": "fedavg"}}))
    scaffold = planner.judge(Candidate("scaffold", "scaffold", {"algorithm": {"name": "scaffold"}}))
    parameters = 4 * ((16 * 4 + 4) + (4 * 4 + 4) + (24 * 4 + 4) + (4 * 4 + 4) + (2 * 4 * 3 + 3))
    assert plain.reply_bytes == parameters + 4 + 8  # the loss and the number of rows
    assert scaffold.reply_bytes > 1.9 * parameters  # it sends a control variate too


@pytest.mark.parametrize("who", ["sweep", "check", "recommend"])
def test_dry_runs_compute_with_one_thread_whoever_asks(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    fold = SingleClientData.fold

    def folded(self: Any, *args: Any, **more: Any) -> Any:
        seen.add(torch.get_num_threads())
        return fold(self, *args, **more)

    monkeypatch.setattr(SingleClientData, "fold", folded)
    with using_threads(3):
        if who == "sweep":
            planned(table(tmp_path))
        elif who == "check":
            check(parse_recipe({**TABLE, "engine": {"threads": 3}}))
        else:
            Planner(TABLE).judge(Candidate("fedavg", "fedavg", {"algorithm": {"name": "fedavg"}}))
    assert seen == {1}
