"""Fusions, which compute logits from the embeddings of the modalities that a client has.

In some fusions, each modality has its own part of the first layer. `Fusion.part` makes this part, and the parameters
of the part belong to the block of the modality. All other parameters of a fusion form the block `shared` of the model.
A fusion leaves out modalities that are not in `z`. If a row lacks a modality (`present`), the fusion treats the row's
embedding as zero, unless the fusion completes missing modalities (`cross-modal`, `controlled`).

Shape letters: `B` rows, `E` width of the embedding, `T` time steps, `C` classes, `J` width of the joint representation,
`M` modalities of the model, `P` controls.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

Parts = Mapping[str, nn.Module | None]
"""For each modality, its part of the fusion, or None if the fusion has no such parts."""

Features = Mapping[str, Tensor]
"""A tensor for each modality: embeddings (B, E) or (B, T, E). For `present`, the tensor is bool (B,), True if the row
has the modality."""


class Fusion(nn.Module):
    """Base class of all fusions.

    Args:
        embedding: E.
        head: sizes of the hidden layers before the logits.
        classes: C.
        dropout: dropout probability after each hidden layer of the head.

    Attributes:
        linear: whether the logits are linear in the embeddings, so that they are a sum of one term per modality.
        sequential: whether the encoders must return sequences (B, T, E).
        joint_size: J, the width of the joint representation that the head receives. 0 if the joint representation
            equals the logits.
        head: layers from the joint representation to the logits. Empty if the joint representation equals the logits.
        num_controls: P, the number of embedding controls.
    """

    head: nn.Sequential
    linear = False
    sequential = False
    num_controls: int = 0

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.sizes = embedding, (*head, classes)
        self.joint_size = embedding

    @staticmethod
    def part(embedding: int, width: int) -> nn.Module | None:
        """Make one modality's own part of the first fusion layer.

        Args:
            embedding: E, the input size of the part.
            width: the output size of the first fusion layer.

        Returns:
            The part, or None if all parameters of the fusion are shared by all modalities.
        """
        raise NotImplementedError

    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """Return the joint representation (B, J) of all modalities.

        Args:
            parts: the modalities' parts of the fusion.
            z: the embeddings, in the model's order of modalities.
            present: modality -> whether each row has it. If every row has a modality, this modality is not listed.
        """
        raise NotImplementedError

    def views(self, parts: Parts, z: Features, present: Features) -> dict[str, Tensor]:
        """Return what the fusion computes from the embeddings, by name: at least `joint`, the result of `joint`."""
        return {"joint": self.joint(parts, z, present)}

    def forward(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """Return logits (B, C): the head applied to the joint representation."""
        return self.head(self.joint(parts, z, present))  # type: ignore[no-any-return]

    def term(self, part: nn.Module | None, z: Tensor, share: float) -> Tensor:
        """Return what one modality adds to the logits, (B, C), plus the bias times `share`.

        Only fusions whose logits are linear in the embeddings have such a term for each modality.
        """
        raise NotImplementedError


class Concat(Fusion):
    """A linear layer on the concatenated embeddings, stored as one linear map per modality and a shared bias.

    If the model has no hidden layers in its head, this layer returns the logits. Otherwise, a ReLU and the remaining
    layers of the head follow. The embedding of an absent modality is zero, so the map of this modality adds nothing.
    The whole bias is still added, whatever modalities are absent (section "Blocks" of
    docs/algorithms/conventions.md).
    """

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.linear, self.joint_size = not head, head[0] if head else 0
        self.bias = nn.Linear(embedding, self.sizes[0]).bias
        rest = [*_relu(dropout), *mlp(self.sizes, dropout)] if head else []
        self.head = nn.Sequential(*rest)

    @staticmethod
    @override
    def part(embedding: int, width: int) -> nn.Module:
        return nn.Linear(embedding, width, bias=False)

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The output of the first layer, (B, J); see `Fusion.joint`."""
        total: Tensor = self.bias
        for name, value in masked(z, present).items():
            part = parts[name]
            assert part is not None
            total = torch.addmm(total, value, part.weight.t())  # type: ignore[operator]
        return total

    @override
    def term(self, part: nn.Module | None, z: Tensor, share: float) -> Tensor:
        """Return W_m z + share * b, (B, C).

        W_m is the linear map of the modality, b is the shared bias, and `share` is the part of b that this term gets.
        """
        assert part is not None
        return nn.functional.linear(z, part.weight, self.bias * share)  # type: ignore[arg-type]


class Adapter(nn.Module):
    """A modality's part of the fusion `adapted`: projections down and up, and the map to the first fusion layer.

    The adapter is a quarter as wide as the embedding. `up` starts at zero, so the adapter changes nothing at first.
    """

    def __init__(self, embedding: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(embedding, adapter_width(embedding))
        self.up = nn.Linear(adapter_width(embedding), embedding)
        self.top = nn.Linear(embedding, width, bias=False)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)


class Adapted(Concat):
    """pFedMMA: an adapter behind each encoder, whose middle projection all modalities share; then `concat`.

    Source: Ghiasvand, Alizadeh, Pedarsani, "pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter for
    Vision-Language Models", ICLR 2026; docs/algorithms/pfedmma.md has the equations.
    """

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.linear = False
        self.between = nn.Linear(adapter_width(embedding), adapter_width(embedding))

    @staticmethod
    @override
    def part(embedding: int, width: int) -> nn.Module:
        return Adapter(embedding, width)

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The output of the first layer, (B, J); see `Fusion.joint`."""
        total: Tensor = self.bias
        adapted: dict[str, Tensor] = {}
        for name, value in masked(z, present).items():
            part = parts[name]
            assert isinstance(part, Adapter)
            middle = torch.relu(self.between(torch.relu(part.down(value))))
            adapted[name] = value + part.up(middle)
        for name, value in masked(adapted, present).items():
            total = torch.addmm(total, value, parts[name].top.weight.t())  # type: ignore[union-attr, operator]
        return total


class Sum(Fusion):
    """The sum of the embeddings, followed by the head. All modalities share all parameters of this fusion."""

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.linear = not head
        self.head = nn.Sequential(*mlp((embedding, *self.sizes), dropout))

    @staticmethod
    @override
    def part(embedding: int, width: int) -> None:
        """Return None, because all modalities share all parameters of this fusion."""

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The sum of the embeddings, (B, E); see `Fusion.joint`."""
        return _added(masked(z, present))

    @override
    def term(self, part: nn.Module | None, z: Tensor, share: float) -> Tensor:
        """Return W z + share * b, (B, C).

        W and b are the weight and the bias of the head's only layer. `share` is the part of b that this term gets.
        """
        last = self.head[0]
        assert isinstance(last, nn.Linear)
        return nn.functional.linear(z, last.weight, last.bias * share)


class Gated(Fusion):
    """Gated fusion: head(sigmoid(W1 z1) * W2 z2).

    Source: Kiela et al., "Efficient Large-Scale Multi-Modal Classification", AAAI 2018; the papers of PMR and OGM-GE
    compare with this fusion. The first modality of the model is the gate. With more than two modalities, the first
    modality gates the sum of the others. If a row has only the first modality, or lacks it, the gate
    is not used. The head then receives the sum of W z over the modalities that the row has.
    """

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float, gate: str) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.head = nn.Sequential(*mlp((embedding, *self.sizes), dropout))
        self.gate = gate

    @staticmethod
    @override
    def part(embedding: int, width: int) -> nn.Module:
        return nn.Linear(embedding, embedding)

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The gated sum, (B, E); see `Fusion.joint`."""
        mapped: dict[str, Tensor] = {}
        for name, value in z.items():
            part = parts[name]
            assert part is not None
            mapped[name] = part(value)
        mapped = masked(mapped, present)
        gate = mapped.pop(self.gate, None)
        if gate is None or not mapped:
            return _added(mapped) if gate is None else gate
        value, opened = _added(mapped), torch.sigmoid(gate)
        fused = opened * value
        if self.gate in present:
            fused = torch.where(present[self.gate].unsqueeze(-1), fused, value)
        if all(name in present for name in mapped):
            some = torch.stack([present[name] for name in mapped]).any(0)
            fused = torch.where(some.unsqueeze(-1), fused, gate)
        return fused


class Attention(Fusion):
    """Attention over the time steps of all modalities.

    Source: `fuse_base` in the code of Feng et al., "FedMultimodal: A Benchmark For Multimodal Federated Learning", KDD
    2023. The sequences of all modalities are concatenated in time. A two-layer network with tanh gives each step a
    score for each attention head. A softmax over time turns the scores into weights. Each attention head computes the
    weighted sum of the steps, and the joint representation concatenates the sums of all heads. Steps of absent
    modalities get the score -1e5, which the softmax turns into exactly zero.

    Args:
        hidden: width of the scoring network.
        heads: number of weighted sums.
    """

    sequential = True

    def __init__(
        self, embedding: int, head: tuple[int, ...], classes: int, dropout: float, hidden: int, heads: int
    ) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.joint_size = heads * embedding
        self.score = nn.Sequential(nn.Linear(embedding, hidden), nn.Tanh(), nn.Linear(hidden, heads))
        self.head = nn.Sequential(*mlp((heads * embedding, *self.sizes), dropout))

    @staticmethod
    @override
    def part(embedding: int, width: int) -> None:
        """Return None, because all modalities share all parameters: the same network scores all steps."""

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The weighted sums of the steps, (B, J), from sequences (B, T, E); see `Fusion.joint`."""
        steps = torch.cat(list(masked(z, present).values()), 1)
        scores = self.score(steps)
        if present:
            scores = torch.where(_steps_there(z, present).unsqueeze(-1), scores, scores.new_full((), -1e5))
        weights = torch.softmax(scores, 1)
        return (weights.transpose(1, 2) @ steps).flatten(1)


class WholeRow(Fusion):
    """A fusion that completes every row: also a missing modality has a part of the joint representation.

    Args:
        modalities: the modalities of the model.
    """

    def __init__(
        self, embedding: int, head: tuple[int, ...], classes: int, dropout: float, modalities: tuple[str, ...]
    ) -> None:
        super().__init__(embedding, head, classes, dropout)
        self.modalities, self.joint_size = modalities, len(modalities) * embedding

    @staticmethod
    @override
    def part(embedding: int, width: int) -> None:
        """Return None, because all modalities share all parameters of this fusion."""

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """The gated embeddings of all modalities, one after the other, (B, M * E); see `Fusion.joint`."""
        return self.views(parts, z, present)["joint"]


class CrossModal(WholeRow):
    """FedMAC: a learned embedding stands in for a missing modality, and each modality looks at the others.

    Source: Nguyen et al., "FedMAC: Tackling Partial-Modality Missing in Federated Learning with Cross-Modal Aggregation
    and Contrastive Regularization", NCA 2024; docs/algorithms/fedmac.md has the equations and what is inferred. All
    parameters are shared, so a client has the stand-in of a modality that it lacks.
    """

    def __init__(
        self, embedding: int, head: tuple[int, ...], classes: int, dropout: float, modalities: tuple[str, ...]
    ) -> None:
        super().__init__(embedding, head, classes, dropout, modalities)
        self.missing = nn.Parameter(torch.zeros(len(modalities), embedding))
        self.gate = nn.Linear(2 * embedding, embedding)
        self.head = nn.Sequential(*mlp((self.joint_size, *self.sizes), dropout))

    @override
    def views(self, parts: Parts, z: Features, present: Features) -> dict[str, Tensor]:
        """Return the joint representation and what it is made of; see `Fusion.views`.

        Returns:
            `joint` (B, M * E); `completed` (B, M, E), the embeddings with stand-ins; `others` (B, M, E), what the other
            modalities of the row say about each; `there` (B, M), which modalities the row has.
        """
        seen, there = _stacked(self.modalities, z, present)
        completed = torch.where(there.unsqueeze(-1), seen, self.missing)
        others = _looked_up(completed, there)
        joint = _gated(self.gate, completed, others).flatten(1)
        return {"joint": joint, "completed": completed, "others": others, "there": there}


class Controlled(WholeRow):
    """PEPSY: every modality of a row is reconfigured by the embedding controls that are most relevant to it.

    Source: Nguyen et al., "Learning Reconfigurable Representations for Multimodal Federated Learning with Missing
    Data", NeurIPS 2025; docs/algorithms/pepsy.md has the equations and what is inferred. All parameters are shared.

    Args:
        controls: P, the number of controls.
        chosen: how many of them reconfigure a modality of a row.
    """

    def __init__(
        self,
        embedding: int,
        head: tuple[int, ...],
        classes: int,
        dropout: float,
        modalities: tuple[str, ...],
        controls: int,
        chosen: int,
    ) -> None:
        super().__init__(embedding, head, classes, dropout, modalities)
        self.num_controls, self.chosen = controls, chosen
        self.identity = nn.Parameter(torch.randn(len(modalities), embedding) / math.sqrt(embedding))
        self.controls = nn.Parameter(torch.randn(controls, embedding) / math.sqrt(embedding))
        self.query, self.key = nn.Linear(2 * embedding, embedding), nn.Linear(embedding, embedding)
        self.reconfigure = nn.Linear(3 * embedding, embedding)
        self.gate = nn.Linear(2 * embedding, embedding)
        self.head = nn.Sequential(*mlp((self.joint_size, *self.sizes), dropout))

    @override
    def views(self, parts: Parts, z: Features, present: Features) -> dict[str, Tensor]:
        """Return the joint representation and what it is made of; see `Fusion.views`.

        Returns:
            `joint` (B, M * E); `reconfigured` (B, M, E); `relevance` (B, M), the mean relevance of the chosen controls;
            `there` (B, M), which modalities the row has.
        """
        seen, there = _stacked(self.modalities, z, present)
        own = there.unsqueeze(-1)
        known = seen.sum(1, keepdim=True) / there.sum(1).clamp(min=1).view(-1, 1, 1)  # zeros where a row lacks one
        content = torch.where(own, seen, known)
        identity = self.identity.expand_as(content)
        query = nn.functional.normalize(self.query(torch.cat([identity, content], -1)), dim=-1)
        relevance = query @ nn.functional.normalize(self.key(self.controls), dim=-1).mT
        # a comparison and not the places of the largest, so that equal controls count alike on every engine
        least = relevance.detach().topk(self.chosen, -1).values[..., -1:]
        share = (relevance.detach() >= least).to(relevance.dtype)
        share = share / share.sum(-1, keepdim=True)
        full = self.reconfigure(torch.cat([identity, content, share @ self.controls], -1))
        joint = _gated(self.gate, full, _looked_up(full, torch.ones_like(there))).flatten(1)
        return {"joint": joint, "reconfigured": full, "relevance": (share * relevance).sum(-1), "there": there}


FUSIONS: dict[str, type[Fusion]] = {
    "concat": Concat,
    "adapted": Adapted,
    "sum": Sum,
    "gated": Gated,
    "attention": Attention,
    "cross-modal": CrossModal,
    "controlled": Controlled,
}
"""The fusions that a recipe can name."""


def adapter_width(embedding: int) -> int:
    """Return the width of the adapters of the fusion `adapted`."""
    return max(1, embedding // 4)


def mlp(widths: tuple[int, ...], dropout: float) -> list[nn.Module]:
    """Linear layers of these widths, with ReLU and dropout between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [*(_relu(dropout) if layers else []), nn.Linear(before, after)]
    return layers


def masked(z: Features, present: Features) -> dict[str, Tensor]:
    """Return the embeddings with zeros in rows that lack the modality."""
    if not present:
        return dict(z)
    return {name: _zeros_unless(present[name], value) if name in present else value for name, value in z.items()}


def _zeros_unless(there: Tensor, value: Tensor) -> Tensor:
    return torch.where(there.view(-1, *(1,) * (value.dim() - 1)), value, value.new_zeros(()))


def _stacked(modalities: tuple[str, ...], z: Features, present: Features) -> tuple[Tensor, Tensor]:
    """Return the embeddings of all modalities (B, M, E), zero where a row lacks one, and which the row has (B, M)."""
    first = next(iter(z.values()))
    nothing, every = torch.zeros_like(first), torch.ones(len(first), dtype=torch.bool, device=first.device)
    seen = masked(z, present)
    there = [present.get(name, every) if name in z else ~every for name in modalities]
    return torch.stack([seen.get(name, nothing) for name in modalities], 1), torch.stack(there, 1)


def _looked_up(h: Tensor, there: Tensor) -> Tensor:
    """Return for each modality (B, M, E) the others of its row, weighted by a softmax of their scaled dot products.

    Only modalities that are `there` (B, M) are looked at. A modality with no other one looks at itself.
    """
    own = torch.eye(h.shape[1], dtype=torch.bool, device=h.device)
    seen = there.unsqueeze(1) & ~own
    scores = h @ h.mT / math.sqrt(h.shape[-1])
    weights = torch.softmax(torch.where(seen, scores, scores.new_full((), -1e5)), -1)
    return torch.where(seen.any(-1, keepdim=True), weights @ h, h)


def _gated(gate: nn.Module, own: Tensor, others: Tensor) -> Tensor:
    """Return a mixture (B, M, E) of each modality and the others, coordinate by coordinate."""
    opened = torch.sigmoid(gate(torch.cat([own, others], -1)))
    return opened * own + (1 - opened) * others


def _steps_there(z: Features, present: Features) -> Tensor:
    def of(name: str, value: Tensor) -> Tensor:
        there = present.get(name)
        if there is None:
            there = torch.ones(value.shape[0], dtype=torch.bool, device=value.device)
        return there.unsqueeze(1).expand(-1, value.shape[1])

    return torch.cat([of(name, value) for name, value in z.items()], 1)


def _added(z: Features) -> Tensor:
    first, *rest = z.values()
    for value in rest:
        first = first + value
    return first


def _relu(dropout: float) -> list[nn.Module]:
    return [nn.ReLU(), nn.Dropout(dropout)] if dropout else [nn.ReLU()]
