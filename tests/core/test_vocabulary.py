"""Words of other frameworks lead to the key of a recipe that means the same."""

from dataclasses import fields

import pytest

from polyfed.core.errors import RecipeError
from polyfed.core.vocabulary import MEANINGS, PLACES, place_of
from polyfed.data.sources.own.npz import Npz
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.sections import SECTIONS
from refusals import refuses
from world import algorithm, recipe


@pytest.mark.parametrize("place", sorted(MEANINGS))
def test_every_place_exists_and_its_words_are_unknown_there(place: str) -> None:
    section, _, key = place.rpartition(".")
    known = {"seed", "rounds"} if section not in SECTIONS else {*SECTIONS[section].keys}
    if section == "data":
        known |= {f.name for f in fields(Npz)}
    assert key in known
    assert not known & set(MEANINGS[place].split()), "a word that is a key of the section is never unknown"


def test_no_word_has_two_meanings() -> None:
    words = [word for own in MEANINGS.values() for word in own.split()]
    assert len(words) == len(set(words)) == len(PLACES)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"learning_rate": 0.1}, "learning_rate: mean train.lr?"),
        ({"num_clients": 5}, "num_clients: mean clients.num?"),
        ({"n_rounds": 5}, "n_rounds: mean 'rounds'?"),
        ({"optimizer": {"lr": 0.1}}, "optimizer: mean train.optimiser?"),
        ({"train": {"learning_rate": 0.1}}, "train.learning_rate: mean 'lr'?"),
        ({"train": {"batch": 4}}, "train.batch: mean 'batch_size'"),
        ({"train": {"local_epochs": 4}}, "train.local_epochs: mean 'epochs'"),
        ({"clients": {"dirichlet-alpha": 0.1}}, "clients.dirichlet-alpha: mean 'alpha'"),
        ({"algorithm": {"name": "fedprox", "server_lr": 1.0}}, "algorithm.server_lr: mean server.lr?"),
        ({"train": {"epcohs": 4}}, "train.epcohs: mean 'epochs'"),
    ],
)
def test_a_recipe_with_a_foreign_word_names_the_key(written: dict[str, object], says: str) -> None:
    with refuses(RecipeError, says):
        parse_recipe(recipe(algorithm("fedavg")).table() | written)


def test_a_key_that_exists_in_another_section_is_named_there() -> None:
    with refuses(RecipeError, "lr: server.lr"):
        parse_recipe(recipe(algorithm("fedavg")).table() | {"lr": 0.1})


def test_spelling_does_not_matter() -> None:
    assert place_of("Learning Rate") == place_of("LEARNING_RATE") == place_of("learning-rate") == "train.lr"
