"""What several tests of workers need."""

import pytest

from polyfed.engines import in_process, stack_division


@pytest.fixture
def everything_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share also the small requests of tests, in small stacks."""
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "STACK_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "LEAST_STACK", 2)
