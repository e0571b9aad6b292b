"""Tasks in the model's chat format that a program makes and judges.

Every generator is a pure function of a random generator; :func:`make_task` chooses one by its weight.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from deepinfer.bench.tasks.forms import forms
from deepinfer.bench.tasks.numbers import comparisons, dates, differences, products, reasons, sums
from deepinfer.bench.tasks.passages import extractions, needles, recalls, stories
from deepinfer.bench.tasks.talk import dialogues, facts, small_talk
from deepinfer.bench.tasks.task import Task
from deepinfer.bench.tasks.text import copies, counts, edits, sorts
from deepinfer.bench.tasks.tools import tool_calls

__all__ = ["GENERATORS", "KINDS", "Task", "make_task"]

GENERATORS: dict[Callable[[random.Random], Task], int] = {
    sums: 14,
    differences: 6,
    products: 2,
    comparisons: 4,
    dates: 7,
    reasons: 6,
    copies: 8,
    sorts: 6,
    counts: 6,
    edits: 8,
    extractions: 9,
    needles: 4,
    recalls: 6,
    forms: 10,
    tool_calls: 10,
    dialogues: 9,
    facts: 8,
    small_talk: 2,
    stories: 5,
}
"""Generator -> its share of the tasks."""

KINDS = (
    "sum", "difference", "product", "compare", "date", "reason", "copy", "sort", "count", "edit", "extract", "needle", "json",
    "tool", "result", "dialogue", "fact", "talk", "story", "recall",
)  # fmt: skip
"""Every :attr:`Task.kind`."""


def make_task(rng: random.Random) -> Task:
    """One task of a random kind; the same state of ``rng`` gives the same task."""
    (generator,) = rng.choices(list(GENERATORS), weights=list(GENERATORS.values()))
    return generator(rng)
