"""pFedMMA: adapters behind the encoders; clients keep the projections of each modality and share the one between them.

Ghiasvand, Alizadeh, Pedarsani, "pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter for
Vision-Language Models", ICLR 2026 (arXiv:2507.05394). An adapter projects an embedding down, through a projection that
all modalities share, and up again. Clients train all three, and the server averages the shared one.

The paper adapts the upper layers of a frozen CLIP. Here the adapters stand behind the encoders (`model/fusion.py`,
`adapted`), and the rest of the model, the *base*, either stands still as in the paper or is averaged too.

pFedMMA is `Averaging` with the private words `projections`: private_blocks.py. Page: docs/algorithms/pfedmma.md.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.private_blocks import PROJECTIONS, as_at_first, names_of
from polyfed.algorithms.base import UPDATES
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import PLACEBO, SearchRange
from polyfed.core.tree import SHARED, Tree
from polyfed.federation.context import ClientContext
from polyfed.model import Model, ModelSpec
from polyfed.privacy.egress.policy import Policy

FUSION = "adapted"

BETWEEN = f"{SHARED}.between."
"""The prefix of the projection that all modalities share."""


@dataclass(frozen=True, kw_only=True)
class PFedMma(Averaging):
    """Adapters whose shared projection is averaged.

    Attributes:
        private: what every client keeps: `projections`, those of the modalities, and other blocks besides.
        base: what becomes of the model without its adapters. `averaged`: clients train and send it as in FedAvg.
            `frozen`, as in the paper: it keeps the values of [model] init, and nothing of it crosses.
        placebo: `initial` is a control of the same cost: in every round the private parameters start from the initial
            ones, so a client keeps nothing that it has learnt. `none` is the method.
    """

    private: tuple[str, ...] = (PROJECTIONS,)
    base: Annotated[Literal["averaged", "frozen"], SearchRange("averaged", "frozen")] = "averaged"
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = "pfedmma passes all modalities through one shared projection"
    completes_private: ClassVar[bool] = True
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range, or a frozen base shall train.
        """
        super().__post_init__()
        if self.base == "frozen" and self.private_epochs:
            raise RecipeError(
                "[algorithm] private_epochs trains all that a client keeps, and with base = 'frozen' that is the base "
                "too. Leave it out, or set base = 'averaged'",
                ("algorithm", "private_epochs"),
            )

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """Return the model with adapters.

        Raises:
            RecipeError: the model is a whole module or names another fusion, or a frozen base would be random.
        """
        if spec.module is not None:
            raise RecipeError(
                "[model] module: pfedmma puts adapters between encoders and fusion, and a whole module has neither. "
                "Describe the model by encoders",
                ("model", "module"),
            )
        if spec.fusion not in ("concat", FUSION):
            raise RecipeError(
                f"[model] fusion = {spec.fusion!r}: pfedmma has adapters, which are the fusion '{FUSION}'. Set it, or "
                "leave fusion out",
                ("model", "fusion"),
            )
        if self.base == "frozen" and not spec.init:
            raise RecipeError(
                "[algorithm] base = 'frozen' needs a trained base. Train one with name = 'fedavg' and [model] fusion = "
                f"'{FUSION}', and name its run in [model] init; or set base = 'averaged'",
                ("algorithm", "base"),
            )
        return replace(spec, fusion=FUSION), modalities

    @override
    def private_names(self, model: Model) -> frozenset[str]:
        own = names_of(self.private, model)
        if self.base == "averaged":
            return own
        return own | {name for name in model.names(model.modalities) if not name.startswith(BETWEEN)}

    @override
    def trained_names(self, context: ClientContext) -> Collection[str] | None:
        if self.base == "averaged":
            return None
        adapters = names_of((PROJECTIONS,), context.model)
        return {n for n in context.initial if n in adapters or n.startswith(BETWEEN)}

    @override
    def kept_at_start(self, context: ClientContext, kept: Tree) -> Tree:
        return kept if self.placebo == "none" else as_at_first(context, kept)
