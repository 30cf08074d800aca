"""How a user's own data becomes a table: arrays, frames, data sets and files."""
