"""Aggregation of LoRA adapters: matrices A (r, inputs) and B (outputs, r), whose rank r may differ between clients.

`aggregate` (`aggregation.py`) uses these functions. A reply of a client with a small rank is padded with zeros to the
shapes of the server's matrices. docs/models.md describes the rules. In shapes, `K` is the number of clients, `R` the
largest rank, `I` the inputs and `O` the outputs of a layer.

Sources: Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
EMNLP 2024 (HetLoRA). Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous
Tasks and Client Resources", NeurIPS 2024 (FlexLoRA). Yang, Zhang, Nguygen, Hu, Shu, Chen, Sim, "FediLoRA: Heterogeneous
LoRA for Federated Multimodal Fine-tuning under Missing Modalities", arXiv:2509.06984, 2025 (FediLoRA).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import map_fields
from polyfed.core.tree import Tree
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.model.encoders.lora import pairs

Sent = dict[str, tuple[int, ...]]
"""Map from the names of parameters to the shape of the largest part that a client sent. It contains only parameters of
which some client has only a part."""


def padded(
    replies: Replies, name: str, weights: Mapping[int, float], centre: Mapping[str, Tensor]
) -> tuple[Replies, Sent]:
    """Pad the parameters in replies with zeros to the shapes of the server's parameters.

    Args:
        name: a field of the message that holds a tree.
        weights: the weight of each client.
        centre: the server's parameters.

    Returns:
        The padded replies, and for each padded parameter a shape: the largest size that a client sent in each
        dimension. Clients with weight 0 do not count for these sizes. If nothing was padded: the given replies and an
        empty dictionary.
    """
    trees = [(part.clients, getattr(part.message, name)) for part in replies.parts]
    small = {key for _, tree in trees for key, stack in tree.items() if stack.shape[1:] != centre[key].shape}
    if not small:
        return replies, {}
    sent: Sent = {}
    for clients, tree in trees:
        for key in small & tree.keys() if any(weights[client] > 0 for client in clients) else ():
            shape = tuple(tree[key].shape[1:])
            sent[key] = tuple(map(max, shape, sent.get(key, shape)))

    def full(key: str, stack: Tensor) -> Tensor:
        wanted = centre[key].shape
        if stack.shape[1:] == wanted:
            return stack
        whole = stack.new_zeros(len(stack), *wanted)
        whole[(slice(None), *map(slice, stack.shape[1:]))] = stack
        return whole

    def grown(part: ReplyStack) -> ReplyStack:
        def own(field: str, value: Any) -> Any:
            return {key: full(key, stack) for key, stack in value.items()} if field == name else value

        return ReplyStack(part.clients, map_fields(part.message, own))

    return Replies([grown(part) for part in replies.parts], replies.missing), sent


def with_unsent(combined: Tree, sent: Sent, centre: Mapping[str, Tensor]) -> Tree:
    """Return the combined parameters. The server keeps its values where no client sent any.

    If the server did not keep its values, a round of clients with small ranks would set the remaining rows of A and
    columns of B to zero. Their gradients would then be zero as well, so they could never be trained again. The papers
    do not describe this case.
    """
    result = dict(combined)
    for key, shape in sent.items():
        if key in combined and shape != tuple(centre[key].shape):
            whole, region = centre[key].to(combined[key]).clone(), tuple(map(slice, shape))
            whole[region] = combined[key][region]
            result[key] = whole
    return result


@dataclass(frozen=True)
class Adapted:
    """What the clients of a cohort replied for one adapted layer, padded with zeros to the server's shapes.

    Attributes:
        a: the matrices A, (K, R, I, ...).
        b: the matrices B, (K, O, R, ...).
        weights: the weights of the clients, float64 (K,), which add up to 1.
        ranks: the rank of each client's matrices, int64 (K,).
        before: the server's A before the round, (R, I, ...).
    """

    a: Tensor
    b: Tensor
    weights: Tensor
    ranks: Tensor
    before: Tensor

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Return all B (K, O, R) and all A (K, R, I) in float64, a kernel's axes joined to the inputs."""
        return self.b.flatten(2).double(), self.a.flatten(2).double()


def ranks_sent(replies: Replies, name: str) -> dict[str, dict[int, int]]:
    """Return, for every matrix A and every client that sent it, its rank: its rows before `padded`."""
    result: dict[str, dict[int, int]] = {}
    for part in replies.parts:
        tree = getattr(part.message, name)
        for a, _ in pairs(tree):
            result.setdefault(a, {}).update(dict.fromkeys(part.clients, tree[a].shape[1]))
    return result


def hetlora(layer: Adapted) -> tuple[Tensor, Tensor]:
    """Return the means of A and of B, with the weights ||B_k A_k|| / sum_j ||B_j A_j|| (Frobenius norms).

    Source: Cho et al., 2024, "sparsity-weighted aggregation". If all products are zero, the weights stay as they are.
    """
    left, right = layer.factors
    # ||B A||^2 is the sum of (B^T B) * (A A^T), which needs R x R instead of O x I numbers
    squares = ((left.mT @ left) * (right @ right.mT)).sum((1, 2))
    norms = squares.clamp(min=0.0).sqrt()
    share = norms / norms.sum() if bool(norms.sum() > 0) else layer.weights
    a, b = layer.a, layer.b
    return torch.tensordot(share, a.double(), 1).to(a), torch.tensordot(share, b.double(), 1).to(b)


def fedilora(layer: Adapted) -> tuple[Tensor, Tensor]:
    """Return the means of A and of B in which each row of A, and column of B, counts only the clients that have it.

    The weights of those clients are scaled to add up to 1, so that the zeros with which small ranks are padded dilute
    nothing. Source: Yang et al., 2025, "dimension-wise aggregation". A row that no client has is zero here, and
    `with_unsent` gives it the server's value.
    """
    left, right = layer.factors
    has = torch.arange(len(layer.before), device=layer.ranks.device) < layer.ranks[:, None]
    share = layer.weights[:, None] * has
    share = share / share.sum(0).clamp(min=torch.finfo(share.dtype).tiny)
    a, b = torch.einsum("kr,kri->ri", share, right), torch.einsum("kr,kor->or", share, left)
    return a.view_as(layer.before).to(layer.a), b.view_as(layer.b[0]).to(layer.b)


def flexlora(layer: Adapted) -> tuple[Tensor, Tensor]:
    """Average the products B_k A_k over the clients, and factorise this mean into a new B and A of rank R.

    A singular value decomposition gives U S V^T, of which the R largest singular values are kept. B is U S, and A is
    V^T.

    The first r rows of A and columns of B are the best approximation of rank r, which a client of rank r receives.
    Source: Bai et al., 2024. Their released code multiplies B by S as well. If the mean has a lower rank than R, the
    remaining rows of A keep their values, and the remaining columns of B become zero. The released code draws these
    rows and columns at random.
    """
    u, s, v = _decomposed(layer)
    rows = layer.before.flatten(1).double().clone()
    rank = min(int((s > s.amax() * max(len(u), v.shape[1]) * torch.finfo(torch.float32).eps).sum()), len(rows))
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    sign = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    columns = rows.new_zeros(len(u), len(rows))
    rows[:rank], columns[:, :rank] = v * sign, u * s * sign.T
    return rows.view_as(layer.before).to(layer.a), columns.view_as(layer.b[0]).to(layer.b)


def _decomposed(layer: Adapted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition of the weighted mean of the products B_k A_k: U, S and V^T.

    The mean is the product of all weighted B side by side, (O, K R), and all A below each other, (K R, I). If K R is
    small, both are factorised by QR and only the product of the triangles, at most (K R, K R), is decomposed: for 4,096
    inputs and outputs and ten clients of rank 8, 0.1 s in place of 40 s.
    """
    left, right = layer.factors
    tall = (layer.weights[:, None, None] * left).permute(1, 0, 2).flatten(1)
    wide = right.flatten(0, 1)
    if tall.shape[1] >= min(len(tall), wide.shape[1]):
        return torch.linalg.svd(tall @ wide, full_matrices=False)  # type: ignore[no-any-return]
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(tall), torch.linalg.qr(wide.mT)
    u, s, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    return q_left @ u, s, v @ q_right.mT


RULES: Mapping[str, Callable[[Adapted], tuple[Tensor, Tensor]]] = {
    "hetlora": hetlora,
    "flexlora": flexlora,
    "fedilora": fedilora,
}
"""The rules for adapters that `[server] aggregate` can name. Each rule returns the server's new A and B of a layer."""


def repaired(trained: Mapping[str, Tensor], received: Mapping[str, Tensor], enough: float) -> Tree:
    """Pull the matrix A that local training has turned furthest from the received one back towards it.

    Of all adapters, the A with the smallest cosine similarity s to the received A becomes s * trained + (1 - s) *
    received, unless s is at least `enough`. Source: Yang et al., 2025, "layer-wise editing"; their code has 0.95. An A
    of zeros, with which `peft` begins for an embedding, has no direction and counts as alike.

    Args:
        trained: the parameters after local training.
        received: the parameters before.
        enough: the similarity from which on nothing is changed.
    """
    names = [a for a, _ in pairs(trained)]
    if not names:  # a client without the modalities that have adapters
        return dict(trained)
    likeness = torch.stack([_likeness(trained[a].flatten(), received[a].flatten()) for a in names])
    least = likeness.argmin()
    result = dict(trained)
    for place, a in enumerate(names):
        s = likeness[place]
        edited = s * trained[a] + (1 - s) * received[a]
        result[a] = torch.where((least == place) & (s < enough), edited, trained[a])
    return result


def _likeness(one: Tensor, two: Tensor) -> Tensor:
    return torch.where(one.any() & two.any(), torch.cosine_similarity(one, two, 0), torch.ones_like(one[0]))
