"""Finding facts: in a short passage, and in a long context; and telling stories."""

from __future__ import annotations

import itertools
import random

from deepinfer.bench.tasks.english import sentence, story
from deepinfer.bench.tasks.task import Task, contains, is_reply, simple
from deepinfer.bench.tasks.text import code
from deepinfer.bench.tasks.words import (
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    FRUITS,
    HOBBIES,
    JOBS,
    NAMES,
    PLACES,
    SURNAMES,
    THINGS,
    article,
    where,
)
from deepinfer.engine.chat import Message

_NEEDLE_CHARS = (300, 16_000)
_RECALL_CHARS = (300, 15_000)


def extractions(rng: random.Random) -> Task:
    """A question about one of some people of a passage."""
    people = rng.sample(NAMES, rng.randint(1, 4))
    facts: list[tuple[str, list[tuple[str, str]]]] = []
    for name in people:
        facts += rng.sample(_facts_of(rng, name), rng.randint(2, 4))
    if rng.random() < 0.5:
        rng.shuffle(facts)
    passage = " ".join(text for text, _ in facts)
    text_of_fact, asked = rng.choice(facts)
    question, answer = rng.choice(asked)
    request = rng.choice(
        (
            "{passage}\n\n{question}",
            "Read the text and answer the question.\n\nText: {passage}\n\nQuestion: {question}",
            "{question}\n\n{passage}",
            "Text:\n{passage}\n\nQuestion: {question}\nAnswer briefly.",
            "Here is a text: {passage}\n{question}",
            "Passage: {passage}\n\nUse the passage to answer: {question}",
        )
    ).format(passage=passage, question=question)

    def reasoning(effort: int) -> str:
        return f'The text says: "{text_of_fact}"' + (f" So the answer is {answer}." if effort > 50 else "")

    bare = answer.removesuffix(".")
    return simple(rng, "extract", request, f"{bare}.", key=f"{passage} {question}", check=contains(bare), reasoning=reasoning)


def _facts_of(rng: random.Random, name: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sentences about a person, each with questions and answers; no two answer the same question."""
    city, job, hobby, age = rng.choice(CITIES), rng.choice(JOBS), rng.choice(HOBBIES), rng.randint(18, 80)
    animal, animal_name, thing, color = rng.choice(ANIMALS[:12]), rng.choice(SURNAMES), rng.choice(THINGS), rng.choice(COLORS)
    food, place, number, year = rng.choice(FOODS), rng.choice(PLACES), rng.randint(10, 99), rng.randint(1950, 2020)
    owned = f"{color} {thing}"

    def of(noun: str) -> str:
        return f"{name}'s {noun}" if rng.random() < 0.5 else f"the {noun} of {name}"

    def first(noun: str) -> str:
        owner = of(noun)
        return f"{owner[0].upper()}{owner[1:]}"

    return [
        (f"{name} lives in {city}.", [(f"Where does {name} live?", city), (f"In which city does {name} live?", city)]),
        (
            f"{name} works as {article(job)}.",
            [(f"What is {of('job')}?", job.capitalize()), (f"What does {name} work as?", article(job).capitalize())],
        ),
        (f"{name} is {age} years old.", [(f"How old is {name}?", str(age)), (f"What is {of('age')}?", str(age))]),
        (f"{first('favorite hobby')} is {hobby}.", [(f"What is {of('hobby')}?", hobby.capitalize())]),
        (
            f"{name} has {article(animal)} called {animal_name}.",
            [
                (f"What is the name of {of(animal)}?", animal_name),
                (f"Which animal does {name} have?", article(animal).capitalize()),
            ],
        ),
        (
            f"{name} bought {article(owned)}.",
            [
                (f"What did {name} buy?", article(owned).capitalize()),
                (f"Which color does {of(thing)} have?", color.capitalize()),
            ],
        ),
        (f"{first('favorite food')} is {food}.", [(f"What is {of('favorite food')}?", food.capitalize())]),
        (f"{name} meets friends {where(place)}.", [(f"Where does {name} meet friends?", where(place).capitalize())]),
        (f"{first('room number')} is {number}.", [(f"What is {of('room number')}?", str(number))]),
        (
            f"{name} was born in {year}.",
            [(f"When was {name} born?", f"In {year}"), (f"In which year was {name} born?", str(year))],
        ),
    ]


def needles(rng: random.Random) -> Task:
    """One fact in a text whose length is drawn, among other text and other facts of the same form."""
    low, high = _NEEDLE_CHARS
    return needle_of(rng, int(low * (high / low) ** rng.random()))


def needle_of(rng: random.Random, chars: int) -> Task:
    """One fact in a text of about ``chars`` characters, among other text and other facts of the same form."""
    return needle_in(rng, _filler(rng, chars))


def _filler(rng: random.Random, chars: int) -> list[str]:
    """Sentences of about ``chars`` characters together."""
    filler: list[str] = []
    size = 0
    while size < chars:
        filler.append(sentence(rng))
        size += len(filler[-1]) + 1
    return filler


_NEEDLES = (
    ("The secret code of {subject} is {value}.", "What is the secret code of {subject}?", NAMES),
    ("The password for the {subject} is {value}.", "What is the password for the {subject}?", PLACES),
    ("The phone number of {subject} is {value}.", "What is the phone number of {subject}?", NAMES),
    ("The ticket number of {subject} is {value}.", "What is the ticket number of {subject}?", NAMES),
    ("The magic word of the {subject} is {value}.", "What is the magic word of the {subject}?", PLACES),
    (
        "Remember this: the key of the {subject} has the number {value}.",
        "Which number does the key of the {subject} have?",
        PLACES,
    ),
)
"""Facts, the questions for their values, and the subjects that they may have."""


def _value(rng: random.Random, form: str) -> str:
    return rng.choice([*THINGS, *FRUITS, *ANIMALS]) if "magic word" in form else code(rng, rng.randint(4, 8))


def _scattered(rng: random.Random, filler: list[str], facts: list[str]) -> list[str]:
    """The sentences of ``filler`` with the facts at random places."""
    sentences = list(filler)
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return sentences


def _paragraphs(rng: random.Random, sentences: list[str]) -> str:
    lines: list[str] = []
    rest = list(sentences)
    while rest:
        count = rng.randint(4, 12)
        lines.append(" ".join(rest[:count]))
        del rest[:count]
    return "\n\n".join(lines)


def needle_in(rng: random.Random, filler: list[str]) -> Task:
    """One fact among these sentences and other facts of the same form."""
    form, ask, known = rng.choice(_NEEDLES)
    subjects = rng.sample(known, rng.randint(1, 4))
    values = [_value(rng, form) for _ in subjects]
    needles_ = [form.format(subject=subject, value=value) for subject, value in zip(subjects, values, strict=True)]
    sentences = _scattered(rng, filler, needles_)
    chosen = rng.randrange(len(subjects))
    question = ask.format(subject=subjects[chosen])
    passage = _paragraphs(rng, sentences)
    request = rng.choice(
        (
            f"{passage}\n\n{question}",
            f"Read this text. There is a question at the end.\n\n{passage}\n\nQuestion: {question}",
            f"{question} The answer is in this text:\n\n{passage}",
            f"Here is a long text.\n\n{passage}\n\nNow answer: {question}",
        )
    )
    answer = values[chosen]
    return simple(
        rng,
        "needle",
        request,
        f"{answer}.",
        key=f"{needles_} {question}",
        check=contains(answer),
        reasoning=lambda effort: f'The text says: "{needles_[chosen]}"',
        thinking_share=0.1,
    )


def recalls(rng: random.Random) -> Task:
    """Several questions, one after the other, about facts that are scattered in a text."""
    low, high = _RECALL_CHARS
    filler = _filler(rng, int(low * (high / low) ** rng.random()))
    answers: dict[str, tuple[str, str]] = {}
    for _ in range(rng.randint(3, 10)):
        form, ask, known = rng.choice(_NEEDLES)
        subject, value = rng.choice(known), _value(rng, form)
        answers[ask.format(subject=subject)] = form.format(subject=subject, value=value), value
    passage = _paragraphs(rng, _scattered(rng, filler, [fact for fact, _ in answers.values()]))
    questions = rng.sample(sorted(answers), len(answers))
    first = rng.choice((f"{passage}\n\n{questions[0]}", f"Read this text. I have some questions.\n\n{passage}\n\n{questions[0]}"))
    messages = [Message("user", first)]
    for asked, following in itertools.pairwise(questions):
        messages += [Message("assistant", f"{answers[asked][1]}."), Message("user", following)]
    answer = answers[questions[-1]][1]
    return Task(
        kind="recall",
        messages=tuple(messages),
        answer=Message("assistant", f"{answer}."),
        check=contains(answer),
        key=f"recall {sorted(answers.items())}",
    )


def stories(rng: random.Random) -> Task:
    """Tell a short story about somebody and an animal or a thing."""
    name, subject = rng.choice(NAMES), rng.choice([*ANIMALS, *THINGS])
    request = rng.choice(
        (
            "Tell me a short story about {name} and {subject}.",
            "Write a short story about {name} and {subject}.",
            "Please tell a story about {name} and {subject}.",
            "I would like to hear a story about {name} and {subject}.",
            "Write a story for children. {name} and {subject} should be in it.",
            "Can you tell me a story about {name} and {subject}?",
        )
    ).format(name=name, subject=article(subject))
    text = story(rng, name, subject)
    return simple(rng, "story", request, text, key=text, check=is_reply())
