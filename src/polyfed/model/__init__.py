"""The model that is trained: an encoder for each modality, and a fusion of their embeddings into logits.

- `model.py`: `Model`, a pure function of a Tree and a batch.
- `spec.py`: `ModelSpec`, the `[model]` section of a recipe.
- `build.py`: makes a model from that section and the shapes of the data.
- `encoder_spec.py`: `EncoderSpec`, the base of all encoders, and the multilayer perceptron.
- `image_encoders.py`, `sequence_encoders.py`, `hugging_face.py`: encoders of images and clips, of time series, and
  pre-trained encoders.
- `default_encoders.py`: the default encoder of a modality for which a recipe names no encoder.
- `encoders.py`: the encoders that a recipe can name, and the user's own encoders.
- `fusion.py`: the fusions that a recipe can name.
- `user_classes.py`: the user's own fusions and whole modules.
- `whole_module.py`, `whole_module_checks.py`: a whole module as the model, and its checks before the run.
- `trial_calls.py`: checks the user's own code with trial calls.
- `layer_replacement.py`: replaces layers of a PyTorch module that depend on the batch.
- `layers.py`: the replacement layers: BatchNorm, dropout, GRU and attention.
- `parameter_slots.py`: runs modules on the tensors of a Tree.
- `plain_module.py`: a trained model as an ordinary module, and as ONNX.
- `seeded_modules.py`: makes modules from a random key, and counts their operations.
- `lora.py`: LoRA for pre-trained encoders, with the `peft` library.
- `recompute.py`: gradient checkpointing.
- `pretrained.py`: loads models with the `transformers` library.
- `checks.py`: checks of the values in `[model]`.
"""

from polyfed.model.build import build_model
from polyfed.model.encoders.catalogue import ENCODERS, Custom, encoder_spec
from polyfed.model.encoders.defaults import default_encoder
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
