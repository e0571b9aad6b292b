"""Number of threads of a step: all threads on idle cores, one thread on busy cores."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from deepinfer.executor import team
from deepinfer.executor.team import BUSY_SHARE, FIRST_PAUSE_S, LAST_PAUSE_S, LOOK_AFTER_S, Team

needs_counts = pytest.mark.skipif(not team.own_waits(), reason="the system does not count how long threads wait for a core")


class System:
    """A clock and the times of two threads; the test chooses the share of time that the threads wait."""

    def __init__(self):
        self.seconds = 0.0
        self.own = self.all = 0.0
        self.counts = {1: (0, 0), 2: (0, 0)}

    def pass_time(self, seconds):
        self.seconds += seconds
        for thread_id, share in ((1, self.own), (2, self.all)):
            ran, waited = self.counts[thread_id]
            self.counts[thread_id] = ran + int(seconds * (1 - share) * 1e9), waited + int(seconds * share * 1e9)

    def team(self, size=4):
        return Team(size, own=lambda: {1: self.counts[1]}, everyone=lambda: dict(self.counts), now=lambda: self.seconds)

    def step(self, team, seconds=0.1):
        """Threads that the step got."""
        with team.step():
            count = torch.get_num_threads()
            self.pass_time(seconds)
        return count


@contextmanager
def busy_loops(count):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def test_a_step_gets_all_threads_on_idle_cores_and_one_where_there_is_one():
    system = System()
    assert system.step(system.team(3)) == 3
    assert system.step(system.team(1)) == 1


def test_the_thread_has_its_own_number_back_after_a_step_however_it_ends():
    before, system = torch.get_num_threads(), System()
    mine = system.team(before + 2)
    system.step(mine)
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), mine.step():
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_one_thread_is_used_while_it_has_to_wait_for_a_core():
    system = System()
    mine = system.team()
    assert system.step(mine) == 4
    system.own = 0.5
    system.pass_time(1.0)
    assert [system.step(mine) for _ in range(3)] == [1, 1, 1]
    system.own = 0.0
    system.pass_time(0.1)
    assert system.step(mine) == 1, "the time before counts: the thread waited in it"
    assert system.step(mine) == 4


def test_a_thread_that_waited_while_it_loaded_the_model_begins_alone():
    system = System()
    system.own = 2 * BUSY_SHARE
    system.pass_time(1.0)
    assert system.step(system.team()) == 1


def test_all_threads_are_tried_again_after_pauses_that_double_while_they_wait():
    system = System()
    mine = system.team()
    system.all = 0.9
    pause = FIRST_PAUSE_S
    for _ in range(10):
        assert system.step(mine) == 4
        assert system.step(mine, seconds=0.9 * pause) == 1
        system.pass_time(0.2 * pause)
        pause = min(2 * pause, LAST_PAUSE_S)
    system.all = 0.0
    assert [system.step(mine) for _ in range(3)] == [4, 4, 4]
    system.all = 0.9
    assert system.step(mine) == 4
    system.pass_time(1.1 * FIRST_PAUSE_S)
    assert system.step(mine) == 4, "a good step makes the pause short again"


def test_a_step_goes_on_with_one_thread_when_the_cores_become_busy():
    system = System()
    mine = system.team()
    with mine.step():
        for _ in range(3):
            system.pass_time(0.1)
            mine.between_layers()
            assert torch.get_num_threads() == 4
        system.all = 0.9
        system.pass_time(LOOK_AFTER_S / 2)
        mine.between_layers()
        assert torch.get_num_threads() == 4, "it looks from time to time only"
        system.pass_time(LOOK_AFTER_S)
        mine.between_layers()
        assert torch.get_num_threads() == 1
        system.all = 0.0
        system.pass_time(0.1)
        mine.between_layers()
        assert torch.get_num_threads() == 1, "for the rest of the step"
    assert system.step(mine) == 1
    system.pass_time(FIRST_PAUSE_S)
    assert system.step(mine) == 4


def test_looking_outside_a_step_of_all_threads_changes_nothing():
    before, mine = torch.get_num_threads(), System().team(1)
    mine.between_layers()
    with mine.step():
        mine.between_layers()
        assert torch.get_num_threads() == 1
    mine.between_layers()
    assert torch.get_num_threads() == before


def test_where_the_system_counts_nothing_all_threads_are_used():
    mine = Team(2, own=dict, everyone=dict)
    for _ in range(3):
        with mine.step():
            assert torch.get_num_threads() == 2


@needs_counts
def test_a_thread_without_a_core_is_seen_waiting():
    cores = len(os.sched_getaffinity(0))
    with busy_loops(4 * cores):
        before, end = team.own_waits(), time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        assert team.waiting_share(before, team.own_waits()) > BUSY_SHARE


@needs_counts
def test_threads_that_end_or_begin_meanwhile_do_not_matter():
    stop = threading.Event()
    ending = threading.Thread(target=stop.wait)
    ending.start()
    before = team.all_waits()
    stop.set()
    ending.join()
    beginning = threading.Thread(target=time.sleep, args=(0.2,))
    beginning.start()
    after = team.all_waits()
    beginning.join()
    assert before.keys() != after.keys()
    assert 0.0 <= team.waiting_share(before, after) <= 1.0
    assert team.waiting_share({}, {}) == 0.0
