"""Prototypes: hand numbers, NumPy, and the cases in which a class, a row or a modality is missing."""

import numpy as np
import pytest
import torch

from polyfed.core.batch import Batch
from polyfed.training import prototypes
from polyfed.training.prototypes import Prototypes


def batch(y: list[int], ok: list[bool] | None = None, present: dict[str, list[bool]] | None = None) -> Batch:
    labels = torch.tensor(y)
    there = {m: torch.tensor(v) for m, v in (present or {}).items()}
    return Batch({}, labels, torch.arange(len(y)), torch.tensor(ok) if ok else None, there)


def made(mean: list[list[float]], active: list[bool] | None = None) -> Prototypes:
    means = torch.tensor(mean)
    return Prototypes(means, torch.tensor(active) if active else torch.ones(len(means), dtype=torch.bool))


def test_two_prototypes_at_distances_zero_and_one() -> None:
    # ln(1 + 1/e) = 0.3132616875 (algorithms.md X13)
    loss = prototypes.cross_entropy(made([[0.0], [1.0]]), torch.zeros(1, 1), batch([0]), "a")
    assert float(loss) == pytest.approx(0.3132616875, abs=1e-6)


def test_probabilities_equal_numpy_and_sum_to_one_over_active_classes() -> None:
    rng = np.random.default_rng(0)
    z, mean = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    active = np.array([True, False, True, True, False])
    near = Prototypes(torch.from_numpy(mean), torch.from_numpy(active))
    found = near.log_probabilities(torch.from_numpy(z)).exp().numpy()
    scores = np.exp(-np.linalg.norm(z[:, None] - mean[None], axis=-1)) * active
    assert np.allclose(found, scores / scores.sum(1, keepdims=True), atol=1e-6)
    assert np.allclose(found.sum(1), 1.0)


def test_rows_whose_class_has_no_prototype_do_not_count() -> None:
    near = made([[0.0], [1.0], [9.0]], [True, True, False])
    z = torch.tensor([[0.0], [5.0]])
    both = prototypes.cross_entropy(near, z, batch([0, 2]), "a")
    assert float(both) == pytest.approx(0.3132616875, abs=1e-6)
    assert float(prototypes.cross_entropy(near, z, batch([2, 2]), "a")) == 0.0


def test_no_prototype_at_all_gives_zero_and_a_finite_gradient() -> None:
    near = made([[0.0], [0.0]], [False, False])
    z = torch.ones(2, 1, requires_grad=True)
    loss = prototypes.cross_entropy(near, z, batch([0, 1]), "a")
    (grad,) = torch.autograd.grad(loss, z)
    assert float(loss.detach()) == 0.0
    assert torch.isfinite(grad).all()


def test_the_gradient_at_a_prototype_is_finite() -> None:
    z = torch.zeros(1, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(prototypes.cross_entropy(made([[0.0] * 3, [1.0] * 3]), z, batch([0]), "a"), z)
    assert torch.isfinite(grad).all()


def test_a_client_of_one_class_has_no_loss_and_is_sure() -> None:
    near = made([[3.0], [0.0]], [True, False])
    z = torch.tensor([[1.0], [7.0]])
    assert float(prototypes.cross_entropy(near, z, batch([0, 0]), "a")) == 0.0
    sure = prototypes.confidence({"a": near, "b": near}, {"a": z, "b": z * 2}, batch([0, 0]))
    assert float(prototypes.imbalance_ratio(sure["a"], sure["b"])) == 1.0


def test_ratio_inverts_and_stays_within_its_limits() -> None:
    a, b, zero = torch.tensor(0.3), torch.tensor(0.2), torch.tensor(0.0)
    product = prototypes.imbalance_ratio(a, b) * prototypes.imbalance_ratio(b, a)
    assert float(product) == pytest.approx(1.0)
    assert float(prototypes.imbalance_ratio(a, zero)) == 1e3
    assert float(prototypes.imbalance_ratio(zero, b)) == pytest.approx(1e-3)
    assert float(prototypes.imbalance_ratio(zero, zero)) == 1.0


@pytest.mark.parametrize(
    ("ratio", "clip", "hard"), [(0.5, 0.0, 0.0), (1.0, 0.0, 0.0), (1.5, 1.0, 2.0), (9.0, 2.0, 2.0)]
)
def test_modulation(ratio: float, clip: float, hard: float) -> None:
    assert float(prototypes.modulation(torch.tensor(ratio), 2.0, "clip")) == pytest.approx(clip)
    assert float(prototypes.modulation(torch.tensor(ratio), 2.0, "hard")) == pytest.approx(hard)


def test_padding_and_rows_without_the_modality_count_nothing() -> None:
    near = made([[0.0], [1.0]])
    z = torch.tensor([[0.0], [float("inf")], [0.4]])
    rows = batch([0, 1, 1], ok=[True, False, True], present={"a": [True, True, False]})
    assert float(prototypes.cross_entropy(near, z, rows, "a")) == pytest.approx(0.3132616875, abs=1e-6)
    sums, counts = prototypes.class_sums(z, rows, "a", 2)
    assert sums.tolist() == [[0.0], [0.0]]
    assert counts.tolist() == [1.0, 0.0]


def test_pooled_prototypes_are_the_centroids_of_all_samples() -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(60, 3)), rng.integers(0, 4, size=60)
    reports = []
    for part in np.array_split(np.arange(60), [5, 30]):
        own = Prototypes.of(*prototypes.class_sums(torch.from_numpy(z[part]), batch(y[part].tolist()), "a", 5))
        counts = torch.bincount(torch.from_numpy(y[part]), minlength=5).to(torch.float64)
        reports.append(({"a": own.sent}, {"shared": counts}))
    found = prototypes.gathered({}, reports)["a"]
    for label in range(4):
        assert np.allclose(found.mean[label].numpy(), z[y == label].mean(0))
    assert found.active.tolist() == [True] * 4 + [False], "a class that nobody has stays without a prototype"


def test_unreported_classes_keep_their_prototype() -> None:
    old = {"a": made([[1.0], [2.0], [0.0]], [True, True, False])}
    report = ({"a": torch.tensor([[3.0], [0.0], [4.0]])}, {"shared": torch.tensor([2.0, 0.0, 1.0])})
    found = prototypes.gathered(old, [report])["a"]
    assert found.mean.flatten().tolist() == [3.0, 2.0, 4.0]
    assert found.active.all()


def test_uniform_weights_count_holders_of_a_class_alike() -> None:
    reports = [
        ({"a": torch.tensor([[2.0]])}, {"shared": torch.tensor([9.0])}),
        ({"a": torch.tensor([[4.0]])}, {"shared": torch.tensor([1.0])}),
        ({"a": torch.tensor([[0.0]])}, {"shared": torch.tensor([0.0])}),
    ]
    assert float(prototypes.gathered({}, reports, uniform=True)["a"].mean) == 3.0
    assert float(prototypes.gathered({}, reports)["a"].mean) == pytest.approx(2.2)


def test_entropy_of_equal_distances_is_the_logarithm_of_active_classes() -> None:
    near = made([[1.0], [-1.0], [5.0]], [True, True, False])
    assert float(prototypes.entropy(near, torch.zeros(2, 1), batch([0, 1]), "a")) == pytest.approx(np.log(2), abs=1e-5)


def test_features_at_one_length_keep_their_direction() -> None:
    z = {"a": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
    assert torch.allclose(prototypes.at_length(z, 10.0)["a"], torch.tensor([[6.0, 8.0], [0.0, 0.0]]))
    assert torch.equal(prototypes.at_length(z, 0.0)["a"], z["a"])


def test_a_minority_of_liars_moves_a_robust_prototype_nowhere_beyond_the_honest_ones() -> None:
    honest = [({"a": torch.tensor([[float(v)], [0.0]])}, {"shared": torch.tensor([5.0, 0.0])}) for v in (1, 2, 3)]
    for lie in (1e30, -1e30, 3e38):
        liar = ({"a": torch.tensor([[lie], [lie]])}, {"shared": torch.tensor([1e6, 0.0])})
        found = prototypes.gathered({}, [*honest, liar], robust=True)["a"]
        assert 1.0 <= float(found.mean[0]) <= 3.0
        assert not found.active[1], "nobody has rows of the class"
        assert float(prototypes.gathered({}, [*honest, liar])["a"].mean[0].abs()) > 1e6, "the mean falls"


def test_nobody_weighs_more_rows_than_it_registered() -> None:
    honest = ({"a": torch.tensor([[1.0]])}, {"shared": torch.tensor([10.0])})
    boaster = ({"a": torch.tensor([[3.0]])}, {"shared": torch.tensor([1e9])})
    assert float(prototypes.gathered({}, [honest, boaster], [10, 10])["a"].mean) == pytest.approx(2.0)
    assert float(prototypes.gathered({}, [honest, boaster])["a"].mean) == pytest.approx(3.0)
    assert float(prototypes.gathered({}, [honest], [12])["a"].mean) == 1.0, "fewer rows stay as they are"
