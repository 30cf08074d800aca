"""Which devices upload: those with the largest benefit per second of channel time (step 2 of Algorithm 1)."""

import torch
from torch import Tensor


def benefit_per_second(benefit: Tensor, seconds: Tensor, price: float | None) -> Tensor:
    """Return the score of every device, (K,).

    Args:
        benefit: what the others would gain from the upload of each device, (K,).
        seconds: the time until the upload of each device has arrived, (K,). It is 0 without a network, so that only the
            benefit decides.
        price: what a second costs; the score is then linear, benefit - price * seconds. None divides by the seconds.
    """
    return benefit / seconds.clamp(min=1e-12) if price is None else benefit - price * seconds


def scheduled(scores: Tensor, able: Tensor, ages: Tensor, count: int, max_age: int) -> Tensor:
    """Run step 2: choose the devices that upload, bool (K,).

    Args:
        scores: the score of every device, (K,). If two devices have the same score, the device with the lower number
            comes first.
        able: devices that can upload, bool (K,).
        ages: rounds since the last upload, (K,).
        count: how many devices with the largest scores upload.
        max_age: devices that reach this age also upload; 0 never forces an upload.
    """
    order = scores.masked_fill(~able, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(able)
    chosen[order[:count]] = True
    if max_age:
        chosen |= ages + 1 >= max_age
    return chosen & able
