"""Aggregation of LoRA adapters: matrices A (r, inputs) and B (outputs, r), whose rank r may differ between clients.

`aggregate` (`aggregation.py`) uses these functions. A reply of a client with a small rank is padded with zeros to the
shapes of the server's matrices. docs/models.md describes the rules. In shapes, `K` is the number of clients, `R` the
largest rank, `I` the inputs and `O` the outputs of a layer.

Sources: Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
EMNLP 2024 (HetLoRA). Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous
Tasks and Client Resources", NeurIPS 2024 (FlexLoRA).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import map_fields
from polyfed.core.tree import Tree
from polyfed.federation.replies import Replies, ReplyStack

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
    found = dict(combined)
    for key, shape in sent.items():
        if key in combined and shape != tuple(centre[key].shape):
            whole, region = centre[key].to(combined[key]).clone(), tuple(map(slice, shape))
            whole[region] = combined[key][region]
            found[key] = whole
    return found


def hetlora(a: Tensor, b: Tensor, weights: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of A and of B, with the weights ||B_k A_k|| / sum_j ||B_j A_j|| (Frobenius norms).

    Source: Cho et al., 2024, "sparsity-weighted aggregation". If all products are zero, the function uses `weights`
    instead.

    Args:
        a: the padded matrices A of the clients, (K, R, I, ...).
        b: the padded matrices B of the clients, (K, O, R, ...).
        weights: the weights of the clients, float64 (K,), which add up to 1.
        before: the server's A before the round, (R, I, ...).
    """
    left, right = b.flatten(2).double(), a.flatten(2).double()
    # ||B A||^2 is the sum of (B^T B) * (A A^T), which needs R x R instead of O x I numbers
    squares = ((left.mT @ left) * (right @ right.mT)).sum((1, 2))
    norms = squares.clamp(min=0.0).sqrt()
    share = norms / norms.sum() if bool(norms.sum() > 0) else weights
    return torch.tensordot(share, a.double(), 1).to(a), torch.tensordot(share, b.double(), 1).to(b)


def flexlora(a: Tensor, b: Tensor, weights: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Average the products B_k A_k over the clients, and factorise this mean into a new B and A of rank R.

    A singular value decomposition gives U S V^T, of which the R largest singular values are kept. B is U S, and A is
    V^T.

    The first r rows of A and columns of B are the best approximation of rank r, which a client of rank r receives.
    Source: Bai et al., 2024. Their released code multiplies B by S as well. If the mean has a lower rank than R, the
    remaining rows of A keep their values, and the remaining columns of B become zero. The released code draws these
    rows and columns at random.

    Args:
        a: the padded matrices A of the clients, (K, R, I, ...).
        b: the padded matrices B of the clients, (K, O, R, ...).
        weights: the weights of the clients, float64 (K,), which add up to 1.
        before: the server's A before the round, (R, I, ...).
    """
    left, right = b.flatten(2).double(), a.flatten(2).double()
    mean = torch.einsum("k,kor,kri->oi", weights, left, right)
    u, s, v = torch.linalg.svd(mean, full_matrices=False)
    rank = min(int((s > s.amax() * max(mean.shape) * torch.finfo(torch.float32).eps).sum()), len(before))
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    sign = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    new_a, new_b = before.flatten(1).double().clone(), torch.zeros_like(left[0])
    new_a[:rank], new_b[:, :rank] = v * sign, u * s * sign.T
    return new_a.view_as(before).to(a), new_b.view_as(b[0]).to(b)


RULES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "hetlora": hetlora,
    "flexlora": flexlora,
}
"""The rules for adapters that `[server] aggregate` can name. Each rule returns the server's new A and B of a layer."""
