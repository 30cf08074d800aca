"""The tasks of an algorithm are found by their names, also those of its parts."""

import pytest

from polyfed.core.tasks import task_of, tasks_of
from polyfed.selection import PowD
from world import algorithm


def test_a_name_leads_to_its_task() -> None:
    method = algorithm("fedavg", selector=PowD(participation=3, d=6))
    tasks = tasks_of(method)
    assert any(name.startswith("selector.") for name in tasks)
    assert {name: task_of(method, name) for name in tasks} == tasks


def test_another_method_of_the_algorithm_is_no_task() -> None:
    with pytest.raises(AssertionError):
        task_of(algorithm("fedavg"), "round")
