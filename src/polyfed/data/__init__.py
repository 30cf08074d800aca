"""What is on the clients? Data sources, the table that each loads, and how its rows are split over clients.

A data source loads a `Columns` table; `populate` splits its rows over clients by a partition, decides who holds which
modality, and sets test and validation rows aside: the result is a `Population`.

- `columns`: the table: `Columns`, with one `Column` for each modality.
- `sources/`: the data sources, one file for each, and their registry `SOURCES`.
- `clients`: `ClientsSpec`, the schema of `[clients]`.
- `partitions/`: which training rows go to which client; one file for each family, and their registry `PARTITIONS`.
- `assignment`: which client holds which modality.
- `population`: `populate` and its result, `Population`.
- `stacking`: several modalities concatenated into one (early fusion).
- `features/`: extracts the features of media files once, into a folder that runs read memory mapped.
- `media/`: the extractors: spectrograms, frames, embeddings.
- `files`: reads `.npz`, `.npy` and idx files, however damaged or malicious they are.
- `splits`: draws test sets and subsets that stay the same whatever the run's seed.
- `checks`: a check that the schemas share.

Pages: docs/data.md (sources and features) and docs/partitions.md (clients).
"""

from polyfed.data.clients import ClientsSpec
from polyfed.data.columns import Column, Columns
from polyfed.data.partitions import PARTITIONS, Partition
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
