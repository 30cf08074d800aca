"""The model that is trained: an encoder for each modality, and a fusion of their embeddings into logits.

`model.py` has `Model`, a pure function of a Tree and a batch, and `build.py` makes it from `[model]`. `encoders` holds
what a recipe can name; `modules` runs PyTorch modules on a Tree; `whole_module.py` takes the user's own module.
"""

from polyfed.model.build import build_model
from polyfed.model.encoders.catalogue import ENCODERS, Custom, default_encoder, encoder_spec
from polyfed.model.encoders.hugging_face import HuggingFace
from polyfed.model.encoders.images import Cnn4, ResNet18
from polyfed.model.encoders.sequences import ConvGru, TokenTransformer, Transformer
from polyfed.model.encoders.spec import EncoderSpec, Mlp
from polyfed.model.fusion import FUSIONS, Fusion
from polyfed.model.model import Model
from polyfed.model.spec import ModelSpec

__all__ = [
    "ENCODERS",
    "FUSIONS",
    "Cnn4",
    "ConvGru",
    "Custom",
    "EncoderSpec",
    "Fusion",
    "HuggingFace",
    "Mlp",
    "Model",
    "ModelSpec",
    "ResNet18",
    "TokenTransformer",
    "Transformer",
    "build_model",
    "default_encoder",
    "encoder_spec",
]
