"""The trained models of a run: the global model, the clients' own models, and predictions with either."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import PolyfedWarning, RecipeError, UnknownClient, counted, did_you_mean
from polyfed.core.scaling import Scaling
from polyfed.core.tree import Tree
from polyfed.data.column_fitting import Features, samples_from
from polyfed.data.reading.given import Partial
from polyfed.data.reading.objects import is_frame, is_hugging_face
from polyfed.data.sources.own.new_rows import NewRows, RowForm, new_rows, rows_of_file
from polyfed.evaluation.conformal import Conformal, PredictionSets, counts_shape, prediction_sets, sizes_shape
from polyfed.evaluation.predictions import predict, used
from polyfed.evaluation.scores import Predictor
from polyfed.evaluation.subsets import named_by_row
from polyfed.federation.client_registry import ClientRegistry
from polyfed.model import Model, ModelSpec
from polyfed.model.plain_module import PlainModule
from polyfed.objective import Classification, Objective
from polyfed.objective.base import by_target

if TYPE_CHECKING:
    import pandas as pd


DEVIATIONS = 20
"""A feature whose median lies so many deviations from the mean of training is not the same quantity (ours)."""


@dataclass(frozen=True, repr=False)
class Models:
    """The trained models of a run, or of a folder that `Run.export` wrote.

    Attributes:
        algorithm: the algorithm's name.
        spec: the [model] section.
        model: the model, as functions of a Tree of parameters.
        task: what the model learnt to predict; `task.decided` turns predictions into decisions, such as classes.
        predictor: how a client's own model predicts.
        shared: the global model, or None; see `params`.
        clients: client number -> the modalities that this client's model reads.
        tree_of: returns the Tree of one of these clients.
        own: whether clients have models of their own; otherwise each predicts with its part of the global model.
        model_for: to whom an own model belongs: `client`, or `silo` if all devices of a silo share one model.
        class_names: the name of each class, if the data has names.
        elsewhere: why this machine does not have the clients' own models; empty if it has them.
        scaling: modality -> shift and scale of its samples, for each modality that polyfed scaled. `predict`, `module`
            and ONNX files apply it. None means that it is unknown, because the devices of a deployment scaled their
            own rows. Samples must then be scaled already.
        features: modality -> its columns, if [data.columns] makes numbers of their words, empty cells or dates.
            `predict` then takes a data frame with these columns; `module` and ONNX files take the numbers, see
            `numbers`.
        conformal: the counts from which `predict_set` makes sets and intervals, or None if none were counted.
        client_names: client number -> the name of its natural client, if the machine of the run read a table with one.
        rows: how the rows of the run were read, so that `predict` takes a data frame with the same columns.
    """

    algorithm: str
    spec: ModelSpec
    model: Model
    task: Objective
    predictor: Predictor
    shared: Tree | None
    clients: Mapping[int, tuple[str, ...]]
    tree_of: Callable[[int], Tree]
    own: bool
    model_for: str = "client"
    class_names: tuple[str, ...] | None = None
    elsewhere: str = ""
    scaling: Mapping[str, Scaling] | None = None
    features: Mapping[str, Features] = field(default_factory=dict)
    conformal: Conformal | None = None
    rows: RowForm = RowForm()
    client_names: Mapping[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        own = ["clients' own models elsewhere" if self.elsewhere else f"own models of {len(self.clients)} clients"]
        parts = ["a global model"] * (self.shared is not None) + own * self.own
        return f"Models({self.algorithm}: {' and '.join(parts)})"

    @property
    def params(self) -> Tree:
        """The parameters of the global model.

        Raises:
            RecipeError: the algorithm trains no global model.
        """
        if self.shared is None:
            raise RecipeError(
                f"{self.algorithm} has no global model: it trains one model per {self.model_for}. Name the client "
                f"whose model predicts: --client {self._example()} on the command line, in Python "
                f"predict(x, client={next(iter(self.clients), 0)}), used or personal[k]"
            )
        return self.shared

    def _example(self) -> str:
        """Return the name of a client, or its number."""
        first = next(iter(self.clients), 0)
        return shlex.quote(self.client_names.get(first, str(first)))

    @property
    def personal(self) -> "Personal":
        """The clients' own models, by client number.

        Raises:
            RecipeError: the clients' own models are not on this machine, because each client keeps its model.
        """
        self.check_here()
        return Personal(self)

    def predict(self, x: Any, client: int | str | None = None, *, present: Mapping[str, Any] | None = None) -> Tensor:
        """Compute predictions exactly as the evaluation of the run computed them: for classes, logits (n, C).

        Args:
            x: modality -> samples (n, ...) before polyfed shifts and scales them, in the unit of your file or arrays: a
                tensor, an array, a list, or the columns of a data frame. Sequences in a list may differ in length.
                `predict` applies `scaling`. A modality that is left out counts as a zero feature. A row of NaN also
                counts as a zero feature. Or a data frame with the columns of the run's data.
            client: predict with the model of this client: its own model if the algorithm trains one per client,
                otherwise its part of the global model. Modalities that this model does not read are ignored. None
                selects the global model.
            present: modality -> which rows have it, bool (n,). Give this for each modality that some rows lack.

        Raises:
            RecipeError: there is no global model or no such client, or `x` does not fit the model.
            DataError: a data frame lacks columns of a modality, or a cell cannot be read.
        """
        x, present = self._by_name(x, present)
        self._warn_of_far(x)
        return self.computed(x, client, present=present)

    def computed(self, x: Any, client: int | str | None = None, *, present: Mapping[str, Any] | None = None) -> Tensor:
        """As `predict`, for samples by modality of the run's own data, about which nobody needs a warning."""
        w, whose = self.params if client is None else self.of(client), dict[str, Any]()
        if client is not None:
            whose = {"reads": self.clients[self.number_of(client)], "predictor": self.predictor}
        return predict(
            self.model,
            self.task,
            w,
            x,
            present=present,
            scaling=self.scaling,
            vocabularies=self._vocabularies,
            features=self.features,
            **whose,
        )

    def _warn_of_far(self, x: Mapping[str, Any]) -> None:
        """Warn of features whose values are not those of training, as if in another unit; outliers do not count."""
        for name, scaling in (self.scaling or {}).items():
            value = x.get(name)
            if not isinstance(value, Tensor | np.ndarray) or len(value.shape) != 2 or not scaling.shift.dim():
                continue
            values = value.cpu().double() if isinstance(value, Tensor) else torch.from_numpy(value.astype(np.float64))
            if not len(values) or values.shape[1:] != scaling.shift.shape:
                continue  # `predict` says what is wrong with it
            middle = values.nanmedian(0).values
            far = (middle - scaling.shift).abs() / scaling.scale
            place = int(far.nan_to_num().argmax())
            if not far[place] > DEVIATIONS:
                continue
            form = self.rows.modalities.get(name)
            names = form.names if form is not None and len(form.names) == len(far) else ()
            what = f"'{names[place]}'" if names else f"feature {place} (counted from 0)"
            found, mean = float(middle[place]), float(scaling.shift[place])
            warn(
                f"{what} of '{name}' has the median {found:.6g} in these rows; in training its mean was {mean:.6g} and "
                f"its deviation {float(scaling.scale[place]):.6g}. Is it another unit? The answers for such rows are "
                "guesses",
                PolyfedWarning,
                stacklevel=4,
            )

    def predict_set(
        self,
        x: Any,
        coverage: float = 0.9,
        client: int | str | None = None,
        *,
        present: Mapping[str, Any] | None = None,
    ) -> PredictionSets:
        """Return sets of classes, or intervals, that hold the truth with probability `coverage`; see docs/missing.md.

        Args:
            x: the samples, as for `predict`.
            coverage: the promised probability.
            client: predict with the model of this client. The promise then rests on the client's group.
            present: which rows have a modality, as for `predict`.

        Raises:
            RecipeError: no scores were counted, there are too few validation rows for this coverage, a row has no
                modality, or `x` does not fit the model.
        """
        self._counts()
        x, present = self._by_name(x, present)
        self._warn_of_far(x)
        return self.computed_sets(x, coverage, client, present=present)

    def _counts(self) -> Conformal:
        """Return the counts of scores, or refuse because nobody counted them."""
        if self.conformal is None:
            raise RecipeError(
                "nobody has counted how well this model predicts validation rows. Run with [evaluate] conformal = "
                "'split' and validation rows, such as [clients] validation = 0.2. The model of the best round has no "
                "counts, only that of the last"
            )
        return self.conformal

    def computed_sets(
        self, x: Any, coverage: float, client: int | str | None = None, *, present: Mapping[str, Any] | None = None
    ) -> PredictionSets:
        """As `predict_set`, for samples by modality of the run's own data, about which nobody needs a warning."""
        counts = self._counts()
        predicted = self.computed(x, client, present=present)
        names = self.used(x, client, present=present)
        number = None if client is None else self.number_of(client)
        group = counts.group_of(number, () if number is None else self.clients[number])
        classes = isinstance(self.task, Classification)
        return prediction_sets(
            counts, predicted, names, group, coverage, of_classes=classes, class_names=self.class_names
        )

    def predict_frame(
        self,
        x: Any,
        client: int | str | None = None,
        *,
        coverage: float | None = None,
        present: Mapping[str, Any] | None = None,
        partial: Partial | None = None,
        ids: Sequence[str] = (),
    ) -> "pd.DataFrame":
        """Return the answer for each row by name.

        Args:
            x: the samples, as for `predict`, or the path of a file, which is read as the data of the run were.
            client: predict with the model of this client, as `predict` does.
            coverage: also return sets or intervals that hold the truth with this probability; see `predict_set`.
            present: which rows have a modality, as for `predict`.
            partial: what to do with a row that has only some cells of a modality. If None, as for the run.
            ids: columns that name the rows, by default the run's column of ids, if `x` has it.

        Returns:
            A line for each row: its ids, `prediction`, `probability.CLASS`, `used` (the modalities that the prediction
            uses, such as `audio+text`), and with `coverage` a `set` of classes, or `low` and `high`. A row that has no
            modality which the model reads gets no prediction. Several targets have columns of their own, as in
            `prediction.TARGET`.

        Raises:
            RecipeError: as for `predict` and `predict_set`.
            DataError: the rows lack columns of a modality, or a cell cannot be read.
        """
        new = self.read(x, partial=partial, ids=ids)
        for note in () if new is None else new.filled:
            warn(note, PolyfedWarning, stacklevel=3)
        samples, there, names = (x, present, None) if new is None else (new.x, _both(new.present, present), new.ids)
        used = self.used(samples, client, present=there)
        number = None if client is None else self.number_of(client)
        return answers(self, samples, there, used, number, coverage, names)

    def read(self, x: Any, *, partial: Partial | None = None, ids: Sequence[str] = ()) -> NewRows | None:
        """Read rows by the names of their columns, and warn of what they lack. None if `x` has no such names.

        Args:
            x: a data frame, the path of a file, or samples by modality.
            partial: as for `predict_frame`.
            ids: as for `predict_frame`.

        Raises:
            RecipeError: nobody knows the columns of the run's data.
            DataError: the rows lack columns of a modality, or a cell cannot be read.
        """
        path = isinstance(x, str | Path)
        if not path and not is_frame(x) and not is_hugging_face(x):
            return None
        form = self.rows if partial is None else replace(self.rows, partial=partial)
        if lacking := [name for name in self.model.modalities if name not in form.modalities]:
            raise RecipeError(
                f"nobody knows which columns hold '{lacking[0]}', because the run's data were no table. Give the "
                f"samples of each modality, as in predict({{'{lacking[0]}': array}})"
            )
        where = f"'{x}'" if path else "x"
        rows = rows_of_file(x, form, self.features, ids) if path else x.to_pandas() if is_hugging_face(x) else x
        place = Path(x).expanduser() if path else None
        folder = place if place is None or place.is_dir() else place.parent
        return new_rows(rows, form, self.features, self.model.shapes, where, ids, folder)

    def _by_name(self, x: Any, present: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
        """Return samples by modality, if `x` is a data frame, or has some among its values."""
        if (new := self.read(x)) is not None:
            return new.x, _both(new.present, present)
        result, there = x, dict(present or {})
        for name, value in x.items() if isinstance(x, Mapping) else ():
            form = self.rows.modalities.get(name)
            if form is None or not is_frame(value) or not {*map(str, value.columns)} & {*form.names}:
                continue
            own = replace(self.rows, modalities={name: form})
            new = new_rows(value, own, self.features, self.model.shapes, f"x['{name}']")
            result, there = {**result, **new.x}, dict(_both(new.present, there) or {})
        return result, there or None

    def used(
        self, x: Any, client: int | str | None = None, *, present: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return which modalities `predict` uses for these samples: modality -> bool (n,), for each one that it reads.

        Args:
            x: the samples, as for `predict`.
            client: the client, as for `predict`.
            present: which rows have a modality, as for `predict`.

        Raises:
            RecipeError: there is no global model or no such client, or `x` does not fit the model.
        """
        x, present = self._by_name(x, present)
        if client is None:
            _, reads = self.params, tuple(self.model.modalities)
        else:
            self.of(client)
            reads = self.clients[self.number_of(client)]
        return used(
            self.model, x, reads=reads, present=present, vocabularies=self._vocabularies, features=self.features
        )

    def numbers(self, modality: str, value: Any) -> Tensor:
        """Return the numbers (n, F) of the rows of a table, as `module` and ONNX files take them.

        Args:
            modality: a modality with columns in [data.columns].
            value: a data frame with these columns, or rows of cells.

        Raises:
            RecipeError: the modality has no such columns.
            DataError: a column is missing, or a cell cannot be read.
        """
        if modality not in self.features:
            raise RecipeError(f"'{modality}' has no columns in [data.columns]: its samples are numbers already")
        return samples_from(self.features[modality], value, f"x['{modality}']").to(torch.float32)

    @property
    def _vocabularies(self) -> dict[str, int]:
        """The number of token ids that each encoder of token ids reads."""
        return self.spec.num_ids(self.model.shapes)

    def module(self, client: int | str | None = None) -> PlainModule:
        """The global model, or that of a client, as an ordinary `torch.nn.Module` from samples to predictions.

        The module takes the same samples as `predict` and returns the same numbers. It applies `scaling`. For
        regression, it also returns its predictions in the unit of the targets.

        Args:
            client: whose model; see `predict`.

        Raises:
            RecipeError: there is no such model, or the method's predictions depend on more than the model's logits.
        """
        if client is None:
            return PlainModule(self.model, self.params, self.model.modalities, self.scaling, self._predicted)
        if type(self.predictor) is not Predictor:
            raise RecipeError(
                f"a client's model of {self.algorithm} predicts by {type(self.predictor).__name__}, not by its logits "
                "alone: use predict(x, client=...)"
            )
        read = [m for m in self.model.modalities if m in self.clients.get(self.number_of(client), ())]
        return PlainModule(self.model, self.of(client), read, self.scaling, self._predicted)

    @property
    def _predicted(self) -> Callable[[Model, Tree, Batch], Tensor]:
        """A function that returns the predictions of the task. It refers to the task only, not to all models."""
        task = self.task
        return lambda model, w, batch: task.predicted(task.outputs(model, w, batch))

    def of(self, client: int | str) -> Tree:
        """The parameters that a client predicts with.

        Raises:
            UnknownClient: there is no such client.
            RecipeError: the clients' own models are not on this machine, because each client keeps its model.
        """
        self.check_here()
        return self.tree_of(self.number_of(client))

    def number_of(self, client: int | str) -> int:
        """Return the number of a client, given its number or the name of its natural client, which has precedence.

        Raises:
            UnknownClient: there is no such client, or several have this name.
        """
        named = [number for number, name in self.client_names.items() if name == client]
        if len(named) == 1:
            return named[0]
        if isinstance(client, str) and not named and client.isascii() and client.isdecimal():
            client = int(client)
        if isinstance(client, str) and self.client_names:
            hint = did_you_mean(client, list(self.client_names.values()))
            few = f"clients {', '.join(map(str, named[:5]))} are parts of it" if named else hint
            raise UnknownClient(f"client = {client!r}: there is no such client, or not one alone; {few}")
        if isinstance(client, bool) or not isinstance(client, Integral) or client not in self.clients:
            raise UnknownClient(f"client = {client!r}: there is no such client. {_allowed(list(self.clients))}")
        return int(client)

    def check_here(self) -> None:
        """Raise a RecipeError if the clients have models of their own that are not on this machine."""
        if self.own and self.elsewhere:
            raise RecipeError(self.elsewhere)


class ClientModalities(Mapping[int, tuple[str, ...]]):
    """Client number -> the modalities that the client's model reads, without the clients that have no modality.

    Each value is computed on access, because a dictionary for a million clients would take 150 MB.

    Args:
        registry: the facts about all clients.
        reads: returns the modalities that the model of a client reads.
    """

    def __init__(self, registry: ClientRegistry, reads: Callable[[int], tuple[str, ...]]) -> None:
        self._registry, self._reads = registry, reads

    def __getitem__(self, client: int) -> tuple[str, ...]:
        if client not in self:
            raise KeyError(client)
        return self._reads(int(client))

    def __contains__(self, client: object) -> bool:
        if not isinstance(client, Integral) or not 0 <= int(client) < len(self._registry):
            return False
        return bool(self._registry.owned(int(client)))

    def __iter__(self) -> Iterator[int]:
        return (client for client in self._registry if self._registry.owned(client))

    def __len__(self) -> int:
        return int(self._registry.holds.any(1).sum())


class Personal(Mapping[int, Tree]):
    """The clients' own models, each assembled on access; empty if the algorithm trains none."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def __getitem__(self, client: int) -> Tree:
        """A copy of the client's model.

        Raises:
            UnknownClient: the client has no model of its own.
        """
        if not self._models.own:
            raise UnknownClient(f"{self._why_empty()}. Use params, or predict(x, client={client!r})")
        return self._models.of(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._models.clients if self._models.own else ())

    def __len__(self) -> int:
        return len(self._models.clients) if self._models.own else 0

    def __contains__(self, client: object) -> bool:
        return self._models.own and client in self._models.clients

    def __repr__(self) -> str:
        return f"Personal({len(self)} models)" if self._models.own else f"Personal(empty: {self._why_empty()})"

    def _why_empty(self) -> str:
        return f"{self._models.algorithm} trains one global model, and no client has a model of its own"


def answers(
    models: Models,
    x: Mapping[str, Any],
    present: Mapping[str, Any] | None,
    used: Mapping[str, Tensor],
    client: int | None,
    coverage: float | None,
    ids: "pd.DataFrame | None",
) -> "pd.DataFrame":
    """Return the data frame of `Models.predict_frame`.

    Args:
        x: the samples by modality.
        present: which rows have a modality.
        used: which modalities the prediction of each row uses.
        client: predict with the model of this client, or None.
        coverage: also return sets or intervals that hold the truth with this probability.
        ids: the columns that name the rows, with their index, or None.
    """
    import pandas as pd  # imported here, because the import takes half a second

    known = torch.stack(list(used.values()), 1).cpu().any(1)
    predicted = models.predict(x, client, present=present).cpu()
    found: dict[str, Any] = {} if ids is None else {name: ids[name].tolist() for name in ids.columns}
    found |= models.task.answers(predicted, models.class_names)
    if coverage is not None:
        found |= _sets(models, x, present, client, coverage, known)
    found["used"] = named_by_row(used)
    frame = pd.DataFrame(found, index=None if ids is None else ids.index)
    if not bool(known.all()):
        warn(
            f"{counted(int((~known).sum()), 'row has', 'rows have')} no modality that the model reads, first row "
            f"{int((~known).int().argmax())}, and so no prediction",
            PolyfedWarning,
            stacklevel=4,
        )
        told = [name for name in frame.columns if name.partition(".")[0] in ("prediction", "probability")]
        frame[told] = frame[told].astype(object).where(pd.Series(known.numpy(), frame.index), None)
    return frame


def _sets(
    models: Models,
    x: Mapping[str, Any],
    present: Mapping[str, Any] | None,
    client: int | None,
    coverage: float,
    known: Tensor,
) -> dict[str, list[Any]]:
    """Return the columns of `predict_frame` with sets or intervals, empty for rows without a modality."""
    some = {name: value[known] for name, value in x.items()}
    held = {name: torch.as_tensor(rows, dtype=torch.bool)[known] for name, rows in (present or {}).items()}
    sets = models.predict_set(some, coverage, client, present=held or None)
    if sets.sets is not None:
        rest = iter(sets.classes)
        return {"set": [next(rest) if has else None for has in known.tolist()]}
    result: dict[str, list[Any]] = {}
    for end, values in (("low", sets.low), ("high", sets.high)):
        assert values is not None, "a regression has intervals"
        every = values.new_full((len(known), values.shape[1]), torch.nan)
        every[known] = values
        result |= by_target(end, every, models.class_names)
    return result


def _both(one: Mapping[str, Tensor], other: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return which rows have each modality according to both masks."""
    result: dict[str, Any] = dict(one)
    for name, rows in (other or {}).items():
        mask = torch.as_tensor(rows, dtype=torch.bool)
        result[name] = result[name] & mask if name in result and len(result[name]) == len(mask) else mask
    return result or None


def read_conformal(said: Mapping[str, Any] | None, model: Model, task: Objective) -> Conformal | None:
    """Return the counts for `predict_set` from an entry of result.json or model.json.

    Raises:
        ValueError: the entry is damaged.
    """
    if said is None:
        return None
    _, groups, bins = counts_shape("class" if said.get("kind") == "class" else "split", model, task)
    return Conformal.read(said, (groups, bins), sizes_shape(model))


def _allowed(clients: Sequence[int]) -> str:
    """Describe, for an error, which client numbers exist."""
    if not clients:
        return "There are no clients"
    if len(clients) == clients[-1] + 1:
        return f"Clients are numbers from 0 to {clients[-1]}"
    return f"Clients are {', '.join(map(str, clients[:8]))}{', ...' if len(clients) > 8 else ''}"
