"""Models of `transformers` small enough to be written to disk by a test: 16 wide, one layer."""

import warnings

import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    MobileNetV2Config,
    MobileNetV2Model,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperModel,
)
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "a", "user", "0", "1", "2", "3")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def text_model(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SMALL)
        BertModel(config).save_pretrained(folder)
        BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def patch_model(folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ViTConfig(image_size=32, patch_size=16, **SMALL)
        ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def image_model(folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MobileNetV2Model(MobileNetV2Config(image_size=32, depth_multiplier=0.1)).save_pretrained(folder)
    return folder


def two_towers(folder):
    """A CLIP with both towers."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        words = {**SMALL, "vocab_size": 20, "max_position_embeddings": 16, "projection_dim": 8, "pad_token_id": 1}
        words |= {"bos_token_id": 2, "eos_token_id": 3}
        config = CLIPConfig(text_config=words, vision_config={**SMALL, "image_size": 32, "patch_size": 16})
        CLIPModel(config).save_pretrained(folder)
    return folder


def sound_model(folder):
    """A Whisper that reads 8 mel bands and 12 time steps."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        layers = {
            f"{part}_{what}": n
            for part in ("encoder", "decoder")
            for what, n in (("layers", 1), ("ffn_dim", 32), ("attention_heads", 2))
        }
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config = WhisperConfig(
            vocab_size=20, d_model=16, num_mel_bins=8, max_source_positions=6, max_target_positions=8, **layers, **ids
        )
        WhisperModel(config).save_pretrained(folder)
    return folder
