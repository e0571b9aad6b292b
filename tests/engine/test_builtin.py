"""The cache of the model random: it is made once, again if it is damaged, and an error says why it cannot be made."""

import contextlib
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer.config import environment, named_config
from deepinfer.engine import builtin
from deepinfer.engine.loader import model_directory
from deepinfer.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache with a small model instead of random; tests copy it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "named_config", lambda _name: named_config("golden"))
        patch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path_factory.mktemp("made")))
        environment.cache_clear()
        yield builtin.random_directory(progress=False)
    environment.cache_clear()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(builtin, "named_config", lambda _name: named_config("golden"))

    def put(folder):
        monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(folder))
        environment.cache_clear()
        return folder

    yield put
    environment.cache_clear()


def content(folder):
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def flip(path):
    with path.open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([byte[0] ^ 1]))


def shard(folder):
    return next(folder.glob("*.safetensors"))


DAMAGES = {
    "nothing there": shutil.rmtree,
    "empty folder": lambda folder: [each.unlink() for each in folder.iterdir()],
    "truncated shard": lambda folder: os.truncate(shard(folder), 1000),
    "flipped bit": lambda folder: flip(shard(folder)),
    "no shard": lambda folder: shard(folder).unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "other configuration": lambda folder: (folder / "config.json").write_text("{}"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
    "odd manifest": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "deep manifest": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "folder for a file": lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
    "a link to nowhere": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_was_damaged_is_made_again(made, cache, tmp_path, damage):
    folder = shutil.copytree(made, cache(tmp_path / "cache") / made.name)
    (tmp_path / "cache" / f".{made.name}.abc.making" / "left").mkdir(parents=True)
    damage(folder)
    assert model_directory("random", progress=False) == folder
    assert content(folder) == content(made)
    assert {each.name for each in folder.parent.iterdir()} == {made.name, f".{made.name}.lock"}, "nothing is left behind"


def test_what_is_whole_is_only_read(made, cache, tmp_path):
    folder = shutil.copytree(made, cache(tmp_path / "cache") / made.name)
    before = {each.name: each.stat().st_mtime_ns for each in [folder, *folder.iterdir()]}
    assert model_directory("random") == folder
    assert {each.name: each.stat().st_mtime_ns for each in [folder, *folder.iterdir()]} == before
    assert [each.name for each in folder.parent.iterdir()] == [made.name]


def test_makers_at_the_same_time_do_not_disturb_each_other(made, cache, tmp_path):
    folder = cache(tmp_path / "cache") / made.name
    with ThreadPoolExecutor(4) as makers:
        found = list(makers.map(lambda _: builtin.random_directory(progress=False), range(4)))
    assert found == [folder] * 4
    assert content(folder) == content(made)


@contextlib.contextmanager
def disk_of(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("place", ["file/inside", "file", "/proc/deepinfer", "/dev/full", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_named(cache, tmp_path, place):
    (tmp_path / "file").write_text("x")
    folder = cache(tmp_path / place)
    with pytest.raises(
        ConfigError, match=rf"random cannot be made in {folder}: .*; mend that folder, or set DEEPINFER_CACHE_DIR"
    ):
        model_directory("random")


def test_a_full_disk_leaves_nothing_behind(cache, tmp_path, made):
    folder = cache(tmp_path / "cache")
    with (
        disk_of(200_000),
        pytest.raises(ConfigError, match=rf"random cannot be made in {folder}: File too large; mend"),
    ):
        model_directory("random", progress=False)
    assert [each.name for each in folder.iterdir()] == [f".{made.name}.lock"]
    assert content(model_directory("random", progress=False)) == content(made)


@pytest.mark.parametrize("name", ["no/such", "x" * 5000, "a\0b", "~nobody-here/x", "\udcff\ud800"])
def test_a_model_that_is_none_is_one_sentence(name):
    with pytest.raises(ConfigError) as caught:
        model_directory(name)
    assert "\n" not in str(caught.value)
