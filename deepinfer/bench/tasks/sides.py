"""The two sides of generated tasks: those that training may have, and those that it never has.

A side is a function of content only, so that training and evaluation agree without a list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from deepinfer.bench.tasks import make_task
from deepinfer.bench.tasks.task import Task

HELD_OUT_TASKS = 1 / 16


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
