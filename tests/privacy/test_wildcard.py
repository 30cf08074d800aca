"""`[egress."*"]`: the row of every modality without one of its own, and of nothing else."""

from dataclasses import replace

import pytest

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.privacy.egress.policy import DEFAULT, Policy
from world import algorithm, played, recipe

WILD = {"*": {"server": ["parameters", "prototypes"]}, "a": {"silo": ["raw"]}, "b": {"server": ["embeddings"]}}


def test_a_wildcard_fits_modalities_without_a_row_for_the_destination() -> None:
    policy = Policy.parse(WILD, ["a", "b", "c", "shared", "labels"])
    assert policy.kinds("a", "server") == policy.kinds("c", "server") == {"parameters", "prototypes"}
    assert policy.kinds("a", "silo") == {"raw"}
    assert policy.kinds("b", "server") == {"embeddings"}
    assert policy.kinds("b", "silo") == policy.kinds("c", "silo") == DEFAULT
    assert policy.kinds("labels", "server") == frozenset()
    assert policy.kinds("shared", "server") == frozenset(), "shared follows from the rows of the modalities"
    assert Policy.parse({"*": {"server": []}}, ["a"]).for_client(["a"]).kinds("shared", "server") == frozenset()


def test_a_run_with_a_wildcard_equals_the_run_with_all_rows() -> None:
    row = {"server": ["parameters", "gradients", "prototypes", "statistic"]}
    made = recipe(algorithm("fedproto"), rounds=2)
    wild, full = (replace(made, egress=policy) for policy in ({"*": row}, {"a": row, "b": row}))
    assert played(wild)[2] == played(full)[2]
    assert polyfed.check(wild).planned == polyfed.check(full).planned
    assert wild.table()["egress"] == {"*": row}


def test_all_faults_of_a_policy_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        Policy.parse({"audoi": {}, "*": {"sever": [], "server": ["param"]}}, ["audio"])
    for words in ("no row 'audoi'; did you mean 'audio'", "[egress.*] has no destination", "no kind 'param'"):
        assert words in str(caught.value)
