"""How a recipe runs: the assembly of its parts, the dry run, the loop over rounds, checkpoints."""
