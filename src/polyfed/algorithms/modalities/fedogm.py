"""FedOGM: local training with OGM-GE on every client, and averaging as in FedAvg.

Peng, Wei, Deng, Wang, Hu, "Balanced Multimodal Learning via On-the-fly Gradient Modulation", CVPR 2022. In every batch,
the method scales down the gradients of the convolutions of the modality that predicts better on its own. This is
on-the-fly gradient modulation (OGM). It also adds Gaussian noise with the standard deviation of these gradients. This
noise improves generalisation (generalisation enhancement, GE).

The gradients are multiplied by a coefficient. If the ratio of the modality's score to the score of the other modality
is above 1, the coefficient is 1 - tanh(alpha * ratio) as in the authors' code, not 1 - tanh(alpha * (ratio - 1)). The
coefficient therefore jumps from 1 to 1 - tanh(alpha) when the ratio rises above 1.

If there are more than two modalities, polyfed compares the score of each modality with the mean score of the others.
This is polyfed's choice.

The messages are the same as under FedAvg. Page: docs/algorithms/fedogm.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import IMAGES
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import NOT_NEGATIVE, PLACEBO, NotSearched, SearchRange
from polyfed.core.tree import Tree, block_of
from polyfed.federation.context import ClientContext
from polyfed.model import Model
from polyfed.objective import Classification, Objective
from polyfed.training import ClientData
from polyfed.training.client_data import Direction
from polyfed.training.prototypes import FLOOR, there


@dataclass(frozen=True, kw_only=True)
class FedOgm(Averaging):
    """FedAvg with gradient modulation. A client with one modality trains as under FedAvg.

    Attributes:
        alpha: strength of the modulation.
        ge: whether to add noise (generalisation enhancement).
        active_rounds: number of rounds, from the first, in which gradients are modulated, as in the CMSFed paper.
        scale_params: which gradients are modulated: those of the encoders' four-dimensional convolution weights
            (`conv4d`), or `all_weights`, for encoders without convolutions.
        placebo: `constant` is a control: in every batch all modalities' gradients are scaled by the mean of their
            coefficients, so none is favoured. `none` is the method.
    """

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"data": IMAGES}  # the encoder of images has convolutions
    mixing: ClassVar[str] = "fedogm scales the gradient of each modality by the scores of all others"
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "it compares modalities by the probability of the true class"

    alpha: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.3, 0.5, 0.8, 1.0, fedavg=0.0)] = 0.8
    ge: Annotated[bool, SearchRange(True, False, fedavg=False)] = True
    active_rounds: Annotated[int, NOT_NEGATIVE, NotSearched("the rounds of the paper")] = 71
    scale_params: Annotated[Literal["conv4d", "all_weights"], NotSearched("depends on the encoders")] = "conv4d"
    placebo: Annotated[Literal["none", "constant"], PLACEBO] = "none"

    @override
    def check_model(self, model: Model) -> None:
        """Refuse a model if one of its encoders has no parameters that this method can modulate.

        Raises:
            RecipeError: an encoder has no such parameters.
        """
        super().check_model(model)
        template = model.template
        plain = [m for m in model.modalities if not self._scaled(model, template, m)]
        if plain:
            what, fix = "weights of 2-d convolutions", "set [algorithm] scale_params = 'all_weights'"
            if self.scale_params == "all_weights":
                what, fix = "weight matrices", "let some of them train, or use fedavg"
            raise RecipeError(
                f"fedogm scales gradients of {what}, but the encoder of {', '.join(plain)} has none to train; {fix}"
            )

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        features = context.model.features(w, batch)
        logits = context.model.fuse(w, features, batch)
        if len(context.modalities) < 2:
            return context.objective.loss(logits, batch)
        mode: Literal["head", "zero"] = "head" if context.model.linear_head else "zero"
        fixed = {name: z.detach() for name, z in features.items()}
        with torch.no_grad():
            alone = {m: context.model.unimodal_logits(w, fixed, m, batch, mode) for m in features}
        return context.objective.loss(logits, batch), {
            m: modality_score(logit, batch, m).detach() for m, logit in alone.items()
        }

    @override
    def direction(
        self, context: ClientContext, data: ClientData, got: Any, local: Tree
    ) -> tuple[Direction, Tree] | None:
        if len(context.modalities) < 2 or data.round > self.active_rounds:
            return None
        targets = {m: self._scaled(context.model, got.params, m) for m in context.modalities}

        def modulate(grads: Tree, w: Tree, scores: Mapping[str, Tensor], carry: Tree) -> tuple[Tree, Tree]:
            out = dict(grads)
            scale = {m: coefficient(m, scores, self.alpha) for m in targets}
            if self.placebo == "constant":
                scale = dict.fromkeys(scale, torch.stack(list(scale.values())).mean())
            for m, names in targets.items():
                for name in names:
                    out[name] = grads[name] * scale[m]
                    if self.ge:
                        out[name] = out[name] + self._noise(data, name, grads[name], carry["step"])
            return out, {"step": carry["step"] + 1}

        return modulate, {"step": torch.zeros((), dtype=torch.int32, device=data.num_rows.device)}

    def _noise(self, data: ClientData, name: str, grad: Tensor, step: Tensor) -> Tensor:
        """Return Gaussian noise with the standard deviation of the unscaled gradient's entries."""
        key = keys.fold_in(data.draw(f"ogm-noise/{name}"), step)
        deviation = grad.std() if grad.numel() > 1 else torch.zeros_like(grad).sum()  # undefined for a single entry
        return keys.normal(key, tuple(grad.shape)) * (deviation + 1e-8)

    def _scaled(self, model: Model, params: Tree, modality: str) -> list[str]:
        head = model.head_slice(modality)
        own = {n: v for n, v in model.trainable(params).items() if block_of(n) == modality and n not in head}
        if self.scale_params == "conv4d":
            return [n for n, v in own.items() if v.dim() == 4]
        return [n for n, v in own.items() if v.dim() >= 2]


def modality_score(logits_BC: Tensor, batch: Batch, modality: str) -> Tensor:
    """Return the paper's s: a modality's probabilities of the true classes, summed over the rows of a batch."""
    own = torch.softmax(logits_BC, -1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
    return torch.where(there(batch, modality), own, 0.0).sum()


def coefficient(modality: str, scores: Mapping[str, Tensor], alpha: float) -> Tensor:
    """Return the paper's k: 1 - tanh(alpha * ratio) if the ratio is above 1, else 1.

    The ratio divides the score of the modality by the mean score of the others.
    """
    others = torch.stack([value for name, value in scores.items() if name != modality]).mean()
    ratio = scores[modality] / others.clamp(min=FLOOR)
    return torch.where(ratio > 1, 1 - torch.tanh(alpha * ratio), 1.0)
