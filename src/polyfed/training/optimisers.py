"""The optimisers of clients: the [train] section of a recipe.

A client's optimiser starts again in every local training, and its moments do not survive a round
(docs/algorithms/conventions.md). The formulas follow `torch.optim.SGD`, `Adam` and `AdamW`, and tests compare the
results with PyTorch's. Steps are in place, for a single client and for a stack of clients under `torch.func.vmap`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    BELOW_ONE,
    IN_RECIPE,
    NOT_NEGATIVE,
    POSITIVE,
    SearchRange,
    check_ranges,
    check_shares,
)
from polyfed.core.problems import Problems
from polyfed.core.tree import Tree, like

Moments = dict[str, Tree]
"""State of an optimiser: one Tree for each moment, by the moment's name; empty for plain SGD."""


WHOLE_RUN_SCHEDULES = ("linear", "cosine", "authors")
"""Learning rate schedules in which the rate of a round depends on the number of rounds of the run."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How a client trains: the [train] section of a recipe.

    Attributes:
        epochs: passes over the client's rows in one round.
        steps: optimiser steps in one round; if given, it replaces `epochs`.
        batch_size: number of rows in a batch; 0 means all of the client's rows.
        optimiser: `sgd`, `adam` or `adamw`.
        lr: learning rate in the first round.
        lr_end: learning rate at the end of the schedule.
        lr_schedule: `constant` keeps `lr`. `linear` and `cosine` reach `lr_end` in the last round. `step` is `lr` up to
            round `lr_step` and `lr_end` afterwards; `authors`, in CMSFed's released code, then is `lr - (lr - lr_end) *
            round / rounds`.
        lr_step: the last round that uses `lr` under `step` and `authors`.
        momentum: momentum of `sgd`.
        nesterov: whether `sgd` uses Nesterov momentum.
        weight_decay: the parameters times this number are added to the gradient, as in PyTorch; decoupled for `adamw`.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        eps: number added to the root of Adam's second moment.
        clip_norm: gradients with a larger 2-norm are scaled down to this norm; 0 disables clipping.
        precision: `float32`, or `bf16`: encoders and fusion compute in bfloat16 during training (autocast).
        accumulate: number of parts in which the gradient of a batch is computed, one after another, to save memory
            (docs/models.md).
        modality_dropout: probability with which a row of a training batch loses a modality, in each step anew (Neverova
            et al., ModDrop, TPAMI 2016), one number or one for each modality. Every row keeps a modality.
    """

    epochs: Annotated[int, NOT_NEGATIVE, IN_RECIPE] = 1
    steps: Annotated[int | None, NOT_NEGATIVE, IN_RECIPE] = None
    batch_size: Annotated[int, NOT_NEGATIVE, IN_RECIPE] = 32
    optimiser: Annotated[Literal["sgd", "adam", "adamw"], IN_RECIPE] = "sgd"
    lr: Annotated[float, NOT_NEGATIVE, SearchRange(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)] = 0.05
    lr_end: Annotated[float | None, NOT_NEGATIVE, IN_RECIPE] = None
    lr_schedule: Annotated[Literal["constant", "linear", "cosine", "step", "authors"], IN_RECIPE] = "constant"
    lr_step: Annotated[int, NOT_NEGATIVE, IN_RECIPE] = 80
    momentum: Annotated[float, BELOW_ONE, IN_RECIPE] = 0.0
    nesterov: Annotated[bool, IN_RECIPE] = False
    weight_decay: Annotated[float, NOT_NEGATIVE, IN_RECIPE] = 0.0
    beta1: Annotated[float, BELOW_ONE, IN_RECIPE] = 0.9
    beta2: Annotated[float, BELOW_ONE, IN_RECIPE] = 0.999
    eps: Annotated[float, POSITIVE, IN_RECIPE] = 1e-8
    clip_norm: Annotated[float, NOT_NEGATIVE, IN_RECIPE] = 0.0
    precision: Annotated[Literal["float32", "bf16"], IN_RECIPE] = "float32"
    accumulate: Annotated[int, AT_LEAST_ONE, IN_RECIPE] = 1
    modality_dropout: Mapping[str, float] | float = 0.0

    def __post_init__(self) -> None:
        """Check types and ranges, and that the options are compatible.

        Raises:
            RecipeError: an option is out of range, or needs another option that is missing.
        """
        problems = Problems()
        problems.attempt(lambda: check_ranges("[train]", self))
        problems.attempt(lambda: check_shares("[train]", "modality_dropout", self.modality_dropout, BELOW_ONE))
        problems.raise_all()
        if self.nesterov and not self.momentum:
            raise RecipeError("[train] nesterov = true needs momentum > 0", ("train", "nesterov"))
        if self.accumulate > max(self.batch_size, 1):
            why = "0 stands for all rows, and clients differ in their number" if not self.batch_size else "is smaller"
            raise RecipeError(
                f"[train] accumulate = {self.accumulate}, but batch_size = {self.batch_size} {why}: set a batch_size "
                f"of at least {self.accumulate}",
                ("train", "accumulate"),
            )
        if self.lr_schedule != "constant" and self.lr_end is None:
            raise RecipeError(f"[train] lr_schedule = '{self.lr_schedule}' needs lr_end", ("train", "lr_schedule"))

    def lr_at(self, round: int, rounds: int) -> float:
        """Return the learning rate of one round, counted from 1, in a run of `rounds` rounds."""
        if self.lr_end is None or self.lr_schedule == "constant":
            return self.lr
        done = (round - 1) / max(rounds - 1, 1)
        if self.lr_schedule == "linear":
            return self.lr + (self.lr_end - self.lr) * done
        if self.lr_schedule == "cosine":
            return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * done)) / 2
        if round <= self.lr_step:
            return self.lr
        if self.lr_schedule == "step":
            return self.lr_end
        return self.lr - (self.lr - self.lr_end) * round / rounds

    def moments(self, params: Mapping[str, Tensor]) -> Moments:
        """Return the state of the optimiser before its first step on these parameters."""
        if self.optimiser == "sgd":
            return {"momentum": like(params)} if self.momentum else {}
        return {"first": like(params), "second": like(params)}

    @property
    def idle(self) -> dict[str, str]:
        """Return every option that has no effect in this recipe, with the setting that makes it ineffective."""
        result = dict.fromkeys(("beta1", "beta2", "eps"), "optimiser = 'sgd'")
        if self.optimiser != "sgd":
            result = dict.fromkeys(("momentum", "nesterov"), f"optimiser = '{self.optimiser}'")
        if self.steps is not None:
            result["epochs"] = f"steps = {self.steps}"
        if self.lr_schedule == "constant":
            result["lr_end"] = "lr_schedule = 'constant'"
        if self.lr_schedule not in ("step", "authors"):
            result["lr_step"] = f"lr_schedule = '{self.lr_schedule}'"
        return result

    @property
    def plain(self) -> bool:
        """Whether a step is `w -= lr * gradient`, without momentum, weight decay or moments."""
        return self.optimiser == "sgd" and not self.momentum and not self.weight_decay

    def step(self, params: Tree, grads: Tree, moments: Moments, lr: float, count: int | Tensor) -> None:
        """Take one step, in place on `params` and `moments`.

        Args:
            params: the parameters; under `vmap` they must be copies with a client axis.
            grads: gradient of each parameter that the step changes.
            moments: state of the optimiser, made by `moments`.
            lr: learning rate.
            count: number of this step, from 1; under `vmap` a 0-dim tensor.
        """
        if not grads:  # all parameters to be trained are frozen
            return
        if self.clip_norm:
            grads = _clipped(grads, self.clip_norm)
        if self.plain and isinstance(count, int):  # vmap cannot batch _foreach_add_
            torch._foreach_add_([params[name] for name in grads], list(grads.values()), alpha=-lr)
            return
        for name, grad in grads.items():
            weight = params[name]
            if self.weight_decay and self.optimiser == "adamw":
                weight.mul_(1 - lr * self.weight_decay)
            elif self.weight_decay:
                grad = grad + self.weight_decay * weight
            if self.optimiser == "sgd":
                self._sgd(weight, grad, moments, name, lr)
            else:
                self._adam(weight, grad, moments, name, lr, count)

    def _sgd(self, weight: Tensor, grad: Tensor, moments: Moments, name: str, lr: float) -> None:
        if self.momentum:
            velocity = moments["momentum"][name]
            velocity.mul_(self.momentum).add_(grad)
            grad = grad + self.momentum * velocity if self.nesterov else velocity
        weight.add_(grad, alpha=-lr)

    def _adam(self, weight: Tensor, grad: Tensor, moments: Moments, name: str, lr: float, count: int | Tensor) -> None:
        first, second = moments["first"][name], moments["second"][name]
        first.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        second.mul_(self.beta2).add_(grad * grad, alpha=1 - self.beta2)
        unbiased_first = first / _bias(self.beta1, count)
        unbiased_second = second / _bias(self.beta2, count)
        weight.add_(unbiased_first / (unbiased_second.sqrt() + self.eps), alpha=-lr)


def _bias(beta: float, count: int | Tensor) -> float | Tensor:
    """Return 1 - beta ** count in double precision, because 1 - 0.999 loses four digits in single precision."""
    if isinstance(count, int):
        return 1 - beta**count
    return (1 - beta ** count.to(torch.float64)).to(torch.float32)


def _clipped(grads: Tree, limit: float) -> Tree:
    """Return the gradients, scaled down together if their 2-norm exceeds the limit."""
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    return {name: grad * scale for name, grad in grads.items()}
