"""PmcmFL: class prototypes of a modality stand in for rows that lack it, in training and at inference.

Bao, Zhang, Miao, Gong, Hu, "Incomplete Multimodal Federated Learning via Masking and Contrasting Prototypes", TNNLS
2026 (arXiv:2312.13508). Beside the model, the server keeps a library: for each modality, the mean embedding of every
class. In training the label is known, and the prototype of the row's class takes the place of a missing embedding. At
inference the stand-in is a mean of the prototypes, weighted by the class probabilities of the modalities that are there
(`model/stand_ins.py`). A further term of the loss contrasts each embedding with the prototypes.

Le, Thwal, Qiao, Tun, Nguyen, Huh, Hong, "Cross-Modal Prototype based Multimodal Federated Learning under Severely
Missing Modality" (MFCPL), arXiv:2401.13898, keeps zeros for what is missing and contrasts each embedding with the
prototypes of all modalities. This is `variant = "mfcpl"`.

polyfed's choices: the weights at inference, cosines in the contrast, and all classes as its negatives. Prototypes of
the fused embedding, which belong to no modality, are left out. Page: docs/algorithms/pmcmfl.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State
from polyfed.algorithms.knowledge.fedproto import Learned, Shared
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.option_checks import NOT_NEGATIVE, PLACEBO, POSITIVE, NotSearched, SearchRange
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model, ModelSpec
from polyfed.model.stand_ins import is_prototype, names_of, placed, stand_ins
from polyfed.objective import Classification, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.prototypes import Prototypes, masked_mean, there


@dataclass(frozen=True)
class LibraryState(State):
    """Server state.

    Attributes:
        prototypes: modality -> global prototypes.
        library: what clients and the model use: the prototypes, or those of a placebo.
    """

    prototypes: dict[str, Prototypes] = field(default_factory=dict)
    library: dict[str, Prototypes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PmcmFL(Averaging[LibraryState]):
    """FedAvg with class prototypes in place of missing modalities.

    Attributes:
        variant: `pmcmfl`: prototypes stand in for missing modalities, and an embedding is contrasted with the
            prototypes of its own modality. `mfcpl`: missing modalities count as zero, and an embedding is contrasted
            with the prototypes of every modality that the client has.
        stand_in: which prototype stands in during training: that of the row's `label`, as in the paper, or the same
            mean by `similarity` as at inference.
        contrast: weight of the contrast; 0.01 in the released code of PmcmFL. 0 leaves it out.
        temperature: what the cosines of the contrast are divided by; 0.07 in the released code of PmcmFL.
        placebo: two controls: under `random-class`, the server deals each modality's prototypes to random classes, anew
            in every round; under `mean`, every class has the mean of all prototypes.
    """

    mixing: ClassVar[str] = "pmcmfl chooses the stand-in of a missing modality by the row's label or other modalities"
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "its prototypes are the mean embeddings of classes"

    variant: Annotated[Literal["pmcmfl", "mfcpl"], NotSearched("mfcpl is another method")] = "pmcmfl"
    stand_in: Annotated[
        Literal["label", "similarity"], SearchRange("label", "similarity", beside=("variant", "pmcmfl"))
    ] = "label"
    contrast: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.01, 0.1, 1.0)] = 0.01
    temperature: Annotated[float, POSITIVE, NotSearched("the temperature of the released code")] = 0.07
    placebo: Annotated[Literal["none", "random-class", "mean"], PLACEBO] = "none"

    needs_embeddings: ClassVar[bool] = True
    sends: ClassVar[type[Message]] = Shared
    replies: ClassVar[type[Message]] = Learned
    evaluates: ClassVar[type[Message]] = Shared

    # the model

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """Return the model with prototypes in its blocks.

        Raises:
            RecipeError: the model is a whole module, whose fusion cannot take a stand-in.
        """
        if self.variant == "mfcpl":
            return spec, modalities
        if spec.module is not None:
            raise RecipeError(
                "pmcmfl replaces embeddings before the fusion, and [model] module has a fusion of its own. Give "
                '[model.encoders] and a fusion, or set [algorithm] variant = "mfcpl"',
                ("model", "module"),
            )
        return replace(spec, absent="prototypes"), modalities

    @override
    def received_template(self, task: str, model: Model) -> Tree:
        return without_prototypes(super().received_template(task, model))

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        if self.variant == "mfcpl":
            result["stand_in"] = "variant = 'mfcpl'"
        else:
            result["model.absent"] = "algorithm 'pmcmfl', which always fills in prototypes"
        return result if self.contrast else result | {"temperature": "contrast = 0"}

    # the server

    @override
    def init(self, fed: Federation, params: Tree) -> LibraryState:
        library = library_of(params, fed.context.model)
        state = LibraryState(**vars(super().init(fed, without_prototypes(params))))
        return state.with_(prototypes=library, library=library)

    @override
    def outgoing(self, state: LibraryState, cohort: list[int], fed: Federation) -> Shared:
        return shared(state)

    @override
    def merge(self, state: LibraryState, replies: Replies, fed: Federation) -> LibraryState:
        new = prototypes.gathered(
            state.prototypes,
            [(reply.prototypes, reply.rows_per_class) for reply in replies.values()],
            [*fed.clients.rows_of(replies).values()],
            robust=self.server.aggregate != "mean",
        )
        library = new
        if self.placebo != "none":
            library = {m: dealt(p, m, fed) if self.placebo == "random-class" else levelled(p) for m, p in new.items()}
        return super().merge(state, replies, fed).with_(prototypes=new, library=library)  # type: ignore[no-any-return]

    # the clients

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Shared, local: Tree) -> Tensor:
        model, near = context.model, {m: Prototypes.received(mean) for m, mean in got.prototypes.items()}
        features = model.features(w, batch)
        filled, whole = self._filled(model, features, batch, near)
        total = context.loss(w, whole, filled)
        if not near or not self.contrast:
            return total
        z = {m: model.vector(value) for m, value in features.items()}
        return total + self.contrast * self._contrast(near, z, batch)

    def _filled(
        self, model: Model, features: Mapping[str, Tensor], batch: Batch, near: Mapping[str, Prototypes]
    ) -> tuple[Mapping[str, Tensor], Batch]:
        """Return the embeddings with stand-ins for what rows lack, and the batch in which these rows have it."""
        wanted = [m for m in features if m in batch.present and m in near]
        if self.variant == "mfcpl" or not wanted:
            return features, batch
        if self.stand_in == "label":
            found = {m: (near[m].mean[batch.y], near[m].active[batch.y]) for m in wanted}
        else:
            library = {m: (p.mean, p.active) for m, p in near.items()}
            vectors = {m: model.vector(value) for m, value in features.items()}
            found = stand_ins(library, vectors, batch.present, wanted)
        z, present = dict(features), dict(batch.present)
        for m, (stand_in, has) in found.items():
            z[m] = placed(z[m], present[m], stand_in, tuple(z[m].shape[1:-1]))
            present[m] = present[m] | has
        return z, replace(batch, present=present)

    def _contrast(self, near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the sum over modalities of the mean of -log p of the row's class, with p a softmax of cosines.

        Under `mfcpl`, it is the mean over the prototypes of every modality.
        """
        terms = []
        for m, value in z.items():
            targets = [near[m]] if self.variant == "pmcmfl" and m in near else []
            targets = [*near.values()] if self.variant == "mfcpl" else targets
            each = [contrast(one, value, batch, m, self.temperature) for one in targets]
            terms += [torch.stack(each).mean()] if each else []
        return torch.stack(terms).sum()

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Any, local: Tree
    ) -> tuple[Learned, Tree]:
        sizes = {m: context.model.feature_size(m) for m in context.modalities}
        vectors = partial(context.model.vectors, fit.params)
        own, rows = prototypes.class_means(data, vectors, sizes, context.num_classes)
        return Learned(fit.params, {m: p.sent for m, p in own.items()}, rows, fit.loss, data.num_rows), local

    # evaluation

    @property
    @override
    def own_models(self) -> Literal["none"]:
        return "none"

    @override
    def global_params(self, state: LibraryState) -> Tree:
        return self._completed(state.params, state.library)

    @override
    def evaluation_message(self, state: LibraryState, fed: Federation, clients: Sequence[int]) -> Shared:
        return shared(state)

    @override
    def own_params(self, got: Shared, local: Tree) -> Tree:
        return self._completed(got.params, {m: Prototypes.received(mean) for m, mean in got.prototypes.items()})

    @override
    def class_prototypes(self, params: Tree, fed: Federation) -> dict[str, Prototypes]:
        return super().class_prototypes(without_prototypes(params), fed)

    def _completed(self, params: Tree, library: Mapping[str, Prototypes]) -> Tree:
        """Return the model with the prototypes in its buffers."""
        if self.variant == "mfcpl":
            return params
        pairs = {names_of(m): (p.sent, p.active.to(p.mean.dtype)) for m, p in library.items()}
        return params | {name: value for both, own in pairs.items() for name, value in zip(both, own, strict=True)}


def without_prototypes(tree: Tree) -> Tree:
    """Return a Tree without the buffers of prototypes, which cross in a field of their own."""
    return {name: value for name, value in tree.items() if not is_prototype(name)}


def library_of(params: Tree, model: Model) -> dict[str, Prototypes]:
    """Return the prototypes in the buffers of a model, which a warm start may have filled."""
    pairs = {m: names_of(m) for m in model.modalities}
    return {m: Prototypes(params[mean], params[known] > 0) for m, (mean, known) in pairs.items() if mean in params}


def shared(state: LibraryState) -> Shared:
    """Return the message with the model and the prototypes of each modality that has any."""
    return Shared(state.params, {m: p.sent for m, p in state.library.items() if bool(p.active.any())})


def dealt(near: Prototypes, modality: str, fed: Federation) -> Prototypes:
    """Return the prototypes of a modality dealt to random classes, as a control."""
    order = keys.permutation(keys.key(fed.seed, "placebo", modality, fed.round), len(near.active)).to(near.mean.device)
    return Prototypes(near.mean[order], near.active[order])


def levelled(near: Prototypes) -> Prototypes:
    """Return the mean of a modality's prototypes for each class that has one, as a control."""
    mean = near.sent.sum(0) / near.active.sum().clamp(min=1)
    return Prototypes(mean.expand_as(near.mean), near.active)


def contrast(near: Prototypes, z_BE: Tensor, batch: Batch, modality: str, temperature: float) -> Tensor:
    """Return the mean of -log softmax_c(cos(z, prototype of c) / temperature) at the row's class, a 0-dim tensor.

    It covers the rows that have the modality and whose class has a prototype; c runs over the classes that have one.
    """
    cosines = normalize(z_BE, dim=-1) @ normalize(near.mean, dim=-1).T / temperature
    known = near.active[batch.y] & there(batch, modality)
    scores = torch.where(near.active | ~near.active.any(), cosines, -torch.inf)
    own = torch.log_softmax(scores, -1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
    return -masked_mean(torch.where(known, own, 0.0), known)
