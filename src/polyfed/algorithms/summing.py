"""`Summing`: what a method declares for secure aggregation. `Algorithm` extends it."""

from dataclasses import dataclass

from polyfed.core.messages import Message
from polyfed.core.tasks import parts
from polyfed.federation.secure_aggregation.client import SecureAggregation


@dataclass(frozen=True, kw_only=True)
class Summing:
    """What a method declares for secure aggregation: whether sums of replies are enough, and the weights in these sums.

    Attributes:
        secure_aggregation: options of secure aggregation, from the [secure_aggregation] section; None if it is not
            used.
    """

    secure_aggregation: SecureAggregation | None = None

    @property
    def single_replies(self) -> str:
        """Return why the server needs the replies of single clients, or an empty text if sums are enough.

        By default, this is the `single_replies` of the method's selector or server optimiser. A method needs its own
        version of this hook only if it has sum-only messages (`carries(sum_only=True)`) and reads single replies for
        another reason.
        """
        reasons = (getattr(part, "single_replies", "") for _, part in parts(self) if part is not self)
        return next(filter(None, reasons), "")

    def weight_of(self, field: str, kind: type[Message]) -> str | None:
        """Return the name of the field that holds a client's weight for `field`, or None if `field` is not weighted.

        Before the sum, every client multiplies `field` by its weight.

        Args:
            field: a field of a sum-only message.
            kind: the class of the message.
        """
        return kind.declared[field].weight
