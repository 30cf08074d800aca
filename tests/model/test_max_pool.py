"""The max-pool of polyfed gives the results of PyTorch's layer to the last bit, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from polyfed.model.modules import max_pool
from polyfed.model.modules.layer_replacement import adopt
from polyfed.model.modules.layers import Rows
from polyfed.model.modules.max_pool import MaxPool2d


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each use of the fast kernel, which all inputs are large enough for."""
    monkeypatch.setattr(max_pool, "ENTRIES", 1)
    monkeypatch.setattr(max_pool, "CHANNELS", 2)
    calls: list[int] = []
    forward = max_pool._ChannelsLast.forward

    def counted(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        calls.append(len(x))
        return forward(ctx, x, *options)

    monkeypatch.setattr(max_pool._ChannelsLast, "forward", staticmethod(counted))
    return calls


def training() -> Rows:
    rows = Rows()
    rows.bound = False
    return rows


def normal(*shape: int) -> Tensor:
    """Numbers with many ties, because a pool must choose the same one of two equal entries as PyTorch."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).round(decimals=0)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3), "stride": (1, 2)},
        {"kernel_size": 3, "dilation": 2},
        {"kernel_size": 2, "ceil_mode": True},
    ],
)
def test_results_and_gradients_are_those_of_pytorch(options: dict[str, Any], used: list[int]) -> None:
    theirs = nn.MaxPool2d(**options)
    ours = MaxPool2d(theirs, training())
    for x in (normal(4, 3, 9, 7), normal(4, 3, 9, 7).transpose(0, 1), normal(4, 9, 7, 3).permute(0, 3, 1, 2)):
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = theirs(one), ours(other)
        assert torch.equal(found, expected)
        weights = normal(*expected.shape) + 0.5
        (one_grad,) = torch.autograd.grad((expected * weights).sum(), one)
        (other_grad,) = torch.autograd.grad((found * weights).sum(), other)
        assert torch.equal(one_grad, other_grad)
    assert used == [4, 3], "the last input has the fast format already"


def test_a_gradient_of_a_gradient_is_that_of_pytorch(used: list[int]) -> None:
    found = []
    for pool in (nn.MaxPool2d(2), MaxPool2d(nn.MaxPool2d(2), training())):
        x = normal(2, 3, 4, 4).requires_grad_()
        (first,) = torch.autograd.grad(pool(x * x).exp().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*found)
    assert len(used) == 1


def test_other_calls_use_the_layer_of_pytorch(used: list[int]) -> None:
    rows = training()
    pool = MaxPool2d(nn.MaxPool2d(2), rows)
    x = normal(2, 3, 4, 4)
    assert torch.equal(pool(x), nn.MaxPool2d(2)(x)), "no gradient"
    one_channel = normal(2, 1, 4, 4).requires_grad_()
    assert torch.equal(pool(one_channel), nn.MaxPool2d(2)(one_channel)), "few channels"
    out, places = MaxPool2d(nn.MaxPool2d(2, return_indices=True), rows)(x.clone().requires_grad_())  # type: ignore[misc]
    assert torch.equal(out, nn.MaxPool2d(2)(x))
    assert places.shape == out.shape
    rows.bound = True
    stacked = vmap(grad(lambda x: pool(x).square().sum()))(x.unsqueeze(1))
    (expected,) = torch.autograd.grad(nn.MaxPool2d(2)(x.requires_grad_()).square().sum(), x)
    assert torch.equal(stacked.squeeze(1), expected)
    assert used == []


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own forward-mode formulas use it
def test_transforms_of_the_inputs_work_while_parameters_are_trained(used: list[int]) -> None:
    """A loss may differentiate with regard to its inputs, for example to make adversarial samples."""
    plain, pool = nn.MaxPool2d(2), MaxPool2d(nn.MaxPool2d(2), training())
    x = normal(2, 3, 4, 4).requires_grad_()
    for transform in (grad, lambda f: vmap(grad(f))):
        found, expected = (transform(lambda x, p=p: p(x).square().sum())(x) for p in (pool, plain))
        assert torch.equal(found, expected)
    (_, found), (_, expected) = (jvp(p, (x.detach(),), (torch.ones_like(x),)) for p in (pool, plain))
    assert torch.equal(found, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found, expected = (forward_ad.unpack_dual(p(dual)).tangent for p in (pool, plain))
    assert torch.equal(found, expected)
    assert used == []


def test_hooks_and_attributes_of_the_replaced_layer_stay() -> None:
    like = nn.MaxPool2d(2)
    like.scale = 3.0  # type: ignore[assignment]
    like.register_forward_hook(lambda module, inputs, out: module.scale * out)  # type: ignore[arg-type, operator]
    pool = adopt(nn.Sequential(like), training(), "x")
    x = normal(2, 3, 4, 4)
    assert isinstance(pool[0], MaxPool2d)  # type: ignore[index]
    assert torch.equal(pool(x), 3 * nn.MaxPool2d(2)(x))
