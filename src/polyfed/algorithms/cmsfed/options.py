"""The options of CMSFed, with the values of the paper as a preset."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.schema import BELOW_ONE, NOT_NEGATIVE
from polyfed.objective import Classification, Objective
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Uniform


@dataclass(frozen=True, kw_only=True)
class CmsFedOptions(Averaging):
    """CMSFed and its ablations.

    `prototypes = "local"` gives the ablation CMSFed-local. If `modality_selection = false` is also set, the method is
    FedAvg+PCE. If `[selection] name = "divfl"` is set in addition, the method is DivFL+PCE.

    Attributes:
        ratio_rule: the rule that makes a client train only the weak modality. `threshold` (paper) applies to clients
            whose dominance ratio is above `dominance_threshold`. `quantile` applies to clients whose ratio is above the
            `dominance_quantile` of all clients' ratios. Such clients always exist, unless all ratios are equal.
        dominance_threshold: chi, for `ratio_rule = "threshold"`. The paper uses 1.5 to 2.5. With inf, the rule
            applies to no client, because no ratio is above inf.
        dominance_quantile: for `ratio_rule = "quantile"`: the share of the clients whose ratio is too small for the
            rule to apply.
        prototype_weight: alpha_p, the strength of PCE; the released code uses 1 by default and 2 in its AVE script.
        beta_mode: how beta, the weight of PCE in a batch, is computed. `clip` is alpha_p * clip(ratio - 1, 0, 1), as in
            the paper. `hard` is alpha_p if the ratio is above 1, and otherwise 0, as in the released code.
        pce_target: the modality to which PCE is applied. `global_weak` is the weak modality of the federation (Eq. 9);
            `batch_weak` is the weak modality of the batch (released code).
        gradient_split: `exact` keeps the gradients of both loss terms apart (Eq. 11). `delta` instead compares how far
            training moved the encoders (released code), so clients upload no gradients.
        client_weights: weights of the clients in the mean. `samples` uses the number of rows. Under `clusters`, every
            client of the federation is represented by the chosen client with the most similar gradient. The weight of a
            chosen client is the number of rows of all clients that it represents (the gamma of Eq. 6). In the block of
            the weak modality, similarity means a small distance D_2 between the gradients of this modality's encoder.
            In the other blocks, it means a small distance D_1 between the gradients of the cross-entropy.
        classifier_average: the clients over which the server averages the classifier. Each modality has its own columns
            in the classifier, and the server averages these columns separately. `cohort` averages over all chosen
            clients. A client that did not train a modality then contributes the columns that it received. `trained`
            averages only over the clients that trained the modality.
        normalize_delta: divide deltas by learning rate and steps, so that clients of unequal size are comparable.
        resolution: which candidates join the cohort. In each pass, each of the two facility-location problems proposes
            one client. Under `paper` (Eq. 13-14), both clients join. Under `authors` (the released code), only one of
            them joins.
        init_pass: how the first gradients are computed: from an `epoch` of training whose result is discarded, or from
            one full-batch `step`.
        prototypes: `global`, or `local`: each client uses its own prototypes, computed again for every epoch.
        modality_selection: if false, the selector draws the cohort, and each client in it trains all its modalities.
        sketch: number of entries to which stored vectors are projected; 0 stores the exact vectors.
        feature_norm: length to which features are scaled before distances to prototypes are computed; 0 does not scale
            them, as in the paper. Without scaling, training can lower PCE by lengthening the features until the
            classifier diverges. docs/algorithms/cmsfed.md describes when this ends a run.
        placebo: a control experiment. A placebo costs as much as CMSFed, but makes one part of the method random.
            `random-picks` draws both candidates of a pass at random instead of by facility location. `random-modality`
            draws the weak modality of a round at random. `random-prototypes` sends random vectors of the same lengths
            as the prototypes. These vectors do not change between rounds.
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
    init_pass: Literal["epoch", "step"] = "epoch"
    prototypes: Literal["global", "local"] = "global"
    modality_selection: bool = True
    sketch: Annotated[int, NOT_NEGATIVE] = 0
    feature_norm: Annotated[float, NOT_NEGATIVE] = 6.0
    placebo: Literal["none", "random-picks", "random-modality", "random-prototypes"] = "none"

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"ratio_rule": "threshold", "gradient_split": "exact", "feature_norm": 0.0}
    }
    reads_replies: ClassVar[tuple[str, ...]] = ("train_chosen", "learned", "_gradients")
    private_options: ClassVar[Mapping[str, Any]] = {"gradient_split": "exact"}
    renamed: ClassVar[Mapping[str, str]] = {"chi": "dominance_threshold", "alpha_p": "prototype_weight"}

    def __post_init__(self) -> None:
        """Refuse options out of range, and a [selection] that has no effect because CMSFed selects clients itself."""
        super().__post_init__()
        if self.modality_selection and type(self.selector) is not Uniform:
            raise RecipeError(
                "cmsfed selects clients itself, so [selection] has no effect; remove it, or set "
                "[algorithm] modality_selection = false (FedAvg+PCE, DivFL+PCE)"
            )
        if self.client_weights == "clusters" and self.server.aggregate != "mean":
            raise RecipeError(
                f'[server] aggregate = "{self.server.aggregate}" has no effect with [algorithm] client_weights = '
                '"clusters", whose weights belong to a mean: remove one of them'
            )

    def private_faults(self, spec: Privacy) -> Iterator[str]:
        """Yield a text for each option that this method cannot use under `unit = "client"`.

        With such an option, the server would read the parameters of a single client, or the reported epsilon would be
        smaller than the true one.
        """
        if self.modality_selection and self.gradient_split == "delta":
            yield (
                'gradient_split = "delta" lets the server compare the trained parameters of single clients. Set '
                '[algorithm] gradient_split = "exact", so that the server compares gradients, which are unprotected, '
                "or modality_selection = false"
            )
        if self.client_weights == "clusters":
            yield 'client_weights = "clusters" gives some clients more influence: set client_weights = "samples"'
        if spec.amplification:
            yield "amplification does not count that the data decides which clients train which modalities"
