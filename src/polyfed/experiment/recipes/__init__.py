"""How a recipe becomes objects: parse, complete, check, and build the parts of a run."""
