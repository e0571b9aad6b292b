"""Small talk, plain facts about simple things, and conversations of several turns."""

from __future__ import annotations

import random

from deepinfer.bench.tasks.numbers import comparisons, dates, differences, sums
from deepinfer.bench.tasks.passages import stories
from deepinfer.bench.tasks.task import SYSTEM_SHARE, Task, contains, is_reply, same_text, simple
from deepinfer.bench.tasks.text import copies, counts, edits, sorts
from deepinfer.bench.tasks.words import (
    ANIMALS,
    CAPITALS,
    CITIES,
    COLORS,
    EXPLANATIONS,
    FRUITS,
    HOBBIES,
    JOBS,
    LEGS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    PASTS,
    PLANETS,
    PLURALS,
    SHAPE_SIDES,
    SMALL_TALK,
    SOUNDS,
    SYSTEMS,
    THING_COLORS,
    UNITS,
    article,
)
from deepinfer.engine.chat import Message


def plain_fact(rng: random.Random) -> tuple[str, str]:
    """A question about a simple thing, and its answer."""
    form = rng.randrange(14)
    if form <= 1:
        country, capital = rng.choice(tuple(CAPITALS.items()))
        shown = country[0].upper() + country[1:]
        if rng.random() < 0.25:
            return f"Which country has the capital {capital}?", f"{shown}."
        question = rng.choice(("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."))
        return question.format(country), f"The capital of {country} is {capital}" + ("" if capital.endswith(".") else ".")
    if form <= 3:
        word, opposite = rng.choice(tuple(OPPOSITES.items()))
        question = rng.choice(
            ("What is the opposite of {}?", "What is the opposite of the word {}?", 'Give me the opposite of "{}".')
        )
        return question.format(word), f"The opposite of {word} is {opposite}."
    if form == 4:
        word, plural = rng.choice(tuple(PLURALS.items()))
        return rng.choice(("What is the plural of {}?", 'Give me the plural of "{}".')).format(
            word
        ), f"The plural of {word} is {plural}."
    if form == 5:
        verb, past = rng.choice(tuple(PASTS.items()))
        question = rng.choice(("What is the past tense of {}?", 'Give me the past tense of "{}".'))
        return question.format(verb), f"The past tense of {verb} is {past}."
    if form == 6:
        animal, sound = rng.choice(tuple(SOUNDS.items()))
        return rng.choice(("What sound does {} make?", "Which noise does {} make?")).format(
            article(animal)
        ), f"{article(animal).capitalize()} {sound}."
    if form == 7:
        animal, legs = rng.choice(tuple(LEGS.items()))
        shown = "no" if legs == 0 else NUMBER_WORDS[legs]
        return f"How many legs does {article(animal)} have?", f"{article(animal).capitalize()} has {shown} legs."
    if form == 8:
        thing, color = rng.choice(tuple(THING_COLORS.items()))
        shown = thing[0].upper() + thing[1:]
        return rng.choice(("What color is {}?", "Which color does {} have?")).format(thing), f"{shown} is {color}."
    if form == 9:
        shape, sides = rng.choice(tuple(SHAPE_SIDES.items()))
        return f"How many sides does {article(shape)} have?", f"{article(shape).capitalize()} has {NUMBER_WORDS[sides]} sides."
    if form == 10:
        at = rng.randrange(len(PLANETS) - 1)
        if rng.random() < 0.5:
            return f"Which planet comes after {PLANETS[at]}, seen from the sun?", f"{PLANETS[at + 1]} comes after {PLANETS[at]}."
        return (
            f"Which planet comes before {PLANETS[at + 1]}, seen from the sun?",
            f"{PLANETS[at]} comes before {PLANETS[at + 1]}.",
        )
    if form == 11:
        (small, large), number = rng.choice(tuple(UNITS.items()))
        holder = "the English alphabet" if large == "English alphabet" else "an hour" if large == "hour" else article(large)
        verb = "does" if rng.random() < 0.5 else ""
        if verb:
            return f"How many {small} does {holder} have?", f"{holder[0].upper()}{holder[1:]} has {number} {small}."
        return f"How many {small} are in {holder}?", f"There are {number} {small} in {holder}."
    if form == 12:
        groups = {"fruit": FRUITS, "animal": ANIMALS, "color": COLORS, "job": JOBS}
        asked, group = rng.choice(tuple(groups)), rng.choice(tuple(groups))
        word = rng.choice([each for each in groups[group] if each != "orange"])
        yes = f"Yes, {word} is a word for {article(group)}."
        return f"Is {word} a word for {article(asked)}?", yes if asked == group else f"No, {word} is a word for {article(group)}."
    return rng.choice(tuple(EXPLANATIONS.items()))


def facts(rng: random.Random) -> Task:
    """A question about a simple thing."""
    question, answer = plain_fact(rng)
    request = rng.choice(
        ("{}", "{}", "{}", "Please tell me: {}", "I have a question. {}", "{} Please answer in a sentence.")
    ).format(question)
    expected = answer.split(" is ")[-1].removesuffix(".") if " is " in answer and len(answer) < 60 else answer
    return simple(
        rng,
        "fact",
        request,
        answer,
        key=request,
        check=contains(expected),
        reasoning=lambda effort: (
            "This is a simple question." if effort < 100 else "This is a simple question. I know the answer."
        ),
        thinking_share=0.1,
    )


def small_talk(rng: random.Random) -> Task:
    """Greetings and questions about the model."""
    question, answer = rng.choice(tuple(SMALL_TALK.items()))
    return simple(
        rng,
        "talk",
        question,
        answer,
        key=question,
        check=is_reply(),
        reasoning=lambda effort: "The user wants to talk.",
        thinking_share=0.1,
    )


_EXACT_CHARS = 200
_TURNS = (sums, sums, differences, comparisons, dates, copies, sorts, counts, edits, facts, small_talk, stories)


def dialogues(rng: random.Random) -> Task:
    """Several turns: tasks one after the other, or something that was said before and is asked for later."""
    head = (Message("system", rng.choice(SYSTEMS)),) if rng.random() < SYSTEM_SHARE else ()
    if rng.random() < 0.5:
        tasks = [rng.choice(_TURNS)(rng) for _ in range(rng.randint(2, 5))]
        *earlier, question, answer = (message for task in tasks for message in _turn(task))
        check = same_text(answer.content) if len(answer.content) < _EXACT_CHARS else is_reply()
        key = f"dialogue {[task.key for task in tasks]}"
    else:
        told, asked, value, confirmed = _remembered(rng)
        tasks = [rng.choice(_TURNS)(rng) for _ in range(rng.randint(0, 3))]
        earlier = [Message("user", told), Message("assistant", confirmed), *(each for task in tasks for each in _turn(task))]
        question, answer = Message("user", asked), Message("assistant", value)
        check = contains(value.split(" is ")[-1].removesuffix("."))
        key = f"dialogue {told} {asked} {[task.key for task in tasks]}"
    return Task(
        kind="dialogue",
        messages=(*head, *earlier, question),
        answer=answer,
        check=check,
        key=key,
        parts=tuple(task.key for task in tasks),
    )


def _turn(task: Task) -> tuple[Message, Message]:
    """The question and the answer of a task of one turn, without thinking."""
    return task.messages[-1], Message("assistant", task.answer.content)


def _remembered(rng: random.Random) -> tuple[str, str, str, str]:
    """What the user tells, asks later, the answer, and the reply to what was told."""
    name, city, color, job, hobby = (rng.choice(group) for group in (NAMES, CITIES, COLORS, JOBS, HOBBIES))
    number, animal = rng.randint(2, 999), rng.choice(ANIMALS[:10])
    return rng.choice(
        (
            (f"My name is {name}.", "What is my name?", f"Your name is {name}.", f"Nice to meet you, {name}."),
            (f"Hello, I am {name}.", "Do you remember my name?", f"Your name is {name}.", f"Hello {name}! How can I help you?"),
            (f"I live in {city}.", "Which city do I live in?", f"You live in {city}.", f"{city} is a nice city."),
            (
                f"My favorite color is {color}.",
                "What is my favorite color?",
                f"Your favorite color is {color}.",
                f"{color.capitalize()} is a nice color.",
            ),
            (
                f"I work as {article(job)}.",
                "What is my job?",
                f"You work as {article(job)}.",
                "That sounds like an interesting job.",
            ),
            (f"My hobby is {hobby}.", "What is my hobby?", f"Your hobby is {hobby}.", f"{hobby.capitalize()} is a good hobby."),
            (
                f"Remember the number {number}.",
                "Which number did I tell you?",
                f"The number is {number}.",
                f"I will remember the number {number}.",
            ),
            (
                f"I have {article(animal)} called {name}.",
                f"What is the name of my {animal}?",
                f"The name of your {animal} is {name}.",
                f"{name} is a nice name for {article(animal)}.",
            ),
        )
    )
