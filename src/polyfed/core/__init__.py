"""The types that all parts of polyfed share: Trees, keys, messages, tasks, requests, errors. They import no other room.

- `tree.py`: Trees, flat dictionaries from names to tensors, and their blocks.
- `batch.py`: `Batch`, the rows that a loss receives.
- `keys.py`: random numbers as functions of a key.
- `messages.py`: messages, their parts for policy and ledger, and functions over all their tensors.
- `fields.py`: the declaration of a field of a message.
- `tasks.py`: `@task`, which marks the methods that run on clients.
- `request.py`: `Request`, one question of the server to some clients.
- `option_checks.py`: checks the values of a recipe's section against the types of a dataclass.
- `registry.py`: finds parts of a run by name, or by `package.module:Class`.
- `errors.py`: the exceptions for faults of the user and for failures of a run.
- `vocabulary.py`: words of other frameworks for keys of a recipe.
- `files.py`: names of the files of a run, and writing them safely.
- `stop_signals.py`: handling the signals that stop a process.
- `openmp.py`: the threads of operations on a CPU.
"""
