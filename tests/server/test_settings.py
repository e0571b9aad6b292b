"""Where the keys of ``deepinfer serve`` come from."""

import pytest
from click.testing import CliRunner

from deepinfer.cli import main
from deepinfer.config import environment
from deepinfer.server import serve


@pytest.fixture
def keys(monkeypatch):
    """The keys that the server would start with."""
    taken = []
    monkeypatch.setattr(serve, "run_server", lambda args, _engine: taken.append(args) or 0)

    def keys(*options, **variables):
        environment.cache_clear()
        result = CliRunner().invoke(main, ["serve", *options], env=variables)
        assert result.exit_code == 0, result.output
        return taken[-1].api_keys

    yield keys
    environment.cache_clear()


def test_keys_come_from_options_a_file_or_the_environment(keys, tmp_path):
    (tmp_path / "keys").write_text("one\n\n two \n")
    assert keys() == ()
    assert keys("--api-key", "a", "--api-key", "b") == ("a", "b")
    assert keys("--api-key-file", str(tmp_path / "keys")) == ("one", "two")
    assert keys(DEEPINFER_API_KEY="three, four") == ("three", "four")
    assert keys("--api-key", "a", DEEPINFER_API_KEY="three") == ("a",)


def test_a_file_without_a_key_is_an_error(tmp_path):
    (tmp_path / "keys").write_text("\n")
    result = CliRunner().invoke(main, ["serve", "--api-key-file", str(tmp_path / "keys")])
    assert result.exit_code == 2
    assert "has no key" in result.output
