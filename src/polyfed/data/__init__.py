"""The data on the clients: data sources, the table that each source loads, and the split of its rows over clients.

A data source loads a `Columns` table. `populate` splits its rows over clients by a partition, assigns modalities to
clients, and sets test and validation rows aside. The result is a `Population`.

- `columns`: the table: `Columns`, with one `Column` for each modality.
- `reading/`: how a user's own data becomes this table.
- `column_scaling`: which modalities are standardised, and the shifts and scales for a trained model.
- `token_ids`: whether whole numbers are token ids or quantities.
- `sources/`: the data sources, one file for each, and their registry `SOURCES`.
- `clients`: `ClientsSpec`, the schema of `[clients]`.
- `partitions/`: the rules that assign training rows to clients, with one file for each family, and the registry
`PARTITIONS`.
- `modality_assignment`: the rules that assign modalities to clients.
- `population`: `populate` and its result, `Population`.
- `stacking`: several modalities concatenated into one (early fusion).
- `features/`: extracts the features of media files once, into a folder that runs read with memory mapping.
- `media/`: the extractors: spectrograms, frames, embeddings.
- `splits`: draws test sets and subsets that do not depend on the run's seed.

Pages: docs/data.md (sources and features) and docs/partitions.md (clients).
"""

from polyfed.data.column_scaling import scaling_of
from polyfed.data.columns import Column, Columns
from polyfed.data.partitions import PARTITIONS, Partition
from polyfed.data.partitions.shards import Shards
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.population import Population, populate
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
    "scaling_of",
    "stacked",
]
