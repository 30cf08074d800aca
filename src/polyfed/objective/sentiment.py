"""The metrics of papers on CMU-MOSI and CMU-MOSEI: Acc-7, Acc-2 and F1 of predicted sentiment scores from -3 to 3.

The rules come from the released code of MulT (Tsai et al., "Multimodal Transformer for Unaligned Multimodal Language
Sequences", ACL 2019): the function `eval_mosei_senti` in src/eval_metrics.py of yaohungt/Multimodal-Transformer. Later
papers use the same rules. Acc-7 clips truth and prediction to -3..3, rounds both (half to even), and counts equal
pairs. Acc-2 and F1 leave out rows whose true score is 0, and compare two classes: positive and not positive. F1 is the
mean over both classes, weighted by their rows. Some papers report Acc-2 of all rows instead, with the classes negative
and not negative. polyfed calls this form of Acc-2 `acc2_with_zero`. Its source is `Has0_acc_2` in the released code of
MMSA (thuiar/MMSA, src/MMSA/utils/metricsTop.py).
"""

import torch
from torch import Tensor

from polyfed.objective.class_metrics import accuracy, weighted_f1

SIZE = 49 + 4 + 4
"""Number of entries in three confusion matrices: of seven classes, of signs without zeros, and of negative or not."""


def counts(predicted: Tensor, truth: Tensor) -> Tensor:
    """Return what each row adds to the confusion matrices of Acc-7, Acc-2 and `acc2_with_zero`, float64 (B, SIZE).

    This function runs under vmap.

    Args:
        predicted: scores (B,).
        truth: scores (B,).
    """
    seven = [(value.clamp(-3, 3).round() + 3).nan_to_num(0.0).long() for value in (truth, predicted)]
    signs = [(value > 0).long() for value in (truth, predicted)]
    negative = [(value >= 0).long() for value in (truth, predicted)]
    hot = torch.nn.functional.one_hot
    parts = [hot(a * 7 + b, 49) for a, b in [seven]] + [hot(a * 2 + b, 4) for a, b in (signs, negative)]
    acc7, acc2, with_zero = (part.to(torch.float64) for part in parts)
    return torch.cat([acc7, acc2 * (truth != 0).unsqueeze(-1), with_zero], -1)


def measured(sums: Tensor) -> dict[str, float]:
    """Compute Acc-7, Acc-2, F1 and `acc2_with_zero` from sums of `counts`.

    If the true score of every row is 0, the result has no Acc-2 and no F1.
    """
    acc7, acc2, with_zero = sums[:49].view(7, 7), sums[49:53].view(2, 2), sums[53:].view(2, 2)
    result = {"acc7": accuracy(acc7), "acc2_with_zero": accuracy(with_zero)}
    return result | ({"acc2": accuracy(acc2), "f1": weighted_f1(acc2)} if bool(acc2.sum() > 0) else {})
