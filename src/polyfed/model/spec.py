"""The `[model]` section of a recipe."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from polyfed.core.errors import ModelError, RecipeError
from polyfed.core.problems import Problems
from polyfed.model import user_classes
from polyfed.model.checks import one_of, probability, sizes, whole
from polyfed.model.encoders.catalogue import encoder_spec
from polyfed.model.fusion import FUSIONS, Adapted, Fusion, WholeRow

MODEL_WIDTHS = ("embedding", "head", "attention_hidden")
"""Fields of the section that `widened` scales."""

CONTROLS = ("controls", "controls_chosen")
"""Fields of the section that only the fusion `controlled` reads."""

WITHOUT_MODULE = ("fusion", "embedding", "head", "dropout", "attention_hidden", "attention_heads", "absent", *CONTROLS)
"""Fields of the section that have no effect if it names a whole module."""

ENCODER_WIDTHS = ("hidden", "channels", "widths", "feedforward")
"""Fields of encoders that `widened` scales. A `Custom` encoder has none of these fields and keeps its size."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model to build: one encoder for each modality, and a fusion that turns their embeddings into logits.

    Attributes:
        fusion: `concat`, `adapted`, `sum`, `gated`, `attention`, `cross-modal` or `controlled`
            (`polyfed.model.fusion`), or your own class that extends `polyfed.model.Fusion`, as `package.module:Class`;
            in Python, also the class itself.
        embedding: width of every encoder's output.
        head: sizes of the hidden layers between fusion and logits, each followed by ReLU.
        dropout: dropout probability after each hidden layer of the head (0.1 in FedMultimodal).
        attention_hidden: width of the scoring network of the fusion `attention` (512 in FedMultimodal).
        attention_heads: number of heads of the fusion `attention` (6 in FedMultimodal).
        controls: number of embedding controls of the fusion `controlled`.
        controls_chosen: how many of them reconfigure a modality of a row.
        encoders: for each modality, a table with `kind` and its options, or an `EncoderSpec`.
        fusion_options: more arguments for the constructor of your own fusion.
        module: a whole `torch.nn.Module` that replaces encoders and fusion, as `package.module:Class`; in Python, also
            the class or a module (docs/models.md).
        module_options: more arguments for the constructor of `module`.
        blocks: for each modality, prefixes of the parameter names in `module` that serve only this modality.
        absent: what takes the place of the embedding of a modality that a row lacks: `zero`; `input`, what the encoder
            makes of a sample of zeros; or `prototypes`, a mean of class prototypes, which `pmcmfl` and evaluations of
            its models set themselves.
        init: where the initial parameters come from (warm start): the folder of a run or of `Run.export`, or a
            safetensors file with names as in a Tree. Empty: they are drawn from the seed.
        init_blocks: the blocks that `init` fills, empty for all; the others are drawn from the seed.
        freeze: blocks of `init` that are neither trained nor sent, and stay in evaluation mode.
    """

    fusion: str = "concat"
    embedding: int = 64
    head: tuple[int, ...] = ()
    dropout: float = 0.0
    attention_hidden: int = 512
    attention_heads: int = 6
    controls: int = 8
    controls_chosen: int = 2
    encoders: Mapping[str, Any] = field(default_factory=dict)
    fusion_options: Mapping[str, Any] = field(default_factory=dict)
    module: Any = None
    module_options: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Literal["zero", "input", "prototypes"] = "zero"
    init: str = ""
    init_blocks: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = Problems()
        checks: dict[str, Callable[[], Any]] = {
            "fusion": self._check_fusion,
            "module": self._check_module,
            "init": self._check_init,
            "controls_chosen": self._check_controls,
            "dropout": lambda: probability("[model] dropout", self.dropout),
            "head": lambda: sizes("[model] head", self.head),
            "absent": self._check_absent,
        }
        for name in ("embedding", "attention_hidden", "attention_heads", "controls"):
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

    def _check_fusion(self) -> None:
        """Check the fusion. Store the user's own fusion in the form that `user_classes.read` returns.

        Raises:
            ModelError: there is no such fusion, or it takes no options.
        """
        if isinstance(self.fusion, str) and ":" not in self.fusion:
            one_of("[model] fusion", self.fusion, FUSIONS)
            if self.fusion_options:
                raise ModelError(
                    f"[model] fusion_options are for a fusion of your own, and fusion = '{self.fusion}' is not: "
                    "remove them.",
                    ("model", "fusion_options"),
                )
        else:
            fusion = user_classes.read("[model] fusion", self.fusion, Fusion, f"one of {', '.join(FUSIONS)}, or ")
            object.__setattr__(self, "fusion", fusion)

    def _check_absent(self) -> None:
        """Check what is absent.

        Raises:
            ModelError: there is no such word, or the fusion completes rows itself.
        """
        one_of("[model] absent", self.absent, ("zero", "input", "prototypes"))
        fusion = FUSIONS.get(self.fusion) if isinstance(self.fusion, str) else None
        if self.absent == "input" and fusion is not None and issubclass(fusion, WholeRow | Adapted):
            raise ModelError(
                f"[model] absent = 'input': the fusion '{self.fusion}' completes rows itself, or joins modalities "
                "before the first layer. Remove absent, or take another fusion, such as 'sum'",
                ("model", "absent"),
            )

    def _check_controls(self) -> None:
        """Check that no more controls are chosen than there are.

        Raises:
            ModelError: there are fewer.
        """
        whole("[model] controls_chosen", self.controls_chosen)
        if isinstance(self.controls, int) and self.controls_chosen > self.controls:
            raise ModelError(
                f"[model] controls_chosen = {self.controls_chosen}: there are only {self.controls} controls. Choose at "
                "most that many, or set controls."
            )

    def _check_init(self) -> None:
        """Check that the options of a warm start have an effect.

        Raises:
            ModelError: there is no `init`, or a block is frozen that `init` does not fill.
        """
        for name in ("init_blocks", "freeze"):
            if getattr(self, name) and not self.init:
                raise ModelError(
                    f"[model] {name} takes values from a warm start, and there is none: set init.", ("model", name)
                )
        if self.freeze and self.module is not None:
            raise ModelError(
                "[model] freeze: a whole module freezes its parameters itself, with requires_grad=False.",
                ("model", "freeze"),
            )
        if strange := [block for block in self.freeze if self.init_blocks and block not in self.init_blocks]:
            raise ModelError(
                f"[model] freeze: init_blocks leaves out '{strange[0]}'. Add it there, or train it.",
                ("model", "freeze"),
            )

    def _check_module(self) -> None:
        """Check the options of a whole module.

        Raises:
            ModelError: encoders are combined with a module, or options of a module are given without one.
        """
        if self.module is None:
            for name in ("module_options", "blocks"):
                if getattr(self, name):
                    raise ModelError(
                        f"[model] {name} belongs to a whole module, and there is none: set module.", ("model", name)
                    )
            return
        object.__setattr__(self, "module", user_classes.read("[model] module", self.module, nn.Module, ""))
        if self.encoders:
            raise ModelError(
                "[model] module replaces encoders and fusion: remove [model.encoders], or module.", ("model", "module")
            )
        given = [f.name for f in fields(self) if f.name in WITHOUT_MODULE and getattr(self, f.name) != f.default]
        if given:
            raise ModelError(
                f"[model] {', '.join(given)}: no effect, because module replaces the whole model. Remove it.",
                ("model", given[0]),
            )
        if isinstance(self.module, nn.Module) and self.module_options:
            raise ModelError(
                "[model] module_options are for a class; module is a module that has been made: remove them.",
                ("model", "module_options"),
            )
        blocks = {m: (prefix,) if isinstance(prefix, str) else tuple(prefix) for m, prefix in self.blocks.items()}
        object.__setattr__(self, "blocks", blocks)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities that the section names."""
        return tuple(self.encoders if self.module is None else self.blocks)

    @property
    def idle(self) -> dict[str, str]:
        """Return the options that have no effect, each with the setting that makes it ineffective."""
        if self.module is not None:
            return dict.fromkeys(WITHOUT_MODULE, "module")
        result = {}
        if self.fusion != "attention":
            result = dict.fromkeys(
                ("attention_hidden", "attention_heads"), f"fusion = {self.classes().get('fusion', self.fusion)!r}"
            )
        if self.fusion != "controlled":
            result |= dict.fromkeys(CONTROLS, f"fusion = {self.classes().get('fusion', self.fusion)!r}")
        if self.fusion in FUSIONS and not self.head:
            result["dropout"] = "an empty head: dropout follows the hidden layers of the head"
        return result

    def classes(self) -> dict[str, str]:
        """Return the options that name the user's own class, as `package.module:Class`."""
        named = {"fusion": self.fusion, "module": self.module}
        return {
            name: user_classes.described(value)
            for name, value in named.items()
            if value is not None and value not in FUSIONS
        }

    def num_ids(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the number of token ids of each modality whose encoder reads ids in samples of these shapes."""
        sizes_of = {name: encoder.num_ids(shapes.get(name, ())) for name, encoder in self.encoders.items()}
        return {name: size for name, size in sizes_of.items() if size}

    def reading(self, modalities: Iterable[str]) -> "ModelSpec":
        """Return the same model for only these modalities."""
        if self.module is None:
            return replace(self, encoders={name: self.encoders[name] for name in modalities})
        return replace(self, blocks={name: self.blocks[name] for name in modalities})

    def widened(self, factor: float) -> "ModelSpec":
        """Return the model with its embedding, hidden sizes and channels multiplied by `factor`; each is at least 1."""
        if factor == 1:
            return self
        if self.module is not None:
            raise ModelError("A whole module has the sizes that it has: it cannot be widened. Use encoders.")
        encoders = {name: _widened(spec, factor, ENCODER_WIDTHS) for name, spec in self.encoders.items()}
        wide: ModelSpec = _widened(self, factor, MODEL_WIDTHS)
        return replace(wide, encoders=encoders)


def _noted(problems: Problems, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """Call a function. If it raises a `RecipeError`, note this error, for the option `key` unless it has a key."""
    try:
        return make()
    except RecipeError as error:
        error.key = error.key or key
        problems.add(error)


def _widened(spec: Any, factor: float, names: Iterable[str]) -> Any:
    def scaled(size: int) -> int:
        return max(1, round(size * factor))

    sizes = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
    changes = {n: scaled(v) if isinstance(v, int) else tuple(map(scaled, v)) for n, v in sizes.items()}
    return replace(spec, **changes)
