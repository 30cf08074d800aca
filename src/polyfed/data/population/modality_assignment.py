"""The assignment of modalities to clients; docs/partitions.md has the rules."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.data.population.clients import ClientsSpec


def assign(spec: ClientsSpec, modalities: Sequence[str], num: int, key: int) -> Tensor:
    """Return which modalities each client may hold. Every client holds at least one.

    Args:
        spec: `[clients]`. The modalities of the clients follow from its option `holdings`, `keep_both`, `only` or
            `missing`, or from its partition `silos`.
        modalities: The M modalities of the data, in order.
        num: Number of clients K.
        key: Key of the random numbers.

    Returns:
        bool (K, M).

    Raises:
        RecipeError: An option names a modality or a client that does not exist, or leaves a client without a modality.
    """
    if spec.holdings is not None:
        return _cycle(spec.holdings, modalities, num)
    if spec.partition == "silos":
        return _cycle([[name] for name in modalities], modalities, num)
    if spec.keep_both is not None:
        return _keep_both(spec.keep_both, len(modalities), num, key)
    if spec.only:
        return _only(spec, modalities, num)
    return _missing(spec, modalities, num, key)


def devices_per_silo(spec: ClientsSpec, modalities: Sequence[str]) -> int:
    """Return the number of clients that share the rows of one silo."""
    return len(modalities) if spec.holdings is None else len(spec.holdings)


def _cycle(holdings: Sequence[Iterable[str]], modalities: Sequence[str], num: int) -> Tensor:
    table = torch.zeros(len(holdings), len(modalities), dtype=torch.bool)
    for line, names in enumerate(holdings):
        for name in names:
            table[line, _place(name, modalities, "clients.holdings")] = True
    return table[torch.arange(num) % len(holdings)]


def _keep_both(share: float, num_modalities: int, num: int, key: int) -> Tensor:
    order = torch.from_numpy(keys.generator(key).permutation(num))
    both = int(share * num + 1e-9)
    rest = num - both
    holds = torch.zeros(num, num_modalities, dtype=torch.bool)
    holds[order[:both]] = True
    for place in range(num_modalities):
        start, end = rest * place // num_modalities, rest * (place + 1) // num_modalities
        holds[order[both + start : both + end], place] = True
    return holds


def _only(spec: ClientsSpec, modalities: Sequence[str], num: int) -> Tensor:
    holds = torch.ones(num, len(modalities), dtype=torch.bool)
    seen: dict[int, str] = {}
    for name, clients in spec.only.items():
        place = _place(name, modalities, "clients.only")
        for client in clients:
            if not 0 <= client < num:
                raise RecipeError(
                    f"clients.only.{name} lists client {client}; allowed: 0..{num - 1}", ("clients", "only", name)
                )
            if client in seen:
                raise RecipeError(
                    f"clients.only lists client {client} twice: under {seen[client]} and {name}", ("clients", "only")
                )
            seen[client] = name
            holds[client] = torch.arange(len(modalities)) == place
    return holds


def _missing(spec: ClientsSpec, modalities: Sequence[str], num: int, key: int) -> Tensor:
    holds = torch.ones(num, len(modalities), dtype=torch.bool)
    for name in spec.missing:
        _place(name, modalities, "clients.missing")
    for place, name in enumerate(modalities):
        count = round(spec.missing.get(name, 0.0) * num)
        if not count:
            continue
        order = torch.from_numpy(keys.generator(keys.key(key, name)).permutation(num))
        # a client keeps the modality if it has no other
        able = order[holds[order].sum(1) > 1]
        if count > len(able):
            raise RecipeError(
                f"clients.missing.{name} = {spec.missing[name]} takes it from {count} of {num} clients, "
                f"but only {len(able)} still hold another modality; lower the shares",
                ("clients", "missing", name),
            )
        holds[able[:count], place] = False
    return holds


def _place(name: str, modalities: Sequence[str], where: str) -> int:
    if name not in modalities:
        raise RecipeError(f"{where} names modality '{name}', which the data lacks; {did_you_mean(name, modalities)}")
    return list(modalities).index(name)
