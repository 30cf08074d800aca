"""The options of PartialFL, and the modalities that a policy allows it to share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.second_model import embedding_size, second_model, shapes_of
from polyfed.core.errors import RecipeError
from polyfed.core.schema import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from polyfed.core.tree import SHARED
from polyfed.model import Model, ModelSpec
from polyfed.model.encoders.catalogue import encoder_spec
from polyfed.privacy.egress.policy import Policy
from polyfed.training.losses import Negatives


@dataclass(frozen=True, kw_only=True)
class PartialOptions(Averaging):
    """The options of PartialFL. The mean over clients is uniform by default, as in the paper's Algorithm 1.

    Attributes:
        beta: weight of the contrastive terms on the devices; the paper searches {0.001, 0.01}.
        beta_local: weight of the contrastive term of the local model; by default equal to `beta`, as in the paper.
        temperature: tau of the contrastive terms; {0.05, 0.1, 0.2} in the paper.
        negatives: negatives of the contrastive terms: `intra` as in Eq. 1 and 2, `inter`, or `both`.
        same_class_negatives: whether the negatives of a row on a device include rows of the same class, as in Eq. 1.
            The server has no labels, so its negatives are always all other rows.
        normalise: whether embeddings are scaled to length 1 before they are compared.
        mu: strength of FedProx's proximal term on the global model; 0 is FedAvg, and the paper uses 0.01.
        global_model: the modalities that the federated model reads: only the `private` ones, or `all`.
        inputs: what the data holds for a shareable modality: `embeddings`, or `raw` samples. The clients send these
            rows to the server, which keeps them. With `raw`, the policy must allow `raw` as well as `embeddings`.
        local_start: how local models start. With `own`, each device draws its own initial model, as in the paper. With
            `common`, all start from the same model, so the embeddings of all devices have the same axes from the start.
        local_hidden: hidden sizes of the local model's encoders, which are MLPs unless `local_encoders` names others.
        local_encoders: encoders of the local models by modality, written like the entries of [model.encoders]. For
            images and series, name an encoder that reads them.
        server_hidden: hidden sizes of the encoders in the tower (the server model), which are MLPs as well.
        server_encoders: encoders of the tower by modality, written like `local_encoders`.
        server_epochs: passes of the server over a device's rows in a round; the paper states no number.
        keep_server_optimiser: whether the tower's optimiser keeps its moments from device to device and from round to
            round; the paper does not say.
        keep_local_optimiser: whether a local model's optimiser keeps its moments from round to round; the paper does
            not say.
        placebo: a control that has the same cost but removes the teacher's knowledge. `noise` sends new random
            embeddings in every round, `shuffled` sends embeddings of other rows of the same device, and `frozen` sends
            embeddings of an untrained tower. `none` is the method.
        probe: whether devices measure the teacher's quality. A device computes class means of z_T from half of its
            rows, and counts how many of its other rows are nearest to the mean of their own class. The log then has
            `teacher_accuracy`.
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
    local_encoders: Mapping[str, Any] = field(default_factory=dict)
    server_hidden: tuple[int, ...] = (1024, 1024, 512)
    server_encoders: Mapping[str, Any] = field(default_factory=dict)
    server_epochs: Annotated[int, AT_LEAST_ONE] = 1
    keep_server_optimiser: bool = True
    keep_local_optimiser: bool = False
    placebo: Literal["none", "noise", "shuffled", "frozen"] = "none"
    probe: bool = False

    def __post_init__(self) -> None:
        """Refuse options that are out of range, and entries of encoders that cannot be read."""
        super().__post_init__()
        for option in ("local_encoders", "server_encoders"):
            for name, entry in getattr(self, option).items():
                encoder_spec(f"[algorithm.{option}] {name}", entry)

    def check_encoders(self, shared: tuple[str, ...]) -> None:
        """Refuse encoders for a modality that is not shareable, because no local model or tower reads it.

        Raises:
            RecipeError: an option names an encoder for a modality that is not shareable. The message lists the
                shareable modalities.
        """
        for option in ("local_encoders", "server_encoders"):
            if strange := [name for name in getattr(self, option) if name not in shared]:
                raise RecipeError(
                    f"[algorithm] {option} names '{strange[0]}', which the policy does not share; the local models and "
                    f"the tower read only {', '.join(shared)}"
                )

    def tower(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_s, which maps shared vectors to embeddings z_T."""
        shapes, d = shapes_of(model, shared), embedding_size(model)
        return second_model(shapes, self.server_hidden, d, model.num_outputs, self.server_encoders)

    def local_model(self, model: Model, shared: tuple[str, ...]) -> Model:
        """F_k, which maps shared vectors to embeddings z'_T and logits."""
        shapes, d = shapes_of(model, shared), embedding_size(model)
        return second_model(shapes, self.local_hidden, d, model.num_outputs, self.local_encoders)

    def shareable(self, policy: Policy, modalities: Iterable[str]) -> tuple[str, ...]:
        """Return the modalities that clients can share with the server.

        For each of them, the policy allows clients to send the server every kind of data that the method needs.
        """
        needed = {"embeddings", self.inputs}
        return tuple(m for m in modalities if needed <= policy.kinds(m, "server"))

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """Return the recipe's model and the modalities that it reads.

        It reads all modalities if `global_model` is `all`, and otherwise only the private modalities.

        Raises:
            RecipeError: the policy does not allow any modality to be shared, or it shares all modalities although
                `global_model` is `private`.
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
        """Allow rows and embeddings of shareable modalities, and parameters of the global model's modalities."""
        if task == "update":  # a task of `Averaging` that this method never asks for
            return False
        shared = block != SHARED and bool(self.shareable(policy, [block]))
        if field in ("vectors", "samples"):
            return shared and (field == "vectors") == (self.inputs == "embeddings")
        if field == "there":
            return block == SHARED
        if field == "probe":
            return self.probe and block == SHARED
        if field == "student":
            return shared
        return field != "params" or self.global_model == "all" or not shared
