"""Declaring operators, registering bodies for backends, and binding them."""

import pytest

from deepinfer.errors import ConfigError
from deepinfer.ops import op as machinery


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """An empty table of operators, so that the package's own table does not change."""
    monkeypatch.setattr(machinery, "_REGISTRY", {})


def declare(name):
    def body(value):
        """Twice the value."""
        return value * 2

    body.__name__ = name
    return machinery.op(tolerance=0.0)(body)


def test_operator_runs_its_reference_before_anything_is_bound():
    double = declare("double")
    assert double(3) == 6
    assert double(value=4) == 8


def test_operator_keeps_name_docstring_and_tolerance_of_its_body():
    double = declare("double")
    assert double.name == "test_ops_machinery.double"
    assert double.__doc__ == "Twice the value."
    assert double.tolerance == 0.0


def test_registered_lists_operators_in_order_of_definition():
    made = [declare(name) for name in ("second", "first")]
    assert list(machinery.registered().values()) == made


def test_registered_is_a_copy():
    declare("double")
    machinery.registered().clear()
    assert len(machinery.registered()) == 1


def test_bind_routes_calls_to_the_backend_and_back():
    double = declare("double")

    @double.implement("fast")
    def shifted(value):
        return value << 1 | 1

    assert double(3) == 6
    machinery.bind("fast")
    assert double(3) == 7
    assert double.reference(3) == 6
    machinery.bind(machinery.REFERENCE)
    assert double(3) == 6


def test_implement_returns_the_body_itself():
    def body(value):
        return value

    assert declare("double").implement("fast")(body) is body


def test_second_body_for_a_backend_is_our_bug():
    double = declare("double")
    double.implement("fast")(abs)
    with pytest.raises(AssertionError, match="double has two implementations for backend 'fast'"):
        double.implement("fast")(abs)
    with pytest.raises(AssertionError, match="'torch'"):
        double.implement(machinery.REFERENCE)(abs)


def test_bind_names_every_operator_without_a_body_and_the_backends_that_are_complete():
    declare("one"), declare("two")
    declare("three").implement("fast")(abs)
    with pytest.raises(ConfigError) as error:
        machinery.bind("fast")
    for part in ("'fast'", "test_ops_machinery.one, test_ops_machinery.two;", "complete backends are torch"):
        assert part in str(error.value)
    assert "three" not in str(error.value)


def test_failed_bind_changes_nothing():
    ready = declare("ready")
    ready.implement("fast")(abs)
    declare("unready")
    with pytest.raises(ConfigError):
        machinery.bind("fast")
    assert ready(-3) == -6
