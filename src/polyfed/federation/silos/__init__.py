"""What a method lets each silo do for itself.

- `parts`: the work of a silo, and how the parts of all silos run in one process.
- `forwarded`: what the edges of silos forward to a server if each part runs at its edge.
"""
