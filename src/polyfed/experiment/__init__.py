"""How a recipe becomes a result, in four questions and four tools.

- `recipes`: how does a recipe become objects?
- `checks`: may it run, and what will leave the clients?
- `running`: how does it run? Assembly, dry run, the loop over rounds, checkpoints.
- `results`: what does it leave? The files of its folder, its models, the object that `polyfed.run` returns.
- `study`: many recipes at once. `leakage`: what the messages of a run reveal.
- `certificate`: what a run's files say, signed. `leaderboard`: results that others run again.
"""
