"""The options of PartialFL, and which modalities a policy lets it share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.schema import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from polyfed.core.tree import SHARED
from polyfed.model import ModelSpec
from polyfed.privacy.policy import Policy
from polyfed.training.losses import Negatives


@dataclass(frozen=True, kw_only=True)
class PartialOptions(Averaging):
    """The options of PartialFL. The mean over clients is uniform by default, as in the paper's Algorithm 1.

    Attributes:
        beta: weight of the contrastive terms on the devices; the paper tunes it in {0.001, 0.01}.
        beta_local: weight of the contrastive term of the local model; by default that of `beta`, as in the paper.
        temperature: tau of the contrastive terms; {0.05, 0.1, 0.2} in the paper.
        negatives: negatives of the contrastive terms: `intra` as in Eq. 1 and 2, `inter`, or `both`.
        same_class_negatives: whether rows of a row's own class are among its negatives on the devices, as in Eq. 1. The
            server knows no labels, so its negatives are always all other rows.
        normalise: scale embeddings to length 1 before they are compared.
        mu: strength of FedProx's proximal term on the global model; 0 is FedAvg, the paper takes 0.01.
        global_model: what the federated model reads: `private` modalities only, or `all`.
        inputs: what the data holds of a shareable modality, and so the kind of the deposit: `embeddings`, or `raw`
            samples, which the policy must then allow as well.
        local_start: each device draws its own initial local model, as in the paper (`own`), or all start from the same
            one (`common`), so that the embeddings of different devices have the same axes from the start.
        local_hidden: hidden sizes of the local model's encoders.
        server_hidden: hidden sizes of the tower's encoders.
        server_epochs: passes of the server over a device's rows in a round; the paper states no number.
        keep_server_optimiser: whether the moments of the tower's optimiser live from device to device and from round to
            round; the paper does not say.
        keep_local_optimiser: whether those of a local model's optimiser live from round to round; the paper does not
            say.
        placebo: a control that keeps the cost and removes what the teacher knows: `noise` sends random embeddings,
            anew in every round, `shuffled` those of other rows of the same device, and `frozen` those of a tower that
            stays as it was drawn. `none` is the method.
        probe: whether devices measure the teacher's quality: on every second row, how often the nearest class mean of
            z_T over the other rows is that of the row's class. The log then has `teacher_accuracy`.
    """

    aggregation: Literal["weighted", "uniform"] = "uniform"
    beta: Annotated[float, NOT_NEGATIVE] = 0.01
    beta_local: Annotated[float | None, NOT_NEGATIVE] = None
    temperature: Annotated[float, POSITIVE] = 0.1
    negatives: Negatives = "intra"
    same_class_negatives: bool = True
    normalise: bool = True
    mu: Annotated[float, NOT_NEGATIVE] = 0.0
    global_model: Literal["private", "all"] = "private"
    inputs: Literal["embeddings", "raw"] = "embeddings"
    local_start: Literal["own", "common"] = "own"
    local_hidden: tuple[int, ...] = (256,)
    server_hidden: tuple[int, ...] = (1024, 1024, 512)
    server_epochs: Annotated[int, AT_LEAST_ONE] = 1
    keep_server_optimiser: bool = True
    keep_local_optimiser: bool = False
    placebo: Literal["none", "noise", "shuffled", "frozen"] = "none"
    probe: bool = False

    def shareable(self, policy: Policy, modalities: Iterable[str]) -> tuple[str, ...]:
        """The modalities that a policy lets go to the server in every kind that the method needs."""
        needed = {"embeddings", self.inputs}
        return tuple(m for m in modalities if needed <= policy.kinds(m, "server"))

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The model as it is, for the private modalities, or for all.

        Raises:
            RecipeError: no modality may be shared, or none is private.
        """
        shared = self.shareable(policy, modalities)
        if not shared:
            kinds = " and ".join(sorted({"embeddings", self.inputs}))
            raise RecipeError(
                f"partialfl shares nothing: no modality may send {kinds} to the server. Say which one may, as in "
                f"{policy.fix(('embeddings',), modalities[-1], 'server')}"
            )
        private = tuple(m for m in modalities if m not in shared)
        if self.global_model == "private" and not private:
            raise RecipeError(
                f"partialfl has nothing private to train: the policy shares {', '.join(shared)}. "
                "Set [algorithm] global_model = 'all', or share less"
            )
        return spec, modalities if self.global_model == "all" else private

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Rows and embeddings of shareable modalities only; parameters of those that the global model reads."""
        if task == "update":  # the task of `Averaging`, which is not asked
            return False
        shared = bool(self.shareable(policy, [block]))
        if field in ("vectors", "samples"):
            return shared and (field == "vectors") == (self.inputs == "embeddings")
        if field == "there":
            return block == SHARED
        if field == "probe":
            return self.probe and block == SHARED
        if field == "student":
            return shared
        return field != "params" or self.global_model == "all" or not shared
