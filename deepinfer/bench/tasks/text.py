"""Exact work on text: copying, sorting, counting, editing."""

from __future__ import annotations

import random
import string

from deepinfer.bench.tasks.english import paragraph, sentence
from deepinfer.bench.tasks.task import Task, last_number, simple
from deepinfer.bench.tasks.words import FOODS, NAMES, NOUNS, WORDS

_COPY_REQUESTS = (
    "Repeat the following text exactly:\n{text}",
    "Copy this:\n{text}",
    "Copy the text below without changes.\n\n{text}",
    "Say exactly this: {text}",
    "Repeat after me: {text}",
    "Write the same text again:\n{text}",
    "Please repeat: {text}",
    "Echo this text:\n{text}",
    "{text}\n\nRepeat the text above.",
    "Return this text as it is:\n\n{text}",
)


def code(rng: random.Random, size: int) -> str:
    """A random code of letters and digits."""
    letters = rng.choice(
        (string.ascii_uppercase + string.digits, string.ascii_lowercase + string.digits, string.digits, "abcdef0123456789")
    )
    return "".join(rng.choices(letters, k=size))


def copies(rng: random.Random) -> Task:
    """Repeat words, sentences, codes or lines."""
    form = rng.randrange(6)
    if form == 0:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    elif form == 1:
        text = sentence(rng)
    elif form == 2:
        text = code(rng, rng.randint(3, 16))
    elif form == 3:
        text = "\n".join(f"{rng.choice(WORDS)}: {rng.randrange(1000)}" for _ in range(rng.randint(2, 8)))
    elif form == 4:
        text = " ".join(code(rng, rng.randint(2, 6)) for _ in range(rng.randint(2, 8)))
    else:
        text = paragraph(rng, rng.randint(2, 6))
    return copy_of(rng, text)


def copy_of(rng: random.Random, text: str) -> Task:
    """Repeat this text."""
    return simple(rng, "copy", rng.choice(_COPY_REQUESTS).replace("{text}", text), text, key=text)


def sorts(rng: random.Random) -> Task:
    """Put numbers or words in order."""
    count = rng.randint(3, 8)
    is_down = rng.random() < 0.3
    items: list[str]
    if rng.random() < 0.5:
        numbers = rng.sample(range(10 ** rng.choice((2, 2, 3))), count)
        items, ordered = [str(each) for each in numbers], [str(each) for each in sorted(numbers, reverse=is_down)]
        order = rng.choice(
            ("from largest to smallest", "in descending order") if is_down else ("from smallest to largest", "in ascending order")
        )
        what = "numbers"
    else:
        what, group = rng.choice((("names", NAMES), ("words", tuple(dict.fromkeys(WORDS)))))
        items = rng.sample(group, count)
        ordered = sorted(items, reverse=is_down)
        order = (
            "in reverse alphabetical order" if is_down else rng.choice(("alphabetically", "in alphabetical order", "from A to Z"))
        )
    is_lines = rng.random() < 0.3
    joint, gap = ("\n", "\n") if is_lines else (", ", " ")
    shown = joint.join(items)
    question = rng.choice(
        (
            f"Sort these {what} {order}:{gap}{shown}",
            f"Put the following {what} {order}.\n{shown}",
            f"{shown}\n\nSort the {what} above {order}.",
            f"Please sort {order}:\n{shown}",
        )
    )

    def reasoning(effort: int) -> str:
        text = f"There are {count} {what}. The first one {order} is {ordered[0]}, and the last one is {ordered[-1]}."
        return text if effort < 100 else f"{text}\nIn order: {', '.join(ordered)}."

    return simple(
        rng, "sort", question, joint.join(ordered), key=f"{sorted(items)} {is_down}", reasoning=reasoning, thinking_share=0.2
    )


def counts(rng: random.Random) -> Task:
    """Count words, letters or how often a word occurs."""
    form = rng.randrange(4)
    if form == 0:
        words = rng.choices(NOUNS, k=rng.randint(2, 12))
        question = rng.choice(("How many words are in this list? {}", "Count the words: {}", "How many words are there?\n{}"))
        return simple(
            rng, "count", question.format(" ".join(words)), str(len(words)), key=" ".join(words), check=last_number(len(words))
        )
    if form == 1:
        word = rng.choice(WORDS)
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice(string.ascii_lowercase)
        total = word.count(letter)
        question = rng.choice(
            (f'How many times does the letter "{letter}" occur in "{word}"?', f"Count the letter {letter} in the word {word}.")
        )

        def spelled(effort: int) -> str:
            marked = ", ".join(
                f"{each} ({word[: at + 1].count(letter)})" if each == letter else each for at, each in enumerate(word)
            )
            return f"I spell the word: {marked}."

        return simple(rng, "count", question, str(total), key=f"{letter} {word}", check=last_number(total), reasoning=spelled)
    if form == 2:
        word = rng.choice(WORDS)
        question = rng.choice((f'How many letters does the word "{word}" have?', f"Count the letters of {word}."))

        def numbered(effort: int) -> str:
            return f"{', '.join(f'{each} {at}' for at, each in enumerate(word, 1))}."

        return simple(
            rng, "count", question, str(len(word)), key=f"length {word}", check=last_number(len(word)), reasoning=numbered
        )
    group = rng.sample(FOODS, 3)
    items = rng.choices(group, k=rng.randint(3, 12))
    total = items.count(group[0])
    question = f"How many times does the word {group[0]} occur in this list?\n{', '.join(items)}"
    return simple(rng, "count", question, str(total), key=f"{items} {group[0]}", check=last_number(total))


def edits(rng: random.Random) -> Task:
    """Change a text: case, order, words, spelling."""
    words = rng.sample(tuple(dict.fromkeys(WORDS)), rng.randint(3, 8))
    text = " ".join(words)
    line = sentence(rng)
    old, new, other = rng.choice(words), rng.choice(NOUNS), rng.choice(WORDS)
    word = rng.choice(WORDS)
    at = rng.randrange(len(words))
    places = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    question, answer = rng.choice(
        (
            (f"Write this in capital letters: {line}", line.upper()),
            (f"Convert to upper case: {text}", text.upper()),
            (f"Write this in lower case: {line.upper()}", line.lower()),
            (f"Reverse the order of these words: {text}", " ".join(reversed(words))),
            (f"Write the words in reverse order.\n{text}", " ".join(reversed(words))),
            (f'Replace "{old}" by "{new}" in this text: {text}', " ".join(new if each == old else each for each in words)),
            (
                f"In the text below, change the word {old} to {new}.\n{text}",
                " ".join(new if each == old else each for each in words),
            ),
            (f'Remove the word "{old}": {text}', " ".join(each for each in words if each != old)),
            (f'Add the word "{other}" at the end: {text}', f"{text} {other}"),
            (f'Add the word "{other}" at the beginning: {text}', f"{other} {text}"),
            (f"Join these words with hyphens: {text}", "-".join(words)),
            (f"Separate these words with commas: {text}", ", ".join(words)),
            (f"Write each word on its own line: {text}", "\n".join(words)),
            (f"Make a numbered list of these words: {text}", "\n".join(f"{n}. {each}" for n, each in enumerate(words, 1))),
            (f"Make a bullet list: {', '.join(words)}", "\n".join(f"- {each}" for each in words)),
            (f"What is the {places[at]} word? {text}", words[at]),
            (f"What is the last word of this text? {text}", words[-1]),
            (f"What is the first word of this text? {text}", words[0]),
            (f"Write each word with a capital first letter: {text}", text.title()),
            (f"Spell the word {word} with hyphens between the letters.", "-".join(word)),
            (f"Write the word {word} backwards.", word[::-1]),
            (f"What is the first letter of {word}?", word[0]),
            (f"What is the last letter of {word}?", word[-1]),
            (f"Put quotation marks around this text: {line}", f'"{line}"'),
            (f"Write the first letter of each word: {text}", " ".join(each[0] for each in words)),
        )
    )
    return simple(rng, "edit", question, answer, key=question)
