"""What a method declares about differential privacy."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from polyfed.privacy.differential.section import Privacy

ALTERS: Mapping[str, tuple[str, ...]] = {
    "client": ("round", "merge", "weights"),
    "example": ("loss", "direction", "update", "reply"),
}
"""For each unit of [privacy], the hooks on which a method's declaration `protects` rests. A class that overrides one of
them has to define `protects` again."""


UPDATES: Mapping[str, tuple[str, ...]] = {"client": ("update.params",), "example": ("update.params",)}
"""The declaration of a method that extends `Averaging` and whose loss of a row depends on no other row."""


OTHERWISE: Mapping[str, str] = {
    "client": "its server does not only average the updates of the clients",
    "example": "its clients may use several rows of a batch together",
}
"""For each unit of [privacy], what polyfed must assume about a method that does not declare the unit."""


class PrivacyHooks:
    """The declarations of a method about the [privacy] section."""

    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each unit of [privacy] that the method can honour, the fields `task.field` of its replies that the mechanism
    protects. With `client`, such a field holds trained parameters, and the server uses it only in the mean of
    `Averaging.merge`. With `example`, such a field is computed only from results of `ClientData.minimise`, and the loss
    of a row depends on no other row."""
    reads_replies: ClassVar[tuple[str, ...]] = ()
    """Server methods of the class besides those in `ALTERS` that read or make single replies. A subclass that overrides
    one of them has to declare `protects` again, because it could use the protected fields outside of the mean."""
    spare: ClassVar[tuple[str, ...]] = ()
    """Fields `task.field` of replies that the server only logs. Under [privacy], clients fill them with zeros."""
    private_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which the method can honour [privacy], if it cannot with its default options."""

    def private_faults(self, spec: Privacy) -> Iterator[str]:
        """Yield why this method cannot honour `unit = "client"` with its options. By default, nothing is yielded.

        Args:
            spec: the section [privacy].
        """
        yield from ()

    @classmethod
    def honours(cls, unit: str) -> tuple[str, ...]:
        """Return the reply fields that the mechanism protects, each written as `task.field`.

        The result is empty if the method cannot be used with this `unit` of [privacy].
        """
        fields: Mapping[str, tuple[str, ...]] = vars(cls._declaring())["protects"]
        return () if cls._altered(unit) else fields.get(unit, ())

    @classmethod
    def dishonour(cls, unit: str) -> str:
        """Return why the method cannot be used with this unit of [privacy].

        For example, the text is "its clients may use several rows of a batch together".
        """
        if unit in vars(cls._declaring())["protects"]:
            return f"{OTHERWISE[unit]} ({cls.__name__} overrides {cls._altered(unit)[0]})"
        return OTHERWISE[unit]

    @classmethod
    def _declaring(cls) -> type["PrivacyHooks"]:
        """Return the class that defines `protects`: this class, or the nearest base class with a definition."""
        return next(base for base in cls.__mro__ if "protects" in vars(base))

    @classmethod
    def _altered(cls, unit: str) -> list[str]:
        """List the overridden hooks that make `protects` invalid.

        With `protects`, a class declares which reply fields the mechanism protects. The declaration relies on
        certain hooks of this class, which `ALTERS` and `reads_replies` list. If a subclass overrides one of them, the
        declaration is no longer valid, and the subclass has to define `protects` again.
        """
        declaring = cls._declaring()
        below = cls.__mro__[: cls.__mro__.index(declaring)]
        hooks = (*ALTERS[unit], *(declaring.reads_replies if unit == "client" else ()))
        return [hook for base in below for hook in hooks if hook in vars(base)]
