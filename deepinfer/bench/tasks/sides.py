"""The two sides of generated tasks: those that training may have, and those that it never has.

A side is a function of content only, so that training and evaluation agree without a list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from deepinfer.bench.tasks import GENERATORS, KINDS, make_task
from deepinfer.bench.tasks.task import Task

HELD_OUT_TASKS = 1 / 16
_DRAWS = 400
"""Most draws for one wanted task; on average :data:`HELD_OUT_TASKS` of the draws are held out."""
_MIN_DRAWS = 64
"""Draws after which a generator has shown every kind that it makes."""


def is_held_out(content: str, share: float) -> bool:
    """Whether a content belongs to the held-out side; depends on nothing else."""
    digest = hashlib.blake2b(content.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def make_tasks(seed: int, numbers: range, *, held_out: bool = False) -> Iterator[Task]:
    """The tasks of these numbers that belong to one side: those with a held-out key, or those that tell no held-out answer."""
    for number in numbers:
        task = make_task(random.Random(f"{seed} {number}"))
        is_key_held, is_part_held = (
            is_held_out(task.key, HELD_OUT_TASKS),
            any(is_held_out(each, HELD_OUT_TASKS) for each in task.parts),
        )
        if is_key_held if held_out else not (is_key_held or is_part_held):
            yield task


def held_out_tasks(seed: int, each: int) -> dict[str, list[Task]]:
    """Held-out tasks by kind, ``each`` of every kind; fewer of a kind that has few held-out keys.

    The first tasks of a kind do not depend on ``each``.
    """
    found: dict[str, list[Task]] = {kind: [] for kind in KINDS}
    for generator in GENERATORS:
        kinds: set[str] = set()
        for number in range(_DRAWS * each):
            task = generator(random.Random(f"{seed} {generator.__name__} {number}"))
            kinds.add(task.kind)
            if is_held_out(task.key, HELD_OUT_TASKS) and len(found[task.kind]) < each:
                found[task.kind].append(task)
            if number >= _MIN_DRAWS and all(len(found[kind]) == each for kind in kinds):
                break
    return found
