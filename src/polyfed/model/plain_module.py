"""`PlainModule`: a trained model as an ordinary `torch.nn.Module`, and its export to ONNX."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, RecipeError
from polyfed.core.scaling import Scaling
from polyfed.core.tree import Tree
from polyfed.model.model import Model


class PlainModule(nn.Module):
    """A trained model that takes samples and returns logits, like any module of PyTorch.

    It computes the same as `predict`, always in evaluation mode. Its parameters are copies that require no gradient.

    Args:
        model: the model. The module uses this model, so do not train the model at the same time.
        w: the parameters of the whole model or of a client's part.
        reads: the modalities that `forward` expects, in this order.
        scaling: the shift and the scale of each modality whose samples are not yet scaled. The module applies them.
    """

    def __init__(
        self, model: Model, w: Tree, reads: Sequence[str], scaling: Mapping[str, Scaling] | None = None
    ) -> None:
        super().__init__()
        self.model, self.names, self.reads = model, list(w), tuple(reads)
        for number, value in enumerate(w.values()):
            self.register_buffer(f"w{number}", value.detach().clone())
        place = next(iter(w.values())).device
        self.scaled = {m: number for number, m in enumerate(self.reads) if m in (scaling or {})}
        for m, number in self.scaled.items():
            for part, numbers in (scaling or {})[m]._asdict().items():
                self.register_buffer(f"{part}{number}", numbers.detach().clone().to(place))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Ignore `mode` and stay in evaluation mode, because the module cannot be trained."""
        return super().train(False)

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits (n, C).

        Args:
            x: modality -> samples (n, ...); all modalities of `reads` or some of them. They are not scaled yet.
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
        w = {name: self.get_buffer(f"w{number}") for number, name in enumerate(self.names)}
        own = {m: x[m] for m in self.reads if m in x}
        for m in own.keys() & self.scaled.keys():
            own[m] = Scaling(*(self.get_buffer(f"{part}{self.scaled[m]}") for part in Scaling._fields)).applied(own[m])
        batch = Batch(x=own, y=torch.zeros_like(rows), rows=rows, present=present or {})
        with torch.no_grad():
            return self.model.logits(w, batch)


class _ByPosition(nn.Module):
    """A `PlainModule` whose `forward` takes one positional input for each modality, as ONNX requires."""

    def __init__(self, module: PlainModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *x: Tensor) -> Tensor:
        return self.module(dict(zip(self.module.reads, x, strict=True)))  # type: ignore[no-any-return]


def write_onnx(module: PlainModule, path: Path) -> None:
    """Write a module as an ONNX file.

    The file has one input for each modality, with the modality's name, and the output `logits`.

    The inputs are samples that are not scaled yet, because the exported graph also contains the module's `scaling`. The
    number of rows is dynamic.

    Raises:
        ModelError: PyTorch cannot export this model, or a package that the export needs is not installed.
    """
    samples = tuple(torch.zeros(2, *module.model.shapes[m]) for m in module.reads)
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
    except Exception as error:  # the exporter raises any exception for operations that it does not know
        why = next(iter(str(error).strip().splitlines()), "")
        fix = "pip install 'polyfed[onnx]'" if "not installed" in why else "Set onnx=False"
        raise ModelError(f"this model cannot be written as ONNX ({type(error).__name__}: {why}). {fix}") from error
