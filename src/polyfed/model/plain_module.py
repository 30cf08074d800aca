"""`PlainModule`: a trained model as an ordinary `torch.nn.Module`, and its export to ONNX."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, RecipeError
from polyfed.core.scaling import Scaling
from polyfed.core.tree import Tree
from polyfed.model.model import Model


class PlainModule(nn.Module):
    """A trained model that takes samples and returns predictions, like any module of PyTorch.

    It computes the same as `predict`, always in evaluation mode. Its parameters are copies, which require no gradient
    until you call `requires_grad_()`. Parameters and buffers have their names in the Tree, after `tensors.`.

    Args:
        model: the model. The module uses this model, so do not train the model at the same time.
        w: the parameters of the whole model or of a client's part.
        reads: the modalities that `forward` expects, in this order.
        scaling: the shift and the scale of each modality whose samples are not yet scaled. The module applies them.
        predicted: returns the predictions (n, ...) of the task for a model, its parameters and a batch.
    """

    def __init__(
        self,
        model: Model,
        w: Tree,
        reads: Sequence[str],
        scaling: Mapping[str, Scaling] | None,
        predicted: Callable[[Model, Tree, Batch], Tensor],
    ) -> None:
        super().__init__()
        self.model, self.reads, self.predicted = model, tuple(reads), predicted
        self.tensors = nn.Module()
        self.paths = {name: self._register(name, value.detach().clone()) for name, value in w.items()}
        place = next(iter(w.values())).device
        self.scaled = {m: number for number, m in enumerate(self.reads) if m in (scaling or {})}
        for m, number in self.scaled.items():
            for part, numbers in (scaling or {})[m]._asdict().items():
                self.register_buffer(f"{part}{number}", numbers.detach().clone().to(place))
        self.eval()

    def takes(self, modality: str) -> torch.dtype:
        """Return the type of samples that keeps their precision: float64 where float32 cannot tell the values apart."""
        number = self.scaled.get(modality)
        return torch.float32 if number is None else self.get_buffer(f"shift{number}").dtype

    def train(self, mode: bool = True) -> Self:
        """Ignore `mode` and stay in evaluation mode: dropout would need a batch's key, which the module lacks."""
        return super().train(False)

    def _register(self, name: str, value: Tensor) -> str:
        """Register a parameter or a buffer, and return its path in this module."""
        *parts, last = name.split(".")
        holder, path = self.tensors, "tensors"
        for part in parts:
            taken = hasattr(holder, part) and part not in holder._modules
            key = f"{part}_" if taken else part  # an nn.Module has attributes such as `type`
            if key not in holder._modules:
                holder.add_module(key, nn.Module())
            holder, path = holder.get_submodule(key), f"{path}.{key}"
        key = f"{last}_" if hasattr(holder, last) else last
        if self.model.is_buffer(name):
            holder.register_buffer(key, value)
        else:
            holder.register_parameter(key, nn.Parameter(value, requires_grad=False))
        return f"{path}.{key}"

    def _tensor(self, path: str) -> Tensor:
        holder, _, key = path.rpartition(".")
        result: Tensor = getattr(self.get_submodule(holder), key)
        return result

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor] | None = None) -> Tensor:
        """Predictions (n, ...) as `predict` returns them: for classes, logits (n, C).

        Args:
            x: modality -> samples (n, ...); all modalities of `reads` or some of them. They are not scaled yet. They
                have any real type. A row whose entries are all NaN lacks the modality. If a row is partly NaN, its
                predictions are NaN; `predict` refuses such a row.
            present: modality -> bool (n,), for modalities that some rows lack.

        Raises:
            RecipeError: samples are not tensors.
        """
        if others := [m for m, value in x.items() if not isinstance(value, Tensor)]:
            m = others[0]
            raise RecipeError(
                f"x['{m}'] is a {type(x[m]).__name__}: a module takes tensors, as in torch.as_tensor(x['{m}']). "
                "`predict` also takes arrays"
            )
        first = next(iter(x.values()))
        rows = torch.arange(first.shape[0], device=first.device)
        w = {name: self._tensor(path) for name, path in self.paths.items()}
        own, there = {}, dict(present or {})
        for m in self.reads:
            if m in x:
                own[m], there[m] = _present_rows(x[m], there.get(m))
        for m in own.keys() & self.scaled.keys():
            own[m] = Scaling(*(self.get_buffer(f"{part}{self.scaled[m]}") for part in Scaling._fields)).applied(own[m])
        own = {m: value.to(torch.float32) for m, value in own.items()}
        return self.predicted(self.model, w, Batch(x=own, y=torch.zeros_like(rows), rows=rows, present=there))


def _present_rows(value: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return samples with zeros in rows of NaN, and which rows have the modality, bool (n,).

    There are no branches on values, so that ONNX files and exported programs do the same.
    """
    there = torch.ones_like(value.reshape(value.shape[0], -1)[:, 0], dtype=torch.bool) if present is None else present
    if value.is_floating_point():
        missing = value.isnan().flatten(1).all(1) if value.dim() > 1 else value.isnan()
        there = there & ~missing
        value = torch.where(there.reshape(-1, *(1,) * (value.dim() - 1)), value, torch.zeros_like(value))
    return value, there


class _ByPosition(nn.Module):
    """A `PlainModule` whose `forward` takes one positional input for each modality, as ONNX requires."""

    def __init__(self, module: PlainModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *x: Tensor) -> Tensor:
        return self.module(dict(zip(self.module.reads, x, strict=True)))  # type: ignore[no-any-return]


def write_onnx(module: PlainModule, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a module as an ONNX file.

    The file has one input for each modality, with the modality's name, and the output `logits`, which holds
    the predictions of the task.

    The inputs are samples that are not scaled yet, because the exported graph also contains the module's `scaling`. The
    number of rows is dynamic.

    Args:
        facts: what the file says about itself, such as its classes: keys and JSON values of its metadata.

    Raises:
        ModelError: PyTorch cannot export this model, or a package that the export needs is not installed.
    """
    samples = tuple(torch.zeros(2, *module.model.shapes[m], dtype=module.takes(m)) for m in module.reads)
    names = list(module.reads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch announces its newer exporter, which needs `onnxscript`
            torch.onnx.export(
                _ByPosition(module).eval(),
                samples,
                str(path),
                input_names=names,
                output_names=["logits"],
                dynamic_axes={name: {0: "rows"} for name in (*names, "logits")},
                dynamo=False,
            )
        _describe(path, facts)
    except Exception as error:  # the exporter raises any exception for operations that it does not know
        why = next(iter(str(error).strip().splitlines()), "")
        fix = "pip install 'polyfed[onnx]'" if "not installed" in why else "Set onnx=False"
        raise ModelError(f"this model cannot be written as ONNX ({type(error).__name__}: {why}). {fix}") from error


def _describe(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts into the metadata of an ONNX file."""
    import onnx

    model = onnx.load(path)
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in facts.items()})
    onnx.save(model, path)
