"""The law of options: whoever changes one option changes the run, is refused, or is told that it has no effect.

`option_cells.py` makes the cells from the dataclasses of the sections, so a new option or method is in the matrix at
once. The whole matrix takes minutes and is marked slow; a fixed part of it runs always.
"""

import zlib

import pytest

from laws.option_cells import VARIANTS, Cell, base, cells, changed, left_by, verdict

ALLOWED = {"changes", "refused", "noted"}


def sample(configuration: str) -> list[Cell]:
    """Every twentieth cell of a configuration, by the checksum of its name: the same in every session."""
    return [cell for cell in cells(configuration) if zlib.crc32(str(cell).encode()) % 20 == 0]


def silent(configuration: str, chosen: list[Cell]) -> dict[str, str]:
    before, told = left_by(base(configuration))
    found = {str(cell): verdict(cell, before, told) for cell in chosen}
    return {name: what for name, what in found.items() if what not in ALLOWED}


@pytest.mark.parametrize("configuration", sorted(VARIANTS))
def test_a_sample_of_the_options_is_not_silent(configuration: str) -> None:
    assert silent(configuration, sample(configuration)) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("configuration", sorted(VARIANTS))
def test_no_option_is_silent(configuration: str) -> None:
    assert silent(configuration, list(cells(configuration))) == {}


NAMED = [
    Cell("fedavg", "model", "dropout", 0.5),
    Cell("hfm", "train", "batch_size", 5),
    Cell("vfl", "train", "batch_size", 5),
    Cell("fedavg steps", "train", "epochs", 5),
    Cell("hfm", "clients", "alpha", 0.1),
    Cell("vfl", "clients", "alpha", 0.1),
    Cell("hfl", "clients", "alpha", 0.1),
    Cell("cmsfed quantile", "algorithm", "dominance_threshold", 3.0),
    Cell("fedavg", "network", "rate_up_bps", 5.0),
    Cell("fedavg", "limits", "max_requests_per_day", 1),
    Cell("fedamp", "clients", "participation", 2),
    Cell("fedavg", "server", "beta2", 0.5),
]


@pytest.mark.parametrize("cell", NAMED, ids=str)
def test_the_note_names_the_option_its_value_and_what_makes_it_idle(cell: Cell) -> None:
    before, _ = left_by(base(cell.method))
    digest, told = left_by(changed(cell))
    assert digest == before
    (text,) = [text for text in told if text.startswith(f"[{cell.section}] {cell.key} = {cell.value} has no effect")]
    assert " beside " in text


def test_limits_of_a_recipe_change_training_in_a_simulation_as_on_a_device() -> None:
    """With 16 rows a batch, the last batch of most clients has fewer than 8 rows, and devices leave it out."""
    table = base("fedavg")
    limited = table | {"limits": {"min_batch_size": 8}}
    alone, stacked = (
        left_by(limited | {"engine": table["engine"] | {"name": name}}) for name in ("sequential", "vectorised")
    )
    assert alone[0] != left_by(table)[0]
    assert alone[0] == stacked[0]
