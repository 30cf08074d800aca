"""The `[model]` section of a recipe."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from polyfed.core.errors import RecipeError
from polyfed.core.problems import Problems
from polyfed.model.checks import one_of, probability, sizes, whole
from polyfed.model.encoders import encoder_spec
from polyfed.model.fusion import FUSIONS

_ENCODERS = ("model", "encoders")

MODEL_WIDTHS = ("embedding", "head", "attention_hidden")
"""Fields of the section that `widened` scales."""

ENCODER_WIDTHS = ("hidden", "channels", "widths", "feedforward")
"""Fields of encoders that `widened` scales; a `Custom` encoder has none of them and keeps its size."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What model to build: one encoder for each modality, and how their embeddings become logits.

    Attributes:
        fusion: `concat`, `sum`, `gated` or `attention`; see `polyfed.model.fusion`.
        embedding: width of every encoder's output.
        head: sizes of the hidden layers between the fusion and the logits, each followed by ReLU.
        dropout: dropout probability after each hidden layer of the head (0.1 in FedMultimodal).
        attention_hidden: width of the scoring network of `attention` (512 in FedMultimodal).
        attention_heads: number of weighted sums of `attention` (6 in FedMultimodal).
        encoders: for each modality, a table with `kind` and its options, or an `EncoderSpec`.
    """

    fusion: Literal["concat", "sum", "gated", "attention"] = "concat"
    embedding: int = 64
    head: tuple[int, ...] = ()
    dropout: float = 0.0
    attention_hidden: int = 512
    attention_heads: int = 6
    encoders: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        checks: dict[str, Callable[[], Any]] = {
            "fusion": lambda: one_of("[model] fusion", self.fusion, FUSIONS),
            "dropout": lambda: probability("[model] dropout", self.dropout),
            "head": lambda: sizes("[model] head", self.head),
        }
        for name in ("embedding", "attention_hidden", "attention_heads"):
            checks[name] = partial(whole, f"[model] {name}", getattr(self, name))
        for name, check in checks.items():
            _noted(problems, ("model", name), check)
        specs = {
            name: _noted(
                problems, ("model", "encoders", name), partial(encoder_spec, f"[model.encoders] {name}", entry)
            )
            for name, entry in self.encoders.items()
        }
        problems.raise_all()
        object.__setattr__(self, "head", tuple(self.head))
        object.__setattr__(self, "encoders", specs)

    def widened(self, factor: float) -> "ModelSpec":
        """The same model with its embedding, hidden sizes and channels multiplied by `factor`, at least 1 each."""
        if factor == 1:
            return self
        encoders = {name: _widened(spec, factor, ENCODER_WIDTHS) for name, spec in self.encoders.items()}
        wide: ModelSpec = _widened(self, factor, MODEL_WIDTHS)
        return replace(wide, encoders=encoders)


def _noted(problems: Problems, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """Call a function; a fault that it raises is noted as one of the option `key`."""
    try:
        return make()
    except RecipeError as error:
        error.key = key
        problems.add(error)


def _widened(spec: Any, factor: float, names: Iterable[str]) -> Any:
    def scaled(size: int) -> int:
        return max(1, round(size * factor))

    sizes = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
    changes = {n: scaled(v) if isinstance(v, int) else tuple(map(scaled, v)) for n, v in sizes.items()}
    return replace(spec, **changes)
