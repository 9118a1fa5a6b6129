"""Policy tables (alignkit/engines/policy.py), with fake configurations of a fake engine.

tests/vllm/test_policy.py and the test_rejections.py of both engines test the real tables.
"""

import dataclasses
import functools

import pydantic
import pytest

from alignkit.engines.policy import Policy, Row, default, only, refusals

POLICY = Policy(
    free="size rank",
    ignored_prefixes=("moe_",),
    rows=(
        Row("kind", lambda kind, _: kind != "a", "{field} {value} is not b"),
        Row("kind", lambda kind, limit: len(kind) <= limit, lambda kind, limit: f"{kind} is longer than {limit}"),
        only("norm", "rms", "another norm"),
    ),
    labels={"window": "sliding window"},
)


@dataclasses.dataclass
class Config:
    size: int
    kind: str = "b"
    norm: str = "rms"
    window: object = None
    moe_experts: int = 0
    newer: dict = dataclasses.field(default_factory=dict)


@pydantic.dataclasses.dataclass
class Described:
    size: int = pydantic.Field(gt=0)
    kind: str = pydantic.Field(default="b")
    window: object = None
    newer: dict = pydantic.Field(default_factory=dict)


def reasons_for(config, limit=3):
    rows = POLICY.rows_for([f.name for f in dataclasses.fields(config)], functools.partial(default, type(config)))
    return list(refusals(config, rows, limit))


@pytest.mark.parametrize("config", [Config(9), Config(1, moe_experts=2), Described(9)])
def test_allowed_values_are_accepted(config):
    assert reasons_for(config) == []


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"kind": "a"}, ["kind a is not b"]),
        ({"kind": "long"}, ["long is longer than 3"]),
        ({"window": 7}, ["window (sliding window): must be None, got 7"]),
        ({"newer": {"x": 1}}, ["newer: must be {}, got {'x': 1}"]),
        ({"kind": "a", "newer": {1: 2}}, ["kind a is not b", "newer: must be {}, got {1: 2}"]),
    ],
)
@pytest.mark.parametrize("kind", [Config, Described])
def test_unsupported_values_are_named(kind, change, expected):
    assert reasons_for(kind(size=1, **change)) == expected


def test_a_field_must_have_its_required_value():
    assert reasons_for(Config(1, norm="layer")) == ["norm (another norm): must be 'rms', got 'layer'"]


def test_an_unknown_field_without_a_default_is_named():
    assert default(Described, "size") is default(Config, "size")
    (reason,) = refusals(Config(1), Policy(free="").rows_for(["size"], functools.partial(default, Config)))
    assert reason == "size: no value is supported, because alignkit does not know this field of this version, got 1"
