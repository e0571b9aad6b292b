"""Sums, differences, comparisons, dates and times."""

from __future__ import annotations

import random

from deepinfer.bench.tasks.task import Task, last_number, same_text, simple
from deepinfer.bench.tasks.words import DAYS, MONTH_DAYS, MONTHS, NAMES, THINGS

_SUM_QUESTIONS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a} + {b}",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "Compute {a} plus {b}.",
    "How much is {a} plus {b}?",
    "Please add {a} to {b}.",
    "What do you get if you add {a} and {b}?",
    "Tell me the result of {a} + {b}.",
    "What is {a} plus {b}?",
    "Find the sum: {a} + {b}",
    "I have {a} coins and get {b} more. How many coins do I have?",
)
_SHORT = " Answer with the number only."
_DIFFERENCE_QUESTIONS = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a} - {b}",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "Compute {a} minus {b}.",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Take {b} away from {a}.",
    "What is the difference between {a} and {b}?",
    "I have {a} coins and give away {b}. How many coins are left?",
)


def _number(rng: random.Random) -> int:
    """A number of one to four digits; those of two are the most frequent."""
    digits = rng.choice((1, 2, 2, 2, 2, 3, 3, 4))
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def sums(rng: random.Random) -> Task:
    """The sum of two numbers, or of three small ones."""
    a, b = _number(rng), _number(rng)
    question = rng.choice(_SUM_QUESTIONS).format(a=a, b=b)
    answer = f"{a} + {b} = {a + b}"
    if rng.random() < 0.4:
        question, answer = f"{question}{_SHORT}", str(a + b)
    return simple(
        rng,
        "sum",
        question,
        answer,
        key=_sum_key(a, b),
        check=last_number(a + b),
        reasoning=lambda effort: add_steps(a, b, effort),
    )


def _sum_key(a: int, b: int) -> str:
    return f"{min(a, b)}+{max(a, b)}"


def _difference_key(a: int, b: int) -> str:
    return f"{a}-{b}"


def add_steps(a: int, b: int, effort: int) -> str:
    """The addition digit by digit; the highest effort checks it."""
    if effort == 50:
        return f"{a} + {b} = {a + b}."
    lines = []
    carry = 0
    for left, right in zip(*_digits(a, b), strict=True):
        total = left + right + carry
        carried = f" + {carry}" if carry else ""
        carry, before = total // 10, carry
        lines.append(f"{left} + {right}{carried} = {left + right + before}: write {total % 10}, carry {carry}.")
    lines.append(f"The result is {a + b}.")
    if effort == 100:
        lines.append(f"Check: {a + b} - {b} = {a}. Right.")
    return "\n".join(lines)


def _digits(a: int, b: int) -> tuple[list[int], list[int]]:
    """The digits of both, lowest first, filled up with zeros to one length."""
    width = max(len(str(a)), len(str(b)))
    return [int(each) for each in reversed(f"{a:0{width}d}")], [int(each) for each in reversed(f"{b:0{width}d}")]


def differences(rng: random.Random) -> Task:
    """The difference of two numbers; it is never negative."""
    b, a = sorted((_number(rng), _number(rng)))
    question = rng.choice(_DIFFERENCE_QUESTIONS).format(a=a, b=b)
    answer = f"{a} - {b} = {a - b}"
    if rng.random() < 0.4:
        question, answer = f"{question}{_SHORT}", str(a - b)

    def reasoning(effort: int) -> str:
        if effort == 50:
            return f"{a} - {b} = {a - b}."
        lines, borrow = [], 0
        for left, right in zip(*_digits(a, b), strict=True):
            taken = right + borrow
            borrowed = f" - {borrow}" if borrow else ""
            borrow = int(left < taken)
            shown = f"{left + 10 * borrow} - {right}{borrowed}"
            lines.append(f"{shown} = {left + 10 * borrow - taken}{', borrow 1' if borrow else ''}.")
        lines.append(f"The result is {a - b}.")
        if effort == 100:
            lines.append(f"Check: {a - b} + {b} = {a}. Right.")
        return "\n".join(lines)

    return simple(rng, "difference", question, answer, key=_difference_key(a, b), check=last_number(a - b), reasoning=reasoning)


def products(rng: random.Random) -> Task:
    """A product of the multiplication table."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    question = rng.choice(("What is {a} x {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.", "How much is {a} times {b}?")).format(
        a=a, b=b
    )
    return simple(rng, "product", question, f"{a} x {b} = {a * b}", key=f"{a}*{b} {question}", check=last_number(a * b))


def comparisons(rng: random.Random) -> Task:
    """The largest or smallest of some numbers, or the greater of two."""
    count = rng.randint(2, 6)
    numbers = rng.sample(range(1, 10 ** rng.choice((2, 2, 3))), count)
    is_largest = rng.random() < 0.5
    word = rng.choice(("largest", "greatest", "highest", "biggest") if is_largest else ("smallest", "lowest"))
    shown = ", ".join(map(str, numbers))
    question = rng.choice(
        (
            f"Which number is the {word}: {shown}?",
            f"What is the {word} of these numbers? {shown}",
            f"Find the {word} number.\n{shown}",
            f"Numbers: {shown}\nWhich one is the {word}?",
        )
    )
    result = max(numbers) if is_largest else min(numbers)
    return simple(rng, "compare", question, str(result), key=f"{sorted(numbers)} {is_largest}", check=last_number(result))


def dates(rng: random.Random) -> Task:
    """Days of the week, months, days after a date, times of day."""
    return rng.choice((_week_day, _month, _later_date, _iso_date, _later_time))(rng)


def _week_day(rng: random.Random) -> Task:
    day, steps = rng.randrange(7), rng.randint(1, 10)
    is_later = rng.random() < 0.6
    result = DAYS[(day + (steps if is_later else -steps)) % 7]
    unit = "day" if steps == 1 else "days"
    if is_later:
        question = rng.choice(
            (
                f"Today is {DAYS[day]}. Which day is it in {steps} {unit}?",
                f"If today is {DAYS[day]}, what day will it be in {steps} {unit}?",
                f"What day comes {steps} {unit} after {DAYS[day]}?",
            )
        )
    else:
        question = rng.choice(
            (
                f"Today is {DAYS[day]}. Which day was it {steps} {unit} ago?",
                f"What day comes {steps} {unit} before {DAYS[day]}?",
            )
        )

    def reasoning(effort: int) -> str:
        step = 1 if is_later else -1
        passed = [DAYS[(day + step * number) % 7] for number in range(1, steps + 1)]
        text = f"I count from {DAYS[day]}: {', '.join(passed)}."
        return text if effort < 100 else f"{text}\nThat is {steps} {unit}. The answer is {result}."

    return simple(rng, "date", question, f"{result}.", key=f"{day} {steps} {is_later} {question}", reasoning=reasoning)


def _month(rng: random.Random) -> Task:
    month = rng.randrange(12)
    name = MONTHS[month]
    after, before = MONTHS[(month + 1) % 12], MONTHS[month - 1]
    question, answer = rng.choice(
        (
            (f"Which month comes after {name}?", after),
            (f"Which month comes before {name}?", before),
            (f"Which number does the month {name} have?", str(month + 1)),
            (f"What is month number {month + 1} of the year?", name),
            (f"How many days does {name} have?", "28, or 29 in a leap year" if month == 1 else str(MONTH_DAYS[month])),
        )
    )
    return simple(rng, "date", question, f"{answer}.", key=question)


def _later_date(rng: random.Random) -> Task:
    month = rng.randrange(12)
    day, steps = rng.randint(1, MONTH_DAYS[month]), rng.randint(1, 20)
    is_next = day + steps > MONTH_DAYS[month]
    later_day = day + steps - (MONTH_DAYS[month] if is_next else 0)
    later_month = MONTHS[(month + is_next) % 12]
    unit = "day" if steps == 1 else "days"
    question = rng.choice(
        (
            f"What date is {steps} {unit} after {MONTHS[month]} {day}? February has 28 days.",
            f"It is {MONTHS[month]} {day}. Which date is it in {steps} {unit}? February has 28 days.",
        )
    )

    def reasoning(effort: int) -> str:
        text = f"{MONTHS[month]} has {MONTH_DAYS[month]} days. {day} + {steps} = {day + steps}."
        if is_next:
            text += f" {day + steps} - {MONTH_DAYS[month]} = {later_day}, in {later_month}."
        return text

    answer = f"{later_month} {later_day}."
    return simple(rng, "date", question, answer, key=f"{month} {day} {steps}", reasoning=reasoning, thinking_share=0.5)


def _iso_date(rng: random.Random) -> Task:
    month = rng.randrange(12)
    day, year = rng.randint(1, MONTH_DAYS[month]), rng.randint(1900, 2099)
    iso, words, european = f"{year}-{month + 1:02d}-{day:02d}", f"{MONTHS[month]} {day}, {year}", f"{day} {MONTHS[month]} {year}"
    source, target, form = rng.choice(
        (
            (words, iso, "in the form YYYY-MM-DD"),
            (european, iso, "in the form YYYY-MM-DD"),
            (iso, words, "in words, with the month first"),
            (iso, european, "in words, with the day first"),
        )
    )
    question = rng.choice(
        (f"Write the date {source} {form}.", f"Rewrite this date {form}: {source}", f"Date: {source}\nShow it {form}.")
    )
    return simple(rng, "date", question, target, key=iso)


def _later_time(rng: random.Random) -> Task:
    hour, minute = rng.randrange(24), rng.randrange(0, 60, 5)
    steps = rng.choice((5, 10, 15, 20, 30, 45, 60, 90, 120))
    total = hour * 60 + minute + steps
    result = f"{total // 60 % 24:02d}:{total % 60:02d}"
    question = rng.choice(
        (
            f"It is {hour:02d}:{minute:02d}. What time is it in {steps} minutes?",
            f"A meeting starts at {hour:02d}:{minute:02d} and takes {steps} minutes. When does it end?",
            f"What time is it {steps} minutes after {hour:02d}:{minute:02d}?",
        )
    )
    return simple(rng, "date", question, f"{result}.", key=f"{hour} {minute} {steps}", check=same_text(f"{result}."))


def reasons(rng: random.Random) -> Task:
    """A small story with numbers, thought through in steps."""
    first, second = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    things = "boxes" if thing == "box" else "brushes" if thing == "brush" else "knives" if thing == "knife" else f"{thing}s"
    a, b, c = rng.randint(5, 60), rng.randint(2, 40), rng.randint(1, 5)
    kind = rng.randrange(4)
    parts: tuple[str, ...]
    if kind == 0:
        total = a + b
        story = f"{first} has {a} {things}. {second} gives {first} {b} more. How many {things} does {first} have now?"
        steps = [f"{first} starts with {a} {things}.", f"{second} gives {b} more.", f"{a} + {b} = {total}."]
        parts = (f"sum {_sum_key(a, b)}",)
    elif kind == 1:
        a = a + b
        total = a - b
        story = f"{first} has {a} {things} and sells {b} of them. How many {things} does {first} have left?"
        steps = [f"{first} starts with {a} {things}.", f"{first} sells {b}.", f"{a} - {b} = {total}."]
        parts = (f"difference {_difference_key(a, b)}",)
    elif kind == 2:
        a = a + b
        total = a - b + c
        story = f"{first} has {a} {things}. {first} gives {b} to {second} and then buys {c} more. "
        story += f"How many {things} does {first} have?"
        steps = [f"{first} starts with {a} {things}.", f"After giving {b} away: {a} - {b} = {a - b}."]
        steps.append(f"After buying {c}: {a - b} + {c} = {total}.")
        parts = (f"difference {_difference_key(a, b)}", f"sum {_sum_key(a - b, c)}")
    else:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        total = a * b
        story = f"{first} has {a} bags with {b} {things} in each bag. How many {things} does {first} have in all?"
        steps = [f"There are {a} bags.", f"Each bag has {b} {things}.", f"{a} x {b} = {total}."]
        parts = ()
    unit = thing if total == 1 else things

    def reasoning(effort: int) -> str:
        if effort == 50:
            return steps[-1]
        return " ".join(steps) if effort == 75 else "\n".join([*steps, f"So the answer is {total}."])

    return simple(
        rng,
        "reason",
        story,
        f"{first} has {total} {unit}{' left' if kind == 1 else ''}.",
        key=f"{kind} {a} {b} {c if kind == 2 else 0}",
        parts=parts,
        check=last_number(total),
        reasoning=reasoning,
        thinking_share=0.7,
    )
