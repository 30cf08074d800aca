"""A cut model as plain PyTorch: two halves, two optimisers, and a detached tensor between them."""

import torch
from torch import Tensor, nn


class Lower(nn.Module):
    """One encoder per modality."""

    def __init__(self, sizes: dict[str, tuple[int, int]], embedding: int) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {m: nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, embedding)) for m, (i, h) in sizes.items()}
        )

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([tower(x[m]) for m, tower in self.towers.items()], 1)


def step(
    lower: Lower, upper: nn.Module, x: dict[str, Tensor], y: Tensor, optimisers: list[torch.optim.Optimizer]
) -> Tensor:
    """One training step on a batch; returns the gradient at the cut."""
    below = lower(x)
    cut = below.detach().requires_grad_()
    for optimiser in optimisers:
        optimiser.zero_grad()
    nn.functional.cross_entropy(upper(cut), y).backward()  # type: ignore[no-untyped-call]
    assert cut.grad is not None
    below.backward(cut.grad)
    for optimiser in optimisers:
        optimiser.step()
    return cut.grad.clone()
