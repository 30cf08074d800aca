"""How a user's own data becomes a table: arrays, frames, data sets and files.

`Given` says what the user said. Each form of data becomes a `Draft` at the door: arrays by name, and facts about the
rows (`objects`, `frames`, `dataset_samples`, and the sources `npz` and `table`). `draft.columns_of` checks every draft
in the same way and makes `Columns`.
"""
