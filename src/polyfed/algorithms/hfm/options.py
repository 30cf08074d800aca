"""The options of HFM and VFL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.schema import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE

Overlap = Literal["exact", "common", "all"]
"""Which samples of a silo take part in training; see `VerticalOptions`."""


@dataclass(frozen=True, kw_only=True)
class VerticalOptions(Algorithm):
    """The options of HFM and VFL.

    Attributes:
        local_rounds: Q, local rounds between two exchanges; 5 in the report.
        exchanges: R, exchanges in a round; 2 in the report.
        local_unit: the unit of a local round. `epoch`: one pass over B_m in mini-batches of `inner_batch`. `step`: one
            gradient step on the whole of B_m, which is Eq. 1 to the letter.
        head_update: how the head is trained. `device_average`: devices train copies of the head, and the edge computes
            their mean. `server` (C-VFL): while a device trains its encoders, the head is frozen. The head is trained
            separately, for Q local rounds on the stale embeddings. The edge has no labels, so the silo's first device
            with labels trains the head.
        batch_fraction: |B_m| = max(1, round(batch_fraction * N_m)); a tenth in the report.
        resample: draw a new B_m at every exchange; otherwise use one B_m for the whole run.
        eval_embeddings: compute the exchanged embeddings in evaluation mode (BatchNorm, dropout).
        inner_batch: rows of a step if `local_unit` is `epoch`; replaces [train] batch_size.
        mu: strength of the proximal term (Eq. 4) towards the received blocks; 0 disables the term.
        keep_optimiser: whether a device keeps its optimiser's moments from one exchange to the next. Otherwise every
            exchange starts a fresh optimiser. The report on HFM does not say which of the two its authors use. This
            option needs `head_update = "device_average"`.
        overlap: which samples of a silo take part. `exact` refuses devices that do not hold the same samples in the
            same order. `common` uses the samples that every modality of the silo has. `all` uses every sample, and
            replaces an embedding that no device has by zeros. Under `common` and `all`, several devices may hold one
            modality; the edge takes the mean of their embeddings of a sample.
        labels_at: the modality whose devices hold the labels. In each exchange, these devices compute the gradients of
            the loss with respect to the embeddings of the other devices. The other devices use these gradients instead
            of labels in all local rounds until the next exchange (FedBCD, Liu et al., IEEE Transactions on Signal
            Processing 70, 2022). If this option is empty, all devices hold the labels, as in the report on HFM.
        placebo: whether to run a control experiment, which costs as much as the method, instead of the method itself.
            `none` runs the method. `shuffled` runs the control: the embeddings that each device receives from other
            devices come from other rows of the mini-batch, so they are unrelated to its own samples.
    """

    local_rounds: Annotated[int, AT_LEAST_ONE] = 5
    exchanges: Annotated[int, AT_LEAST_ONE] = 2
    local_unit: Literal["epoch", "step"] = "epoch"
    head_update: Literal["device_average", "server"] = "device_average"
    batch_fraction: Annotated[float, FRACTION] = 0.1
    resample: bool = True
    eval_embeddings: bool = True
    inner_batch: Annotated[int, AT_LEAST_ONE] = 64
    mu: Annotated[float, NOT_NEGATIVE] = 0.0
    keep_optimiser: bool = False
    overlap: Overlap = "exact"
    labels_at: str = ""
    placebo: Literal["none", "shuffled"] = "none"

    renamed: ClassVar[Mapping[str, str]] = {"q": "local_rounds", "r": "exchanges"}

    def __post_init__(self) -> None:
        """Refuse options that are out of range, options that contradict each other, and [train] epochs and steps.

        Raises:
            RecipeError: an option is out of range, two options contradict each other, or [train] sets epochs or steps.
                The message says what to set instead.
        """
        super().__post_init__()
        if self.evaluation.clients is not None:
            raise RecipeError(
                f"[evaluate] clients = {self.evaluation.clients}: this method evaluates whole silos. Remove the option",
                ("evaluate", "clients"),
            )
        if self.train.epochs != 1 or self.train.steps is not None:
            raise RecipeError("[train] epochs and steps have no effect here: set [algorithm] local_rounds instead")
        if self.keep_optimiser and self.head_update == "server":
            raise RecipeError(
                "keep_optimiser needs devices that train the head as well: set [algorithm] head_update = "
                "'device_average', or keep_optimiser = false"
            )
        if self.keep_optimiser and self.labels_at:
            raise RecipeError(
                "keep_optimiser needs devices that train the head as well, and with labels_at only the devices with "
                "labels do: remove one of the two options"
            )
