"""Laws of the batch-aware layers; the oracles are torch.nn's own layers and NumPy."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from polyfed.core.batch import Batch
from polyfed.model.modules.layers import GRU, BatchNorm, Dropout, Rows


def batch(size, key=None, ok=None):
    rows = torch.arange(size)
    return Batch(x={}, y=torch.zeros(size, dtype=torch.int64), rows=rows, ok=ok, key=key)


@contextmanager
def seeing(rows, batch, present=None):
    rows.see(batch, present)
    yield
    rows.clear()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(kind, channels):
    """PyTorch's layer and ours, on the same drawn weights."""
    theirs, ours = kind(channels), kind(channels)
    for layer in (theirs, ours):
        layer.weight.data, layer.bias.data = normal(channels, seed=8), normal(channels, seed=9)
    rows = Rows()
    return theirs, BatchNorm(ours, rows), rows


KINDS = [(nn.BatchNorm1d, (4,)), (nn.BatchNorm1d, (4, 5)), (nn.BatchNorm2d, (4, 3, 5))]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
@pytest.mark.parametrize("mask", [False, True])
def test_batchnorm_with_all_rows_real_is_torchs(kind, shape, mask):
    theirs, ours, rows = pair(kind, 4)
    for step in range(3):
        x, x2 = (normal(6, *shape, seed=step).requires_grad_() for _ in range(2))
        with seeing(rows, batch(6, key=1, ok=torch.ones(6, dtype=torch.bool) if mask else None)):
            y = ours(x2)
        torch.testing.assert_close(y, theirs(x), rtol=1e-5, atol=1e-6)
        gradients = [torch.autograd.grad(out.sin().sum(), inp)[0] for out, inp in ((theirs(x), x), (y, x2))]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
        theirs.running_mean.copy_(ours.running_mean), theirs.running_var.copy_(ours.running_var)
    theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_batchnorm_sees_only_the_real_rows_even_if_padding_is_infinite(kind, shape):
    theirs, ours, rows = pair(kind, 4)
    ok = torch.tensor([True, False, True, True, False, True])
    x = torch.where(ok.view(-1, *(1,) * len(shape)), normal(6, *shape), torch.inf).requires_grad_()
    with seeing(rows, batch(6, key=1, ok=ok)):
        y = ours(x)
    want = theirs(x.detach()[ok])
    torch.testing.assert_close(y[ok], want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    y[ok].sin().sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[~ok] == 0).all()


def test_batchnorm_statistics_stay_without_two_values_a_channel():
    for size, ok in (
        (1, None),
        (3, torch.tensor([False, True, False])),
        (2, torch.zeros(2, dtype=torch.bool)),
    ):
        _, ours, rows = pair(nn.BatchNorm1d, 4)
        with seeing(rows, batch(size, key=1, ok=ok)):
            assert ours(normal(size, 4)).isfinite().all()
        assert (ours.running_mean == 0).all()
        assert (ours.running_var == 1).all()


def test_batchnorm_in_evaluation_uses_and_keeps_the_running_statistics():
    theirs, ours, rows = pair(nn.BatchNorm1d, 4)
    theirs.eval()
    with seeing(rows, batch(6, ok=torch.arange(6) < 2)):
        torch.testing.assert_close(ours(normal(6, 4)), theirs(normal(6, 4)))
    assert (ours.running_mean == 0).all()


def test_batchnorm_reads_a_multiple_of_the_rows_as_frames():
    theirs, ours, rows = pair(nn.BatchNorm2d, 4)
    ok = torch.tensor([True, False, True])
    x = normal(3, 2, 4, 3, 3)
    with seeing(rows, batch(3, key=1, ok=ok)):
        y = ours(x.flatten(0, 1)).unflatten(0, (3, 2))
    torch.testing.assert_close(y[ok].flatten(0, 1), theirs(x[ok].flatten(0, 1)), rtol=1e-5, atol=1e-6)


def test_batchnorm_rows_that_lack_the_modality_do_not_count():
    theirs, ours, rows = pair(nn.BatchNorm1d, 4)
    ok, present = torch.arange(6) < 5, torch.arange(6) > 1
    with seeing(rows, batch(6, key=1, ok=ok), present):
        ours(normal(6, 4))
    theirs(normal(6, 4)[ok & present])
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


def masks(p=0.3, size=8, width=50, key=5, stream=7, layer=None, shape=None):
    rows = Rows()
    layer = layer or Dropout(p, stream, rows)
    layer.rows = rows
    with seeing(rows, batch(size, key=key)):
        return layer(torch.ones(shape or (size, width)))


def test_dropout_drops_its_share_and_keeps_the_mean():
    y = masks(p=0.3, size=200, width=500)
    share = (y == 0).double().mean().item()
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / y.numel())
    np.testing.assert_allclose(np.unique(y), [0.0, 1 / 0.7], rtol=1e-6)


def test_dropout_masks_of_the_first_rows_survive_padding():
    assert torch.equal(masks(size=8), masks(size=13)[:8])


def test_dropout_differs_by_key_layer_and_use_but_not_by_repetition():
    y = masks()
    assert torch.equal(y, masks())
    assert torch.equal(y, masks(key=torch.tensor(5)))
    assert not torch.equal(y, masks(key=6))
    assert not torch.equal(y, masks(stream=8))
    rows = Rows()
    layer = Dropout(0.3, 7, rows)
    with seeing(rows, batch(8, key=5)):
        first, second = layer(torch.ones(8, 50)), layer(torch.ones(8, 50))
    assert torch.equal(first, y)
    assert not torch.equal(first, second)


def test_dropout_in_evaluation_is_the_identity():
    assert (masks(key=None) == 1).all()
    assert (masks(p=0.0) == 1).all()


def test_channel_dropout_drops_whole_channels():
    y = masks(layer=Dropout(0.5, 7, Rows(), whole_channels=True), shape=(8, 20, 3, 3))
    flat = y.flatten(2)
    assert (flat == flat[..., :1]).all()
    assert 0 < (flat[..., 0] == 0).float().mean() < 1


def test_dropout_under_vmap_draws_what_each_client_draws_alone():
    rows = Rows()
    layer = Dropout(0.4, 7, rows)

    def drop(key, x):
        with seeing(rows, batch(6, key=key)):
            return layer(x)

    together = vmap(drop)(torch.tensor([3, 4, 5]), torch.ones(3, 6, 10))
    assert torch.equal(together, torch.stack([drop(k, torch.ones(6, 10)) for k in (3, 4, 5)]))


def test_gru_is_torchs():
    theirs = nn.GRU(5, 7, batch_first=True)
    ours = GRU(theirs)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    x = normal(4, 9, 5)
    for a, b in zip(ours(x), theirs(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(g(x)[0].sin().sum(), list(theirs.parameters())) for g in (ours, theirs)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_batchnorm_updates_its_statistics_in_place_under_vmap_of_grad():
    _, ours, rows = pair(nn.BatchNorm1d, 4)
    x, ok = normal(3, 6, 4), torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False] * 6])

    def loss(weight, mean, var, x, ok):
        ours._parameters["weight"], ours._buffers["running_mean"], ours._buffers["running_var"] = (
            weight,
            mean,
            var,
        )
        with seeing(rows, batch(6, key=1, ok=ok)):
            return torch.where(ok.unsqueeze(1), ours(x).sin(), 0.0).sum()

    means, variances = torch.zeros(3, 4), torch.ones(3, 4)
    vmap(grad(loss))(torch.ones(3, 4), means, variances, x, ok)
    for client in range(3):
        theirs = nn.BatchNorm1d(4)
        if ok[client].any():
            theirs(x[client][ok[client]])
        torch.testing.assert_close(means[client], theirs.running_mean)
        torch.testing.assert_close(variances[client], theirs.running_var)
