"""A tiny simulation in a folder, for tests of what a run leaves behind."""

from pathlib import Path

import polyfed
from polyfed.experiment.recipes.recipe import load_recipe

TINY = """
seed = 5
rounds = 3
[data]
name = "toy"
rows = 120
classes = 3
[clients]
partition = "iid"
num = 3
[model]
embedding = 4
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "fedavg"
aggregation = "uniform"
"""


def simulated(folder: Path, more: str = "", cohort: int = 0) -> Path:
    """Run three clients for three rounds, `cohort` of them a round, and return the folder of the run."""
    recipe = folder.parent / "tiny.toml"
    some = f"num = 3\nparticipation = {cohort}\n" if cohort else "num = 3\n"
    recipe.write_text(TINY.replace("num = 3\n", some) + more)
    polyfed.run(load_recipe(recipe), out=folder)
    return folder
