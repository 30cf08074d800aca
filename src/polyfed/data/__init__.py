"""Data: sources, the table they give, and how its rows are dealt to clients."""

from polyfed.data.clients import ClientsSpec
from polyfed.data.columns import Column, Columns
from polyfed.data.partitions.dealing import Partition
from polyfed.data.partitions.partition import PARTITIONS
from polyfed.data.partitions.shards import Shards
from polyfed.data.population import Population, populate
from polyfed.data.sources import SOURCES, Facts, Source
from polyfed.data.stacking import stacked

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "ClientsSpec",
    "Column",
    "Columns",
    "Facts",
    "Partition",
    "Population",
    "Shards",
    "Source",
    "populate",
    "stacked",
]
