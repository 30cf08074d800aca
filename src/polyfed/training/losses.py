"""Losses that more than one algorithm uses. All are means over the real rows of a batch.

Shape letters: `B` rows, `C` classes, `E` embedding.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.core.batch import Batch


def cross_entropy(logits_BC: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of the real rows."""
    if batch.ok is None:
        return F.cross_entropy(logits_BC, batch.y)
    return batch.mean(F.cross_entropy(logits_BC, batch.y, reduction="none"))


Negatives = Literal["intra", "inter", "both"]
"""Which rows of a batch are pushed away from a student row: the student's own, the teacher's, or both."""


def contrastive(
    student_BE: Tensor,
    teacher_BE: Tensor,
    ok_B: Tensor | None,
    *,
    temperature: float,
    negatives: Negatives = "intra",
    normalise: bool = True,
) -> Tensor:
    """Mean over real rows of -log(e^(u_i.v_i/t) / (e^(u_i.v_i/t) + sum of e^(negatives/t))): PartialFL, Eq. 1 and 2.

    Anchors u are the student's rows, the positive of each is the teacher's row v of the same sample, its negatives are
    u_i.u_j (`intra`, the paper's equations) or u_i.v_j (`inter`) of the other samples j (algorithms.md 1.3 and P1).
    The teacher is constant. A row without negatives costs exactly 0.

    Args:
        student_BE: u.
        teacher_BE: v.
        ok_B: real rows; others are neither anchors nor negatives. None: all are real.
        temperature: t.
        negatives: see above.
        normalise: bring all rows to length 1 first (algorithms.md P2).
    """
    u, v = student_BE, teacher_BE.detach()
    if normalise:
        u, v = F.normalize(u, dim=-1), F.normalize(v, dim=-1)
    ok = torch.ones(u.shape[0], dtype=torch.bool, device=u.device) if ok_B is None else ok_B
    own = torch.eye(u.shape[0], dtype=torch.bool, device=u.device)
    left_out = own | ~ok.unsqueeze(0)
    positive = (u * v).sum(-1) / temperature
    others = {"intra": [u], "inter": [v], "both": [u, v]}[negatives]
    scores = [(u @ other.mT / temperature).masked_fill(left_out, float("-inf")) for other in others]
    row = torch.logsumexp(torch.cat([*scores, positive.unsqueeze(-1)], -1), -1) - positive
    return torch.where(ok, row, torch.zeros_like(row)).sum() / ok.sum().clamp(min=1)


def distillation(student_BC: Tensor, teacher_BC: Tensor, batch: Batch, temperature: float) -> Tensor:
    """T^2 times the mean over real rows of KL(softmax(teacher / T) || softmax(student / T)): Hinton et al. 2015.

    FedGKT's released code adds 1e-7 to the teacher's probabilities, and so does this (algorithms.md 5.13).
    """
    target = torch.softmax(teacher_BC.detach() / temperature, -1) + 1e-7
    rows = (target * (target.log() - torch.log_softmax(student_BC / temperature, -1))).sum(-1)
    return temperature**2 * batch.mean(rows)
