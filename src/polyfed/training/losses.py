"""Losses that more than one method uses. Each loss is a mean over the real rows of a batch, without padding.

Shape letters: `B` rows, `C` classes, `E` width of the embedding.
"""

from collections.abc import Mapping
from itertools import permutations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError


def cross_entropy(logits_BC: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of logits (B, C) with the labels of the batch: the mean over its real rows, a 0-dim tensor.

    Raises:
        RecipeError: the labels are not classes. Use `context.loss` instead, which works with every objective.
    """
    if batch.y.is_floating_point():
        raise RecipeError(
            "cross_entropy needs class numbers, and the labels are targets. In a method of your own, take the loss "
            "context.loss(w, batch), and name the tasks that it can train in `objectives`"
        )
    if batch.ok is None:
        return F.cross_entropy(logits_BC, batch.y)
    return batch.mean(F.cross_entropy(logits_BC, batch.y, reduction="none"))


Negatives = Literal["intra", "inter", "both"]
"""The negatives of a student's row: the student's other embeddings (`intra`), the teacher's (`inter`), or both."""


def contrastive(
    student_BE: Tensor,
    teacher_BE: Tensor,
    ok_B: Tensor | None,
    *,
    temperature: float,
    negatives: Negatives = "intra",
    normalise: bool = True,
    classes_B: Tensor | None = None,
) -> Tensor:
    """Contrastive loss between the embeddings of a student and of a teacher: PartialFL, Eq. 1 and 2.

    The loss of row i is -log(e^(u_i.v_i/t) / (e^(u_i.v_i/t) + sum over negatives of e^(negative/t))), where u are the
    student's embeddings, v the teacher's, and t the temperature. The positive of row i is v_i. Its negatives are
    u_i.u_j (`intra`, as in the paper's equations) or u_i.v_j (`inter`) of the other rows j. No gradient flows to the
    teacher. A row without negatives has loss 0. docs/algorithms/partialfl.md explains both options.

    Args:
        student_BE: u.
        teacher_BE: v.
        ok_B: False for rows that are neither anchors nor negatives (padding), bool (B,). None means that all rows
            count.
        temperature: t.
        negatives: `intra`, `inter` or `both`.
        normalise: whether to scale all embeddings to length 1 first.
        classes_B: class of every row (B,), or None. If classes are given, rows of the same class are not negatives of
            each other. If None, all other rows are negatives.

    Returns:
        A 0-dim tensor: the mean loss of the rows that are not padding.
    """
    u, v = student_BE, teacher_BE.detach()
    if normalise:
        u, v = F.normalize(u, dim=-1), F.normalize(v, dim=-1)
    ok = torch.ones(u.shape[0], dtype=torch.bool, device=u.device) if ok_B is None else ok_B
    own = torch.eye(u.shape[0], dtype=torch.bool, device=u.device)
    left_out = own | ~ok.unsqueeze(0)
    if classes_B is not None:
        left_out = left_out | (classes_B.unsqueeze(0) == classes_B.unsqueeze(1))
    positive = (u * v).sum(-1) / temperature
    others = {"intra": [u], "inter": [v], "both": [u, v]}[negatives]
    scores = [(u @ other.mT / temperature).masked_fill(left_out, float("-inf")) for other in others]
    row = torch.logsumexp(torch.cat([*scores, positive.unsqueeze(-1)], -1), -1) - positive
    return torch.where(ok, row, torch.zeros_like(row)).sum() / ok.sum().clamp(min=1)


def between_modalities(z: Mapping[str, Tensor], there: Mapping[str, Tensor], temperature: float) -> Tensor:
    """Contrastive loss between the modalities of a row: the mean of `contrastive` over all ordered pairs of modalities.

    The positive of a row's embedding in one modality is its embedding in the other; the negatives are the other rows'
    in that modality. Only rows that have both modalities count. The result is 0 if there is only one modality.

    Args:
        z: embeddings (B, E) by modality.
        there: by modality, which rows are real and have it, bool (B,).
        temperature: t.
    """
    pairs = [
        contrastive(z[m], z[n], there[m] & there[n], temperature=temperature, negatives="inter")
        for m, n in permutations(z, 2)
    ]
    return torch.stack(pairs).mean() if pairs else next(iter(z.values())).new_zeros(())


def distillation(student_BC: Tensor, teacher_BC: Tensor, batch: Batch, temperature: float) -> Tensor:
    """Knowledge distillation (Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015).

    The loss is T^2 times the mean over real rows of KL(softmax(teacher / T) || softmax(student / T)). No gradient flows
    to the teacher. As in FedGKT's released code, 1e-7 is added to the teacher's probabilities.

    Args:
        student_BC: logits of the student.
        teacher_BC: logits of the teacher.
        batch: the batch that the logits belong to.
        temperature: T.

    Returns:
        A 0-dim tensor.
    """
    target = torch.softmax(teacher_BC.detach() / temperature, -1) + 1e-7
    rows = (target * (target.log() - torch.log_softmax(student_BC / temperature, -1))).sum(-1)
    return temperature**2 * batch.mean(rows)
