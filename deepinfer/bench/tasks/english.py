"""A small grammar of simple English: sentences, paragraphs and stories."""

from __future__ import annotations

import random

from deepinfer.bench.tasks.words import (
    ADJECTIVES,
    ANIMAL_COLORS,
    ANIMALS,
    CITIES,
    CLOSABLE_PLACES,
    COLORS,
    FOODS,
    FRUITS,
    JOBS,
    MOODS,
    NAMES,
    OUTDOOR_PLACES,
    PLACES,
    THINGS,
    article,
    listed,
    where,
)

_WEATHER = ("It was a cold morning.", "It was a warm day.", "The sun was bright.", "It rained all day.", "The wind was strong.")
_ENDINGS = (
    "From that day on, they were good friends.",
    "Then they all went home and had dinner together.",
    "{name} was happy and slept well that night.",
    "{name} smiled and said thank you.",
    "And that was the end of a long day.",
    "{name} never forgot that day.",
    "In the evening, {name} told the whole story at home.",
)


def sentence(rng: random.Random) -> str:
    """One simple sentence about people, animals and things."""
    name, other = rng.sample(NAMES, 2)
    thing, second = rng.sample(THINGS, 2)
    animal, place, color, adjective = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(COLORS), rng.choice(ADJECTIVES)
    pet = rng.choice(("dog", "cat", "horse", "cow", "goat"))
    job, food, city = rng.choice(JOBS), rng.choice(FOODS), rng.choice(CITIES)
    return rng.choice(
        (
            f"The {adjective} {animal} sleeps {where(place)}.",
            f"{name} walks to the {place} every morning.",
            f"The {thing} is on the {second}.",
            f"{name} likes {food}, but {other} does not.",
            f"There is {article(color)} {thing} {where(place)}.",
            f"{name} works as {article(job)} in {city}.",
            f"The {animal} ran across the {place}.",
            f"{name} gave {other} {article(thing)}.",
            f"The {job} bought {article(color)} {thing} in {city}.",
            f"In the evening, {name} and {other} drink {rng.choice(('tea', 'coffee', 'milk', 'juice'))}.",
            f"The {rng.choice(CLOSABLE_PLACES)} is closed on Sundays.",
            f"The {job} saw {article(rng.choice(ANIMAL_COLORS))} {animal} {where(place)}.",
            f"{name} lost the {thing} near the {place}.",
            f"{name} has {rng.randint(2, 9)} {pet}s and one {rng.choice(('parrot', 'turtle', 'rabbit', 'hen'))}.",
            f"The train to {city} leaves at {rng.randint(6, 22)}:{rng.choice(('00', '15', '30', '45'))}.",
            f"The {thing} {where(place)} belongs to the {job}.",
            f"{name} and {other} met {where(place)} last week.",
            f"The {job} is {rng.choice(MOODS)} today.",
        )
    )


def paragraph(rng: random.Random, sentences: int) -> str:
    """Some sentences in one line."""
    return " ".join(sentence(rng) for _ in range(sentences))


def story(rng: random.Random, name: str, subject: str) -> str:
    """A short story of a person called ``name`` and ``subject``, an animal or a thing."""
    friend = rng.choice([each for each in NAMES if each != name])
    place, adjective, color = rng.choice(OUTDOOR_PLACES), rng.choice(ADJECTIVES), rng.choice(COLORS)
    is_animal = subject in ANIMALS
    opening = rng.choice(
        (
            f"Once upon a time, there was {article(rng.choice(JOBS))} called {name}.",
            f"{name} lived in a small house near the {place}.",
            f"One day, {name} went to the {place}.",
            f"Long ago, {name} lived in {rng.choice(CITIES)}.",
        )
    )
    if is_animal:
        middle = rng.choice(
            (
                [
                    f"Near the {place}, {name} saw {article(adjective)} {subject}.",
                    f"The {subject} was hungry, so {name} gave it some {rng.choice(('bread', 'milk', 'cheese', 'rice'))}.",
                    f"After that, the {subject} followed {name} everywhere.",
                ],
                [
                    f"{name} had {article(rng.choice(ANIMAL_COLORS))} {subject} that could not find its way home.",
                    f"{name} and {friend} looked for it {where(place)}.",
                    f'"There it is!" said {friend}. The {subject} was under a tree.',
                ],
                [
                    f"{article(subject).capitalize()} came to the door and looked at {name}.",
                    f'"Who are you?" asked {name}. The {subject} said nothing.',
                    f"{name} opened the door, and the {subject} walked in.",
                ],
            )
        )
    else:
        middle = rng.choice(
            (
                [
                    f"{name} found {article(color)} {subject} on the way.",
                    f'"Whose {subject} is this?" asked {name}. Nobody knew.',
                    f"At last, {friend} came and said that it was lost. {name} gave it back.",
                ],
                [
                    f"{name} wanted to buy {article(subject)}, but had no money.",
                    f"So {name} helped {friend} {where(place)} for a week.",
                    f"Then {friend} gave {name} the {subject} as a present.",
                ],
                [
                    f"The {subject} was very old, and one day it broke.",
                    f"{name} was sad, but {friend} knew how to mend it.",
                    f"They worked all afternoon, and then the {subject} was as good as new.",
                ],
            )
        )
    weather = [rng.choice(_WEATHER)] if rng.random() < 0.6 else []
    return " ".join([opening, *weather, *middle, rng.choice(_ENDINGS).format(name=name)])


def shopping(rng: random.Random) -> list[str]:
    """Some things to buy."""
    return rng.sample([*FRUITS, *FOODS], rng.randint(2, 5))


def shopping_sentence(name: str, items: list[str]) -> str:
    """Who buys what."""
    return f"{name} buys {listed([article(each) if each in FRUITS else each for each in items])}."
