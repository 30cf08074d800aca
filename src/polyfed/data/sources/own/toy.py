"""toy: synthetic data for tests and measurements of speed, never a substitute for a published data set."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import require
from polyfed.core.option_checks import AT_LEAST_ONE, BELOW_ONE, check_ranges
from polyfed.data.columns import Column, Columns
from polyfed.data.population.splits import stratified
from polyfed.data.sources.base import Facts, Source


@dataclass(frozen=True, kw_only=True)
class Toy(Source):
    """Class-dependent Gaussians: a sample of class c in modality m is `snr_m * u_mc + noise`.

    `u_mc` is a random direction of expected length 1 for each class and modality, and the noise is standard normal in
    every entry. `snr` is therefore the expected length of the signal `snr_m * u_mc`, divided by the standard deviation
    of the noise. With the defaults, modality `a` dominates `b`. Each modality has its own stream of random numbers, so
    an additional modality never changes the others.

    Attributes:
        rows: Number of rows, all splits together.
        classes: Number of classes.
        shapes: Sample shape of each modality; `{a = [1, 8, 8], b = [3, 8, 8]}` gives tiny images.
        snr: Signal-to-noise ratio of each modality, 1 where it is not given.
        natural_clients: Number of natural clients, to which rows are assigned at random; 0 for none.
        test_share: Share of every class that is the global test set.
        seed: Seed of the draws, the same in all runs.
    """

    rows: Annotated[int, AT_LEAST_ONE] = 2000
    classes: Annotated[int, AT_LEAST_ONE] = 5
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"a": (16,), "b": (24,)})
    snr: Mapping[str, float] = field(default_factory=lambda: {"a": 3.0, "b": 1.0})
    natural_clients: int = 0
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        require(bool(self.shapes), "data.shapes", self.shapes, "at least one modality")
        require(
            0 <= self.natural_clients <= self.rows,
            "data.natural_clients",
            self.natural_clients,
            "0 up to data.rows",
        )
        for name, shape in self.shapes.items():
            require(bool(shape) and min(shape) >= 1, f"data.shapes.{name}", shape, "positive lengths")

    @override
    def load(self) -> Columns:
        label = torch.arange(self.rows) % self.classes
        label = label[keys.permutation(keys.key(self.seed, "toy", "label"), self.rows)]
        client = None
        if self.natural_clients:
            order = keys.permutation(keys.key(self.seed, "toy", "client"), self.rows)
            client = order % self.natural_clients
        return Columns(
            name="toy",
            modalities={name: self._column(name, label) for name in self.shapes},
            label=label,
            num_classes=self.classes,
            split=stratified(label, self.test_share, keys.key(self.seed, "toy", "split")),
            ids=torch.arange(self.rows),
            client=client,
        )

    def _column(self, name: str, label: torch.Tensor) -> Column:
        size = math.prod(self.shapes[name])
        directions = keys.normal(keys.key(self.seed, "toy", name, "mean"), (self.classes, size)) / math.sqrt(size)
        noise = keys.normal(keys.key(self.seed, "toy", name, "noise"), (self.rows, size))
        values = noise.add_(directions[label], alpha=self.snr.get(name, 1.0))
        return Column(values.reshape(self.rows, *self.shapes[name]))

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data toy` prints them."""
        return Facts(
            title="synthetic Gaussians per class and modality, for tests and speed",
            modalities={"a": "(16,), signal 3", "b": "(24,), signal 1; any names and shapes by data.shapes"},
            licence="none needed: drawn from a seed",
            obtain="nothing to fetch",
            layout="no files",
        )
