"""A board of results that others can check: a file with all that a result needs, and its repetition bit for bit.

- `entry`: the schema of a file, and the rules that every entry keeps: several seeds, a control with the same budget, a
  placebo.
- `packing`: makes an entry from the folder of a study.
- `verification`: runs an entry again without trusting it, and compares every number.
- `page`: the table of several entries.
"""
