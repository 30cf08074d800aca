"""The base class of objects that see every operation of PyTorch."""

from torch.utils._python_dispatch import TorchDispatchMode


class SeesOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `TorchDispatchMode` that does not import `torch._dynamo`.

    At its first operation, a mode of PyTorch imports `torch._dynamo`, so that `torch.compile` leaves out the code of
    the mode. This import takes about as long as two thirds of `import torch` (docs/performance.md).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. PyTorch calls this function for each subclass that Python code defines."""
        return False
