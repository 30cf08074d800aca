"""Adaptive clipping: the clip norm follows a quantile of the norms of the clients' updates.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm 1
and Theorem 1. The server also needs noise for the share of updates below the clip norm, so the updates get more noise
than without adaptive clipping, at the same epsilon.
"""

import math
from dataclasses import dataclass

from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import LEAST_CLIP, MOST_CLIP

COUNT_NOISE = 1 / 20
"""Default noise of the count as a share of the expected size of the cohort (Andrew et al., 2021, Section 3.1)."""


@dataclass(frozen=True)
class AdaptiveClipping:
    """How the clip norm changes from round to round.

    Attributes:
        quantile: gamma, the share of updates that should not be clipped.
        lr: eta_C, the learning rate of the clip norm.
        count_noise: sigma_b. In each round, the updates below the clip norm are counted, and noise with this standard
            deviation is added to the count.
    """

    quantile: float
    lr: float
    count_noise: float

    @classmethod
    def of(cls, quantile: float, lr: float, count_noise: float | None, cohort: float) -> "AdaptiveClipping":
        """Return the rule. The default of `count_noise` depends on the expected size of the cohort.

        Raises:
            RecipeError: the standard deviation of the noise in the count is larger than the expected number of clients
                in the cohort. The clip norm would then follow only noise.
        """
        noise = COUNT_NOISE * cohort if count_noise is None else count_noise
        if noise > cohort:
            raise RecipeError(
                f"[privacy] count_noise = {noise:g}: must be at most {cohort:g}, the expected size of the cohort, "
                "because with more noise the clip norm would follow only the noise",
                ("privacy", "count_noise"),
            )
        return cls(quantile, lr, noise)

    @property
    def least_noise(self) -> float:
        """The least noise multiplier z for which `update_noise` is larger than z in float64."""
        return 2.0**-25 * 2 * self.count_noise

    def update_noise(self, noise_multiplier: float) -> float:
        """Return z_Delta, the noise multiplier of the updates (Theorem 1).

        z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2). A client changes the centred count by at most 1/2. So the count has
        the noise multiplier 2 sigma_b. The noisy count and the noisy updates together are one Gaussian mechanism with
        noise multiplier z.

        Args:
            noise_multiplier: z, the noise multiplier from which the accountant computes epsilon.

        Raises:
            RecipeError: sigma_b is at most z / 2. The count of updates below the clip norm would then spend all of
                epsilon, and nothing would be left for the updates.
        """
        rest = 1 - min(noise_multiplier / (2 * self.count_noise), 1.0) ** 2
        if rest <= 0:
            raise RecipeError(
                f"[privacy] count_noise = {self.count_noise:g}: must be above half of the noise multiplier "
                f"({noise_multiplier:g}), because the count of updates below the clip norm would spend all of epsilon. "
                "Raise count_noise, epsilon or the number of clients in a cohort",
                ("privacy", "count_noise"),
            )
        return float(noise_multiplier * rest**-0.5)

    def after(self, norm: float, centred_count: float, cohort: float) -> float:
        """Return the clip norm of the next round: C exp(-eta_C (b - gamma)) (Algorithm 1).

        The result stays between `LEAST_CLIP` and `MOST_CLIP`, so clients cannot drive it to 0 or infinity.

        Args:
            norm: C, the clip norm of this round.
            centred_count: a sum with one term for each client, plus noise. A client's term is +1/2 if the norm of its
                update is below the clip norm, -1/2 if the norm is above, and 0 if the client sent nothing.
            cohort: the expected size of the cohort, a constant.
        """
        share = centred_count / cohort + 0.5
        widest = math.log(MOST_CLIP / LEAST_CLIP)  # a larger step would leave the range from anywhere inside it
        step = max(-widest, min(widest, -self.lr * (share - self.quantile)))
        return max(LEAST_CLIP, min(MOST_CLIP, norm * math.exp(step)))
