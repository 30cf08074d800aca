"""The samples of a silo: which samples its edge can use, and where each device holds them.

Shape letters: `N_m` samples of the silo, `B_m` samples of the edge's mini-batch, `n` rows of a device, `E` entries of
an embedding.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.hfm.alignment import Overlap, check_aligned
from polyfed.core.errors import DataError
from polyfed.core.tree import Tree


@dataclass(frozen=True)
class SiloSamples:
    """The samples of a silo that take part in training, and each device's row of every sample.

    Attributes:
        count: N_m, the number of samples. It is 0 if no sample can be used.
        places: by device, the position of each sample among the device's own rows, int64 (N_m,). A sample that the
            device lacks has the position -1.
    """

    count: int
    places: Mapping[int, Tensor]

    @classmethod
    def of(
        cls,
        silo: int,
        ids: Mapping[int, Tensor],
        owned: Mapping[int, Sequence[str]],
        overlap: Overlap,
        labelled: Collection[int],
    ) -> "SiloSamples":
        """Match the rows of the devices of a silo by their sample ids.

        Args:
            silo: the silo's number, for errors.
            ids: the ids of the rows of each device, int64 (n,).
            owned: the modalities of each device.
            overlap: the option `overlap` of `Vertical`.
            labelled: the devices that hold labels.

        Raises:
            DataError: `overlap` is `exact`, but two devices hold different samples; or `overlap` has another value, but
                a device holds the same id twice.
            TooFewReplies: no device sent its ids.
        """
        if overlap == "exact":
            check_aligned(silo, ids)
            count = len(next(iter(ids.values())))
            return cls(count, {client: torch.arange(count) for client in ids})
        for client, own in ids.items():
            if len(torch.unique(own)) != len(own):
                raise DataError(
                    f"silo {silo}: device {client} holds some ids twice, so its rows cannot be matched with the rows "
                    "of other devices. Give every sample its own id"
                )
        modalities = dict.fromkeys(m for own in owned.values() for m in own)
        groups = [[ids[c] for c in ids if m in owned[c]] for m in modalities]
        used: Tensor = torch.unique(torch.cat(list(ids.values())))
        if overlap == "common":
            groups += [[ids[c] for c in ids if c in labelled]]
        else:
            groups = [[ids[c] for c in ids if c in labelled]]
        for group in groups:
            used = used[torch.isin(used, torch.cat(group))] if group else used[:0]
        return cls(len(used), {client: _positions(used, own) for client, own in ids.items()})

    def rows(self, client: int) -> int:
        """Return how many of the samples a device holds."""
        return int((self.places[client] >= 0).sum())

    def held(self, batch: Tensor, client: int) -> Tensor:
        """Return which samples of a mini-batch (B_m,) the device holds, bool (B_m,)."""
        return self.places[client][batch] >= 0

    def own_rows(self, batch: Tensor, client: int) -> Tensor:
        """Return the positions of a mini-batch's samples among the device's own rows. Missing samples are left out."""
        places = self.places[client][batch]
        return places[places >= 0]

    def pooled(self, batch: Tensor, sent: Mapping[int, Tree]) -> Tree:
        """Return the embeddings (B_m, E) of a mini-batch by modality: the mean over the devices that hold a sample.

        A sample that no device holds has a zero embedding. A modality of which no device sent embeddings is left out.

        Args:
            batch: the mini-batch, positions among the samples, int64 (B_m,).
            sent: device -> modality -> embeddings of the rows `own_rows(batch, device)`.
        """
        by_modality: dict[str, list[tuple[int, Tensor]]] = {}
        for client, tree in sent.items():
            for m, h in tree.items():
                by_modality.setdefault(m, []).append((client, h))
        return {m: self._mean(batch, parts) for m, parts in by_modality.items()}

    def per_holder(self, values: Tensor, batch: Tensor, clients: Collection[int]) -> Tensor:
        """Divide each sample's values by the number of devices in `clients` that hold the sample.

        Args:
            values: values of the samples of a mini-batch, (B_m, ...). A sample that no device holds keeps its values.
            batch: the mini-batch, positions among the samples, int64 (B_m,).
            clients: the devices, at least one.
        """
        counts = torch.stack([self.held(batch, client) for client in clients]).sum(0).clamp(min=1)
        return values / counts.to(values).view(-1, *(1,) * (values.dim() - 1))

    def _mean(self, batch: Tensor, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        (client, first), *others = parts
        if not others and len(first) == len(batch):
            return first
        total = first.new_zeros((len(batch), *first.shape[1:]))
        for client, h in parts:
            total[self.held(batch, client).to(h.device)] += h
        return self.per_holder(total, batch, [client for client, _ in parts])


def _positions(ids: Tensor, own: Tensor) -> Tensor:
    """Return the position of each id among a device's own ids, or -1, int64."""
    values, order = own.sort()
    at = torch.searchsorted(values, ids).clamp(max=max(len(own) - 1, 0))
    if not len(own):
        return torch.full_like(ids, -1)
    return torch.where(values[at] == ids, order[at], -1)


def no_usable_sample(silo: int, devices: Collection[int], overlap: Overlap) -> DataError:
    """Return the error for a silo whose devices hold no sample that can be used."""
    needed = "every modality of the silo has it and a device with labels holds it"
    if overlap == "all":
        needed = "a device with labels holds it"
    return DataError(
        f"silo {silo}: its devices {', '.join(map(str, devices))} have no usable sample: under [algorithm] overlap = "
        f"'{overlap}' a sample counts if {needed}. Compare the ids of the devices, or leave the silo out"
    )
