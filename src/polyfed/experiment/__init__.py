"""The experiment: reads a recipe, assembles the parts of the run, runs the rounds, and stores the results.

These modules read the recipe and make the parts of the run from it:

- `recipe`: the recipe as a file and as objects. `overrides`: the recipe's sections, and `--set section.key=value`.
- `settings`: the sections [engine] and [checkpoint]. `machine`: the cores and the memory that a run may use.
- `assembly`: makes data, clients, model, policy, engine and federation from a recipe.
- `privacy_support`: which algorithms support [privacy] and [secure_aggregation].
- `check`: lists, before the run, what a recipe allows to leave the clients.
  - `check_result`: the facts that a check finds. `check_tables` and `egress_tables` show them as text.
  - `dry_run`: measures how large the replies will be.

The run:

- `loop`: the rounds: train, summarise, evaluate, save.
- `events`: the stream of events that the progress display, the records and the tests listen to.
- `tracking`: the section [tracking], which passes the numbers of a run to another tool.

The files:

- `records`: the files of a run's folder, and how a resumed run continues them. `lock`: allows one process per folder.
- `round_facts`: facts about a round from the ledger. `json_text`: the JSON that a run writes.
- `update_norms`: how far models moved in a round. `label_counts`: the classes that clients hold.
- `calibration`: whether the confidence of the model matches its accuracy. `model_facts`: facts about the trained model,
  namely its calibration and the success of a backdoor.
- `display`: how runs and recipes look in a notebook.
- `checkpoint`: stores nested values as safetensors and JSON. `run_state`: the values that a run stores in a checkpoint.

Many runs:

- `study`: every combination of some algorithms, scenarios, settings and seeds. `polyfed.sweep` runs a study.

The result:

- `leakage`: what the messages of a run reveal. `polyfed audit` attacks the messages.
- `run_result`: the finished run: what `polyfed.run` returns, and what `polyfed.load_run` reads from a folder.
- `models`: the trained models and their predictions. `saved_model`: saving models, and loading them without the run.
"""
