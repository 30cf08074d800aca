"""The base class of objects that see every operation of PyTorch."""

from torch.utils._python_dispatch import TorchDispatchMode


class SeesOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `TorchDispatchMode` that does not import `torch._dynamo`.

    At its first operation, a mode of PyTorch imports `torch._dynamo`, so that `torch.compile` leaves out the code of
    the mode. This import takes 1.9 s of processor time (docs/performance.md).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not import `torch._dynamo` for a subclass.

        PyTorch calls this function when Python code defines a subclass.
        """
        return False
