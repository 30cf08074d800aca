"""What a run gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        result: what result.json holds.
        rounds: what rounds.jsonl holds.
        state: the final server state.
        model: the model, as functions of `state.params`; see `predict`.
        folder: where the files are, or None.
    """

    result: dict[str, Any]
    rounds: list[dict[str, Any]]
    state: Any
    model: Model
    folder: Path | None

    def __repr__(self) -> str:
        """In short: `state` and `model` hold a model's worth of numbers."""
        evaluated = self.result["metrics"].get("global", self.result["metrics"].get("personal", {}))
        score = next((f", {name} {evaluated[name]:.4f}" for name in ("accuracy", "mean") if name in evaluated), "")
        where = "" if self.folder is None else f", files in {self.folder}"
        return f"Run({self.result['algorithm']} on {self.result['dataset']}, {len(self.rounds)} rounds{score}{where})"

    @property
    def history(self) -> "pd.DataFrame":
        """One row a round; nested values under dotted names, as `metrics.global.accuracy`."""
        import pandas as pd  # half a second that a client which starts for every ask need not wait

        return pd.json_normalize(self.rounds)

    @property
    def params(self) -> Tree:
        """The final global model."""
        params: Tree = self.state.params
        return params

    def predict(self, x: Mapping[str, Tensor]) -> Tensor:
        """Logits (n, C) of the final global model.

        Args:
            x: modality -> samples (n, ...), as the data set gives them (standardised as it was); a modality that is
                left out is a zero feature, as in a client that lacks it.
        """
        n = len(next(iter(x.values())))
        place = next(iter(self.params.values())).device
        rows = torch.arange(n, device=place)
        samples = {m: value.to(place, torch.float32) for m, value in x.items()}
        with torch.no_grad():
            return self.model.logits(self.params, Batch(x=samples, y=torch.zeros_like(rows), rows=rows))


def best_round(rounds: Sequence[dict[str, Any]], metric: str = "macro_f1") -> dict[str, Any] | None:
    """The round with the best validation macro-F1 (the first of equals) and its metrics; None without validation."""
    evaluated = [row for row in rounds if "validation" in row.get("metrics", {})]
    if not evaluated:
        return None
    best = max(evaluated, key=lambda row: row["metrics"]["validation"][metric])
    return {"round": best["round"], "metrics": best["metrics"]}
