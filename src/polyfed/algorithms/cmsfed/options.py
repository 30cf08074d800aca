"""The options of CMSFed, with the values of the paper as a preset."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.schema import BELOW_ONE, NOT_NEGATIVE
from polyfed.objective import Classification, Objective
from polyfed.selection import Uniform


@dataclass(frozen=True, kw_only=True)
class CmsFedOptions(Averaging):
    """CMSFed and its ablations. CMSFed-local is `prototypes = "local"`; FedAvg+PCE adds
    `modality_selection = false` to it; DivFL+PCE also adds `[selection] name = "divfl"`.

    Attributes:
        ratio_rule: which dominance ratios make a client train the weak modality alone: `threshold`, those above
            `dominance_threshold` (paper), or `quantile`, those above the `dominance_quantile` of all clients' ratios,
            which some ratios always are unless all are equal.
        dominance_threshold: chi, for `ratio_rule = "threshold"`. The paper uses 1.5 to 2.5; with inf the ratio makes no
            client train alone.
        dominance_quantile: the share of the clients whose ratio is too small, for `ratio_rule = "quantile"`.
        prototype_weight: alpha_p, the strength of PCE; the released code uses 1 by default and 2 in its AVE script.
        beta_mode: how beta, the weight of PCE in a batch, is computed: `clip` is alpha_p * clip(ratio - 1, 0, 1) as in
            the paper; `hard` is alpha_p where the ratio is above 1, else 0, as in the released code.
        pce_target: the modality to which PCE is applied: `global_weak` is the weak one of the federation (Eq. 9),
            `batch_weak` the weak one of the batch (released code).
        gradient_split: `exact` keeps the gradients of both loss terms apart (Eq. 11); `delta` compares how far training
            moved the encoders (released code), so that no gradients are uploaded.
        client_weights: weights of the clients in the mean: `samples` by number of rows, `clusters` by the rows of the
            clients that a chosen client represents (the gamma of Eq. 6), in the weak block under D_2, else under D_1.
        classifier_average: over whom the classifier's columns of a modality are averaged: over all chosen clients
            (`cohort`, the whole of omega; who did not train them counts with the values that were sent out), or over
            those that trained the modality (`trained`).
        normalize_delta: divide deltas by learning rate and steps, so that clients of unequal size are comparable.
        resolution: which of the two problems' best candidates join: both (`paper`, Eq. 13-14) or one (`authors`, the
            released code).
        greedy: `stochastic` examines max(b, N / 10) candidates in each pass, `full` examines all.
        init_pass: whether the first gradients come from an `epoch` of training whose result is discarded, or from one
            full-batch `step`.
        prototypes: `global`, or `local`: each client uses its own prototypes, computed anew for every epoch.
        prototype_momentum: momentum of the global prototypes; 0 in the paper.
        modality_selection: if false, the selector draws the cohort, and all of its clients train all their modalities.
        sketch: number of entries to which stored vectors are projected; 0 stores the exact vectors.
        hysteresis: the share by which another modality's ratio must be larger to make it the weak one; 0 in the paper.
        feature_norm: length to which features are scaled before distances to prototypes; 0 does not scale, as in the
            paper. Without scaling, training can lower PCE by lengthening the features, until the classifier diverges:
            docs/algorithms/cmsfed.md says when that ends a run.
        placebo: a control that keeps the cost and removes one idea: `random-picks` draws both candidates of a pass in
            place of facility location, `random-modality` draws the weak modality of a round, `random-prototypes` sends
            random vectors of the prototypes' lengths, the same in every round.
    """

    ratio_rule: Literal["threshold", "quantile"] = "quantile"
    dominance_threshold: float = 2.0
    dominance_quantile: Annotated[float, BELOW_ONE] = 0.5
    prototype_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    beta_mode: Literal["clip", "hard"] = "clip"
    pce_target: Literal["global_weak", "batch_weak"] = "global_weak"
    gradient_split: Literal["exact", "delta"] = "delta"
    client_weights: Literal["samples", "clusters"] = "samples"
    classifier_average: Literal["cohort", "trained"] = "trained"
    normalize_delta: bool = True
    resolution: Literal["paper", "authors"] = "paper"
    greedy: Literal["stochastic", "full"] = "stochastic"
    init_pass: Literal["epoch", "step"] = "epoch"
    prototypes: Literal["global", "local"] = "global"
    prototype_momentum: Annotated[float, BELOW_ONE] = 0.0
    modality_selection: bool = True
    sketch: Annotated[int, NOT_NEGATIVE] = 0
    hysteresis: Annotated[float, NOT_NEGATIVE] = 0.0
    feature_norm: Annotated[float, NOT_NEGATIVE] = 6.0
    placebo: Literal["none", "random-picks", "random-modality", "random-prototypes"] = "none"

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"ratio_rule": "threshold", "gradient_split": "exact", "feature_norm": 0.0}
    }
    renamed: ClassVar[Mapping[str, str]] = {"chi": "dominance_threshold", "alpha_p": "prototype_weight"}

    def __post_init__(self) -> None:
        """Refuse options out of range, and a [selection] that has no effect because the method selects by itself."""
        super().__post_init__()
        if self.modality_selection and type(self.selector) is not Uniform:
            raise RecipeError(
                "cmsfed selects clients itself, so [selection] has no effect; remove it, or set "
                "[algorithm] modality_selection = false (FedAvg+PCE, DivFL+PCE)"
            )
