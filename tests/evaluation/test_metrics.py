import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from polyfed.data.sources import Toy
from polyfed.evaluation import client_statistics
from polyfed.evaluation.scores import own_score
from polyfed.federation.context import ClientContext
from polyfed.model import ModelSpec, build_model
from polyfed.objective import class_metrics as classes
from polyfed.training import SingleClientData
from world import PLAIN


@pytest.fixture
def answers() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    y = torch.randint(0, 7, (200,), generator=draws)
    y[y == 4] = 5  # a class that never occurs in the truth
    return torch.randn(200, 7, generator=draws) + 2 * torch.nn.functional.one_hot(y, 7), y


def test_all_from_the_confusion_matrix_as_scikit_learn_says(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, y = answers
    guess = logits.argmax(1).numpy()
    parts = [classes.confusion(z, t, None, 7) for z, t in zip(logits.split(33), y.split(33), strict=True)]
    matrix = torch.stack(parts).sum(0)
    assert np.array_equal(matrix.numpy(), sk.confusion_matrix(y, guess, labels=range(7)))
    assert classes.accuracy(matrix) == pytest.approx(sk.accuracy_score(y, guess))
    assert classes.uar(matrix) == pytest.approx(sk.recall_score(y, guess, average="macro", labels=np.unique(y)))
    assert classes.macro_f1(matrix) == pytest.approx(sk.f1_score(y, guess, average="macro"))
    hits = classes.top_k_hits(logits, y, None)
    assert float(hits) == pytest.approx(200 * sk.top_k_accuracy_score(y, logits, k=5, labels=range(7)))


def test_padding_counts_nothing(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, y = answers
    ok = torch.arange(200) < 150
    assert torch.equal(classes.confusion(logits, y, ok, 7), classes.confusion(logits[:150], y[:150], None, 7))
    assert float(classes.top_k_hits(logits, y, ok)) == float(classes.top_k_hits(logits[:150], y[:150], None))


def test_top_five_of_five_classes_says_nothing_and_is_left_out() -> None:
    none = torch.zeros(())
    assert "top5" not in classes.summary(torch.eye(5), none, none)
    assert "top5" in classes.summary(torch.eye(6), none, none)


def test_ties_in_top_k_go_to_the_smaller_class() -> None:
    flat = torch.zeros(2, 8)
    assert float(classes.top_k_hits(flat, torch.tensor([4, 5]), None)) == 1.0  # classes 0..4 are the first five


def test_k_is_clamped_to_the_classes() -> None:
    assert float(classes.top_k_hits(torch.zeros(1, 3), torch.tensor([2]), None)) == 1.0


def test_empty_matrices_give_numbers() -> None:
    nothing = torch.zeros(3, 3)
    assert (classes.accuracy(nothing), classes.uar(nothing), classes.macro_f1(nothing)) == (0.0, 0.0, 0.0)


def test_personal_numbers_by_hand() -> None:
    found = client_statistics.personal(
        {0: 0.75, 1: 0.5}, {0: 4.0, 1: 2.0, 2: 0.0}
    )  # client 2 has no test rows, so no score
    assert found == pytest.approx({"mean": 0.625, "weighted": 4 / 6, "worst": 0.5, "std": 0.125, "p10": 0.525})
    errors = client_statistics.personal({0: 0.75, 1: 0.5}, {0: 4.0, 1: 2.0}, rising=False)
    assert errors == pytest.approx(found | {"worst": 0.75, "p10": 0.725})
    assert client_statistics.personal({}, {}) == {}


def test_groups_of_several_models_are_averaged_number_by_number() -> None:
    silos = [{"global": {"accuracy": 0.2, "loss": 3.0}}, {"global": {"accuracy": 0.6, "loss": 1.0}}]
    assert client_statistics.mean_groups(silos) == {
        "global": {"accuracy": pytest.approx(0.4), "loss": pytest.approx(2.0)}
    }
    assert client_statistics.mean_groups([]) == {}


def test_what_is_not_a_number_is_no_hit() -> None:
    logits = torch.full((2, 7), torch.nan)
    logits[1] = torch.tensor([1.0, 2, 3, 4, 5, 6, torch.nan])
    assert float(classes.top_k_hits(logits, torch.tensor([0, 6]), None)) == 0.0


def test_a_model_without_finite_logits_has_no_number_of_hits() -> None:
    model = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)
    columns = Toy(rows=20, classes=3).load()
    found = {}
    for name, scale in (("sound", 1.0), ("lost", torch.nan)):
        w = {key: scale * value for key, value in model.init(1).items()}
        view = SingleClientData(columns, torch.arange(5), ("a", "b"), model, key=1, round=1, rounds=1)
        found[name] = own_score(ClientContext(model, ("a", "b"), 3, {}), w, view).sums
    assert 0 <= float(found["sound"]) <= 5
    assert found["lost"].isnan()
