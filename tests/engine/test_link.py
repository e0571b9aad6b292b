"""A client in programs that interrupt, fork, forget and end: every call returns at once, and the core ends with the program."""

import contextlib
import os
import signal

import pytest

from tests.engine.client_scenes import is_gone
from tests.engine.scenes import played

OTHER_LOOP = "ConfigError: this client belongs to the event loop that started it, and this is another; start a client in this one"
KILLED = "StepFailed: the core process was killed by SIGKILL; its log may say more, start another engine"
SCENES = {
    "left_open": (0, []),
    "left_open_with_its_loop": (0, []),
    "left_open_in_a_thread": (0, []),
    "ctrl_c": (-2, ["KeyboardInterrupt"]),
    "ctrl_c_while_it_starts": (-2, ["KeyboardInterrupt"]),
    "another_loop": (0, [OTHER_LOOP, "gone True", "gone True"]),
    "a_loop_closed_by_hand": (0, ["gone True"]),
    "a_loop_that_stands_still": (0, [OTHER_LOOP, "gone True True"]),
    "a_loop_in_another_thread": (0, [OTHER_LOOP, "[2, 3, 4]", "no error but <FinishReason.ABORT: 'abort'>", "gone True True"]),
    "garbage": (0, ["[2, 3, 4]", "gone True True"]),
    "forks": (0, ["child", "0 True 2 [2, 3, 4]", "child", "0", "True [2, 3, 4] True"]),
    "killed_with_a_child_that_lives_on": (-9, []),
    "a_core_killed_with_helpers_that_live_on": (0, [KILLED, f"True {KILLED}"]),
    "behind_a_wrapper": (0, ["[2, 3, 4] True", "gone True"]),
}


@pytest.fixture(scope="module")
def scenes():
    return played("tests.engine.client_scenes", SCENES)


@pytest.mark.parametrize("name", SCENES)
def test_every_call_answers_at_once_and_the_core_goes_with_its_program(scenes, name):
    code, lines, seconds = scenes[name]
    said = [each for each in filter(None, lines) if each.split()[0] not in ("core", "helper")]
    if code == -2:
        said = said[-1:]  # the last line, after Python's traceback
    elif name == "left_open_with_its_loop":
        said = [each for each in said if "unclosed event loop" not in each]  # the scene leaves its loop open on purpose
        said = [each for each in said if not each.startswith("  ")]
    try:
        assert (code, said) == SCENES[name]
        assert seconds < 50
        for core in (each.split()[1] for each in lines if each.startswith("core ")):
            assert is_gone(core)
    finally:
        for helper in (each.split()[1] for each in lines if each.startswith("helper ")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(helper), signal.SIGKILL)


def test_a_program_that_does_not_exist_is_named():
    import asyncio

    from deepinfer.config import EngineArgs
    from deepinfer.engine.client import AsyncEngineClient
    from deepinfer.errors import ConfigError

    with pytest.raises(ConfigError, match="cannot run no-such-program"):
        asyncio.run(AsyncEngineClient.start(EngineArgs(model="fake"), progress=False, program=["no-such-program"]))
