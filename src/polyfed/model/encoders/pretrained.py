"""Loads models with the `transformers` library, from a folder or the hub's local cache.

This module downloads nothing, does not run code that is stored with a model, and reads weights only from safetensors
files.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.core.errors import ModelError
from polyfed.core.registry import check_model

_SAFE = {"local_files_only": True, "trust_remote_code": False}
"""Without `trust_remote_code=False`, the library asks in the terminal whether to run a model's code."""

_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout")


def library() -> Any:
    """Import the module `transformers`.

    Raises:
        ModelError: `transformers` is not installed. The text names the extra that installs it.
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ModelError(f"this needs the package 'transformers' ({error}): pip install 'polyfed[text]'") from error


def tokenizer(path: str) -> Any:
    """Load the tokenizer that was saved with a model.

    Raises:
        NotAllowed: the owner of this device has not allowed the model.
        ModelError: there is no such tokenizer, or `transformers` is not installed.
    """
    return _from(path, "tokenizer", lambda transformers: transformers.AutoTokenizer.from_pretrained(path, **_SAFE))


def vocabulary(path: str) -> int | None:
    """Return the number of token ids that a saved model reads; None if it reads no token ids.

    Raises:
        NotAllowed: the owner of this device has not allowed the model.
        ModelError: there is no such model, or `transformers` is not installed.
    """
    config = _from(path, "model", lambda transformers: transformers.AutoConfig.from_pretrained(path, **_SAFE))
    size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    return None if size is None else int(size)


def backbone(path: str) -> nn.Module:
    """Load a backbone in evaluation mode and float32, with plain (not fused) attention without dropout.

    A pooling layer for which the file has no weights is removed, because its weights would be random.

    Args:
        path: folder of a saved model, or its name in the hub's local cache.

    Raises:
        NotAllowed: the owner of this device has not allowed the model.
        ModelError: there is no such model, its file lacks weights, or `transformers` is not installed.
    """
    return _from(path, "model", lambda transformers: _backbone(transformers, path))  # type: ignore[no-any-return]


def _backbone(transformers: Any, path: str) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(path, **_SAFE)
    for name in _ATTENTION_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    found, report = transformers.AutoModel.from_pretrained(
        path,
        config=config,
        attn_implementation="eager",
        use_safetensors=True,  # the other formats are pickles
        output_loading_info=True,
        **_SAFE,
    )
    missing = sorted(report["missing_keys"])
    if any(name.startswith("pooler.") for name in missing):
        found.pooler = None
    lacking = [name for name in missing if not name.startswith("pooler.")]
    if lacking:
        raise ValueError(f"no weights for {lacking[0]} and {len(lacking) - 1} more")
    model: nn.Module = found.float().eval()
    return model


def _from(path: str, what: str, load: Any) -> Any:
    check_model(path)
    transformers = library()
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # a run, its dry run and each worker load the model, and each would draw a bar
    try:
        return load(transformers)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = (
            f" ({error})" if Path(path).exists() else ""
        )  # else the library speaks of a connection that polyfed never makes
        raise ModelError(
            f"'{path}' holds no {what} that can be loaded{why}. Give the folder of a saved model, or fetch it "
            f"into the hub's cache first: hf download {path}"
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()
