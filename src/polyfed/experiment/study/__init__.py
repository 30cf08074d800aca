"""How do many recipes become one table? A study crosses methods with scenarios, settings and seeds; a sweep runs it.

- `study_schema`: the sections of a study; `study_file` reads them; `ranges`: the values of its keys.
- `plan`: the recipes of its runs, and the names under which their results are kept.
- `search`: the choice of settings by Optuna, on validation rows.
- `scheduler`: `polyfed.sweep`, which carries a study out.
- `pool`: the processes that carry out runs at once; `worker`: such a process.
- `board`: which runs are finished, failed or left, and why; `results`: the files of a study's folder.
"""

from polyfed.experiment.study.scheduler import sweep

__all__ = ["sweep"]
