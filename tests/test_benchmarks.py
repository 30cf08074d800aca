"""FedMultimodal's draws, as benchmarks/fedmultimodal.py makes them, held against NumPy's own global generator."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns

SUBJECTS = {0: 71, 1: 90, 9: 64}  # windows each; as text, 10 comes before 2


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "fedmultimodal.py"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    client = np.concatenate([*(np.full(n, who) for who, n in SUBJECTS.items()), np.full(20, 5)])
    split = np.where(client == 5, 1, 0)
    label = draw.integers(0, 6, len(client))
    acc, gyro = (draw.standard_normal((len(client), 128, 3)).astype(np.float16) for _ in range(2))
    np.savez(tmp_path / "har.npz", acc=acc, gyro=gyro, label=label, client=client, split=split)
    return tmp_path / "har.npz"


def loaded(script: dict[str, Any], path: Path, alpha: float) -> Columns:
    table: Columns = script["Shards"](path=str(path), modalities=("acc", "gyro"), alpha=alpha).load()
    return table


@pytest.mark.parametrize("alpha", [0.1, 5.0])
def test_every_window_is_held_out_or_in_one_shard_of_its_subject(script, path, alpha):
    table = loaded(script, path, alpha)
    client, split = table.client.numpy(), table.split.numpy()
    with np.load(path) as file:
        subject = file["client"]
    assert set(split[subject == 5]) == {TEST}
    for place, who in enumerate((0, 9, 1)):  # "1-0" ... "1-4", "10-0" ... "10-4", "2-0" ... "2-4"
        own = subject == who
        assert (split[own] == VALIDATION).sum() == SUBJECTS[who] // 5
        sizes = np.bincount(client[own & (split != VALIDATION)], minlength=16)
        assert sizes.nonzero()[0].tolist() == list(range(5 * place, 5 * place + 5))
        assert sizes.sum() == SUBJECTS[who] - SUBJECTS[who] // 5
        assert sizes[sizes > 0].min() >= 5


def test_a_small_alpha_leaves_shards_with_few_classes(script, path):
    classes = {}
    for alpha in (0.1, 100.0):
        table = loaded(script, path, alpha)
        shards = [table.label[(table.client == k) & (table.split == TRAIN)] for k in range(15)]
        classes[alpha] = np.mean([len(labels.unique()) for labels in shards])
    assert classes[0.1] < classes[100.0] - 1


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("round_", [1, 2, 77])
def test_cohorts_are_those_of_the_global_generator_whatever_the_seed(script, round_, seed):
    clients = type("Clients", (), {"eligible": range(105), "__len__": lambda self: 105})()
    fed = SimpleNamespace(clients=clients, round=round_, seed=seed)
    chosen, _ = script["Cohorts"](participation=10).choose({}, {}, fed)
    np.random.seed(round_ - 1)  # noqa: NPY002  (theirs)
    assert chosen == sorted(np.random.choice(range(105), 10, replace=False).tolist())  # noqa: NPY002
