import weakref
from typing import Any

import pytest
import torch

from polyfed.core.errors import RecipeError
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.training.optimisers import Train
from refusals import refuses

OPTIMISERS: list[tuple[dict[str, Any], Any]] = [
    ({"optimiser": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
    ({"momentum": 0.9, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    ({"momentum": 0.9, "nesterov": True}, lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    ({"optimiser": "adam", "weight_decay": 0.01}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01)),
    ({"optimiser": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("options", "reference"), OPTIMISERS)
def test_steps_equal_torch_optim_alone_and_under_vmap(options: dict[str, Any], reference: Any, clip: float) -> None:
    draws = torch.Generator().manual_seed(0)
    train = Train(lr=0.1, clip_norm=clip, **options)
    start = [{"w": torch.randn(3, 2, generator=draws), "b": torch.randn(2, generator=draws)} for _ in range(4)]
    grads = [[{n: torch.randn(v.shape, generator=draws) for n, v in w.items()} for w in start] for _ in range(5)]
    expected = []
    for k, tree in enumerate(start):
        params = {n: v.clone().requires_grad_() for n, v in tree.items()}
        optimiser = reference(params.values())
        for step in grads:
            for n, p in params.items():
                p.grad = step[k][n].clone()
            if clip:
                torch.nn.utils.clip_grad_norm_(params.values(), clip)
            optimiser.step()
        expected.append(params)
    for k, tree in enumerate(start):
        w, moments = {n: v.clone() for n, v in tree.items()}, train.moments(tree)
        for t, step in enumerate(grads):
            train.step(w, dict(step[k]), moments, 0.1, t + 1)
        assert all(torch.allclose(w[n], expected[k][n], rtol=1e-5, atol=1e-6) for n in w)

    def stacked(lane: torch.Tensor, w: Any, *steps: Any) -> Any:
        w = {n: v.clone() for n, v in w.items()}
        moments = train.moments(w)
        for t, step in enumerate(steps):
            train.step(w, step, moments, 0.1, lane * 0 + t + 1)
        return w

    many = {n: torch.stack([w[n] for w in start]) for n in start[0]}
    steps = [{n: torch.stack([g[n] for g in step]) for n in start[0]} for step in grads]
    out = torch.func.vmap(stacked)(torch.arange(4), many, *steps)
    for k in range(4):
        assert all(torch.allclose(out[n][k], expected[k][n], rtol=1e-5, atol=1e-6) for n in out)


def test_schedules_start_and_end_where_they_say() -> None:
    for schedule in ("linear", "cosine"):
        train = Train(lr=1.0, lr_end=0.1, lr_schedule=schedule)  # type: ignore[arg-type]
        assert train.lr_at(1, 50) == pytest.approx(1.0)
        assert train.lr_at(50, 50) == pytest.approx(0.1)
    jump = Train(lr=1.0, lr_end=0.1, lr_schedule="step", lr_step=10)
    assert [jump.lr_at(r, 50) for r in (1, 10, 11, 50)] == [1.0, 1.0, 0.1, 0.1]
    authors = Train(lr=1e-2, lr_end=1e-3, lr_schedule="authors", lr_step=80)
    assert authors.lr_at(80, 180) == 1e-2
    assert authors.lr_at(90, 180) == pytest.approx(1e-2 - 9e-3 * 0.5)  # half way: half of the fall at once


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1}, "train.lr: must be"),
        ({"momentum": 1.0}, "train.momentum: must be"),
        ({"nesterov": True}, "train.nesterov: needs momentum"),
        ({"lr_schedule": "cosine"}, "train.lr_schedule: needs lr_end"),
    ],
)
def test_train_refuses_what_has_no_meaning(options: dict[str, Any], said: str) -> None:
    with refuses(RecipeError, said):
        Train(**options)


def test_server_optimisers_follow_reddi_et_al_by_hand() -> None:
    # one parameter: x = 1, two rounds of mean 3 then 2; beta1 = .9, beta2 = .99, tau = .5, lr = .1
    def play(name: str, **options: Any) -> list[float]:
        server = ServerOptimiser(optimiser=name, lr=0.1, tau=0.5, **options)  # type: ignore[arg-type]
        x = {"w": torch.tensor([1.0], dtype=torch.float64)}
        moments, seen = server.moments(x), []
        for mean in (3.0, 2.0):
            x, moments = server.apply(x, {"w": torch.tensor([mean], dtype=torch.float64)}, moments, x)
            seen.append(float(x["w"]))
        return seen

    def by_hand(second: Any) -> list[float]:
        x, m, v, seen = 1.0, 0.0, 0.25, []
        for mean in (3.0, 2.0):
            change = mean - x
            m = 0.9 * m + 0.1 * change
            v = second(v, change**2)
            x += 0.1 * m / (v**0.5 + 0.5)
            seen.append(x)
        return seen

    assert play("adam") == pytest.approx(by_hand(lambda v, g: 0.99 * v + 0.01 * g))
    assert play("adagrad") == pytest.approx(by_hand(lambda v, g: v + g))
    assert play("yogi") == pytest.approx(by_hand(lambda v, g: v - 0.01 * g * (1 if v > g else -1)))
    first = 1 + 0.1 * 2  # avgm: v = change, then 0.5 v + change
    assert play("avgm", momentum=0.5) == pytest.approx([first, first + 0.1 * (0.5 * 2 + (2 - first))])
    assert play("none") == pytest.approx([1.2, 1.2 + 0.1 * 0.8])


def test_a_server_with_momentum_lets_each_tensor_of_the_mean_go() -> None:
    """So that it holds two models at most: the new one, and the momentum."""
    before = {f"w{number}": torch.full((1000,), float(number)) for number in range(5)}
    mean = {name: value + 1 for name, value in before.items()}
    kept, alive = {name: weakref.ref(value) for name, value in mean.items()}, list[int]()

    class Watched(dict[str, torch.Tensor]):
        def pop(self, name: str) -> torch.Tensor:  # type: ignore[override]
            alive.append(sum(one() is not None for one in kept.values()))
            return super().pop(name)

    given = Watched(mean)
    del mean
    server = ServerOptimiser(optimiser="avgm", momentum=0.5, lr=0.5)
    new, moments = server.apply(before, given, {"momentum": {n: torch.ones(1000) for n in before}}, before)
    assert alive == [5, 4, 3, 2, 1]
    assert not given
    for name, value in before.items():
        assert torch.equal(moments["momentum"][name], torch.full((1000,), 1.5))
        assert torch.equal(new[name], value + 0.75)


def test_buffers_take_the_mean_and_no_optimiser() -> None:
    server = ServerOptimiser(optimiser="adam", lr=0.1)
    old = {"w": torch.ones(1), "running_mean": torch.ones(1)}
    trainable = {"w": old["w"]}
    new, moments = server.apply(
        old, {"w": torch.zeros(1), "running_mean": torch.full((1,), 5.0)}, server.moments(trainable), trainable
    )
    assert float(new["running_mean"]) == 5.0
    assert set(moments["first"]) == {"w"}
