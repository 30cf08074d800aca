"""Differential privacy: the [privacy] section of a recipe. docs/privacy.md describes its guarantee and its limits."""

from dataclasses import dataclass
from typing import Annotated, Literal

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import KINDS
from polyfed.core.option_checks import INSIDE, POSITIVE, Within, check_ranges

DELTA = Within(f"{INSIDE.words}, such as 1e-3", INSIDE.holds)

NOISE = Within("from 1e-9 to 1e6", lambda value: (value >= 1e-9) & (value <= 1e6))
"""With less noise, a clipped value counts more steps of the noise's grid than float64 has whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a run protects, how much noise it adds, and how it counts epsilon: the [privacy] section of a recipe.

    Attributes:
        unit: what the guarantee protects: `client`, all data of one client, by clipping its update; `example`, one row,
            by clipping its gradient in every training step (DP-SGD).
        delta: probability with which the guarantee may fail, below 1 / (number of clients or rows).
        epsilon: the budget of all rounds, for which the accountant finds the noise. With `noise_multiplier`, the run
            stops before a round that would exceed it.
        noise_multiplier: standard deviation of the noise as a multiple of `clip_norm`.
        clip_norm: largest 2-norm of an update, or of the gradient of a row.
        clip: `joint` limits the norm over all blocks, `per-block` that of each of the B blocks, to `clip_norm` /
            sqrt(B). `adaptive`, for `unit = "client"` and `noise_at = "server"`, moves the limit, from `clip_norm` on,
            towards a quantile of the norms of the updates.
        clip_quantile: the quantile that `clip = "adaptive"` follows.
        clip_lr: learning rate of the limit.
        count_noise: with `clip = "adaptive"`: standard deviation of the noise in the count of updates within the limit;
            by default a twentieth of the cohort. With a smaller value, the updates need more noise.
        noise_at: with `unit = "client"`: the `server` adds noise once, to the sum of the updates, so the clients have
            to trust it; or each `client` adds it before its update leaves.
        accountant: `rdp` (Renyi differential privacy) or `pld` (privacy loss distributions, a smaller epsilon in a few
            seconds) of dp-accounting.
        amplification: whether epsilon counts that cohorts are drawn at random and in secret (amplification by
            sampling). It needs a simulation, `unit = "client"`, `noise_at = "server"`, the selector `uniform` and
            `accountant = "rdp"`.
        unprotected: kinds of data that may leave clients without protection; a run that would send others is refused.
    """

    unit: Literal["client", "example"]
    delta: Annotated[float, DELTA]
    epsilon: Annotated[float | None, POSITIVE] = None
    noise_multiplier: Annotated[float | None, NOISE] = None
    clip_norm: Annotated[float, POSITIVE] = 1.0
    clip: Literal["joint", "per-block", "adaptive"] = "joint"
    clip_quantile: Annotated[float, INSIDE] = 0.5
    clip_lr: Annotated[float, POSITIVE] = 0.2
    count_noise: Annotated[float | None, POSITIVE] = None
    noise_at: Literal["server", "client"] = "server"
    accountant: Literal["rdp", "pld"] = "rdp"
    amplification: bool = False
    unprotected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check types and ranges, and that the options are compatible.

        Raises:
            RecipeError: an option is out of range, or needs another option.
        """
        check_ranges("[privacy]", self)
        if self.epsilon is None and self.noise_multiplier is None:
            raise RecipeError("[privacy] needs epsilon, noise_multiplier, or both", ("privacy", "epsilon"))
        if unknown := [kind for kind in self.unprotected if kind not in KINDS]:
            text = f"[privacy] unprotected: no kind '{unknown[0]}'; {did_you_mean(unknown[0], KINDS)}"
            raise RecipeError(text, ("privacy", "unprotected"))
        if self.adaptive and not self.central:
            raise RecipeError(
                '[privacy] clip = "adaptive" needs unit = "client" and noise_at = "server": clients that add noise '
                "would have to receive the clip norm with each request and to send a noisy bit, and messages have no "
                "such fields",
                ("privacy", "clip"),
            )
        if self.amplification and not (self.unit == "client" and self.central and self.accountant == "rdp"):
            raise RecipeError(
                '[privacy] amplification = true needs unit = "client", noise_at = "server" and accountant = "rdp": '
                "only there does dp-accounting count a cohort of a fixed size that is drawn without replacement",
                ("privacy", "amplification"),
            )

    @property
    def central(self) -> bool:
        """Whether the server adds the noise."""
        return self.unit == "client" and self.noise_at == "server"

    @property
    def adaptive(self) -> bool:
        """Whether the clip norm changes from round to round."""
        return self.clip == "adaptive"

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        result = {"noise_at": 'unit = "example"'} if self.unit == "example" else {}
        if not self.adaptive:
            result |= dict.fromkeys(("clip_quantile", "clip_lr", "count_noise"), f'clip = "{self.clip}"')
        return result
