"""Studies: a study combines methods with scenarios, settings and seeds, and a sweep runs all combinations.

- `study_schema`: the sections of a study. `study_file` reads them. `ranges`: the values of its keys.
- `plan`: the recipes of its runs, the conditions [[when]], and the names under which results are kept.
- `run_checks`: whether the algorithms can train the models, and whether the runs will have the study's metrics.
- `search`: the choice of settings by Optuna, on validation rows.
- `scheduler`: `polyfed.sweep`, which runs a study.
- `pool`: the processes that run at the same time. `worker`: one of these processes.
- `board`: which runs are finished, failed or unfinished, and why. `results`: the files of a study's folder.
"""

from polyfed.experiment.study.scheduler import sweep

__all__ = ["sweep"]
