"""A small data set of two modalities, of which some rows lack the second."""

import numpy as np
import pandas as pd

ROWS = 40
AUDIO = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
TEXT = np.random.default_rng(1).normal(size=(ROWS, 2)).astype(np.float32)
LABEL = np.arange(ROWS) % 3
WORDS = np.array(["cat", "dog", "owl"])[LABEL]
WHO = np.array([f"s{row % 4}" for row in range(ROWS)])
HAS_TEXT = np.arange(ROWS) % 5 != 0


def frame():
    held = pd.DataFrame(AUDIO, columns=["audio_0", "audio_1", "audio_2"])
    held[["text.a", "text.b"]] = np.where(HAS_TEXT[:, None], TEXT, np.nan)
    return held.assign(label=WORDS, client=WHO)
