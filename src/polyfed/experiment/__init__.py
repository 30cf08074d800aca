"""How does a recipe become a finished run? This room reads it, assembles the parts, runs the rounds, keeps the results.

From the recipe to the parts:

- `recipe`: the recipe as a file and as objects; `overrides`: its sections, and `--set section.key=value`.
- `settings`: the sections [engine] and [checkpoint]; `machine`: the cores and the memory that a run may use.
- `assembly`: data, clients, model, policy, engine and federation from a recipe.
- `privacy_support`: which methods can honour [privacy] and [secure_aggregation].
- `check`: what a recipe lets cross, before anything runs; `dry_run`: how large the replies will be.

The run:

- `loop`: the rounds: train, summarise, evaluate, save.
- `events`: the stream of events that the progress display, the records and the tests listen to.
- `tracking`: the section [tracking], which hands the numbers of a run to another tool.

The files:

- `records`: the files of a run's folder, and how a resumed run continues them; `lock`: one process per folder.
- `round_facts`: what the ledger says about a round; `json_text`: the JSON that a run writes.
- `update_norms`: how far models moved in a round; `label_counts`: the classes that clients hold.
- `calibration`: whether the model is as often right as it is sure; `model_facts`: this, and the success of a backdoor.
- `display`: runs and recipes in a notebook.
- `checkpoint`: any nest of values as safetensors and JSON; `run_state`: the values that a run keeps.

Many runs:

- `study`: methods crossed with scenarios, settings and seeds; `polyfed.sweep` carries a study out.

The result:

- `leakage`: what the messages of a run give away; `polyfed audit` attacks them.
- `run_result`: the finished run, at its end or loaded from its folder.
- `models`: the trained models and their predictions; `saved_model`: writing and loading them without the run.
"""
