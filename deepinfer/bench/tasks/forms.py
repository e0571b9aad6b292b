"""JSON that follows a schema, filled from a text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer.bench.tasks.english import shopping, shopping_sentence
from deepinfer.bench.tasks.task import SYSTEM_SHARE, Task, filled
from deepinfer.bench.tasks.words import (
    CITIES,
    COLORS,
    FOODS,
    HOBBIES,
    JOBS,
    MONTH_DAYS,
    MONTHS,
    NAMES,
    PLACES,
    SURNAMES,
    SYSTEMS,
    THINGS,
    article,
)
from deepinfer.engine.chat import EFFORTS, Message


@dataclass(frozen=True, slots=True)
class Field:
    """One property: its schema, its value, and the sentence that says it."""

    name: str
    schema: dict[str, Any]
    value: Any
    sentence: str


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": each} for each in ("string", "integer", "number", "boolean"))
_STRINGS = {"type": "array", "items": {"type": "string"}}


def _person(rng: random.Random) -> tuple[str, list[Field]]:
    name, surname, other = rng.choice(NAMES), rng.choice(SURNAMES), rng.choice(NAMES)
    city, job, hobby, age, color = (
        rng.choice(CITIES),
        rng.choice(JOBS),
        rng.choice(HOBBIES),
        rng.randint(18, 80),
        rng.choice(COLORS),
    )
    is_married, hobbies, children = rng.random() < 0.5, rng.sample(HOBBIES, 2), rng.randint(0, 5)
    street, number = rng.choice(("Main Street", "Park Road", "Hill Street", "Lake Road", "Church Street")), rng.randint(1, 99)
    email = f"{name.lower()}@{rng.choice(('example.com', 'example.org', 'mail.example'))}"
    address = {
        "type": "object",
        "properties": {"street": _STRING, "number": _INTEGER, "city": _STRING},
        "required": ["street", "number", "city"],
    }
    kids = "no children" if children == 0 else "one child" if children == 1 else f"{children} children"
    first = rng.choice(
        (
            Field("name", _STRING, name, f"This is {name}."),
            Field("full_name", _STRING, f"{name} {surname}", f"{name} {surname} filled in a form."),
        )
    )
    return name, [
        first,
        Field("age", _INTEGER, age, rng.choice((f"{name} is {age} years old.", f"The age of {name} is {age}."))),
        rng.choice(
            (
                Field("city", _STRING, city, f"{name} lives in {city}."),
                Field(
                    "address",
                    address,
                    {"street": street, "number": number, "city": city},
                    f"{name} lives at {number} {street} in {city}.",
                ),
            )
        ),
        Field("job", _STRING, job, rng.choice((f"{name} works as {article(job)}.", f"{name} is {article(job)}."))),
        Field("married", _BOOLEAN, is_married, f"{name} is {'married' if is_married else 'not married'}."),
        rng.choice(
            (
                Field("hobby", _STRING, hobby, f"{name} likes {hobby}."),
                Field("hobbies", _STRINGS, hobbies, f"{name} likes {hobbies[0]} and {hobbies[1]}."),
            )
        ),
        Field("email", _STRING, email, f"The email address of {name} is {email}."),
        Field("children", _INTEGER, children, f"{name} has {kids}."),
        Field(
            "favorite_color",
            {"type": "string", "enum": sorted({color, *rng.sample(COLORS, 3)})},
            color,
            f"The favorite color of {name} is {color}.",
        ),
        Field("friend", _STRING, other, f"{name} has a friend called {other}."),
    ]


def _product(rng: random.Random) -> tuple[str, list[Field]]:
    thing, color, city = rng.choice(THINGS), rng.choice(COLORS), rng.choice(CITIES)
    price = rng.choice((rng.randint(1, 500), rng.randint(100, 9999) / 100))
    stock, weight, rating, is_new = rng.randint(0, 300), rng.randint(50, 5000), rng.randint(1, 5), rng.random() < 0.5
    size = rng.choice(("small", "medium", "large"))
    return f"the {thing}", [
        Field("product", _STRING, thing, f"We sell {article(thing)}."),
        Field("color", _STRING, color, f"The {thing} is {color}."),
        Field("price", _NUMBER, price, rng.choice((f"It costs {price} dollars.", f"The price is {price} dollars."))),
        Field("stock", _INTEGER, stock, f"There are {stock} in stock." if stock != 1 else "There is 1 in stock."),
        Field("weight_grams", _INTEGER, weight, f"It weighs {weight} grams."),
        Field("size", {"type": "string", "enum": ["small", "medium", "large"]}, size, f"The size is {size}."),
        Field("rating", _INTEGER, rating, f"Customers give it {rating} of 5 stars."),
        Field("is_new", _BOOLEAN, is_new, f"The {thing} is {'new' if is_new else 'used'}."),
        Field("made_in", _STRING, city, f"It is made in {city}."),
    ]


def _event(rng: random.Random) -> tuple[str, list[Field]]:
    kind = rng.choice(("meeting", "concert", "lesson", "party", "lecture", "tour", "dinner", "workshop"))
    month = rng.randrange(12)
    day, year, hour = rng.randint(1, MONTH_DAYS[month]), rng.randint(2020, 2035), rng.randint(8, 21)
    date, place, guests, host = f"{year}-{month + 1:02d}-{day:02d}", rng.choice(PLACES), rng.randint(2, 200), rng.choice(NAMES)
    minutes, is_free, people = rng.choice((30, 45, 60, 90, 120)), rng.random() < 0.5, rng.sample(NAMES, 3)
    return f"the {kind}", [
        Field("event", _STRING, kind, f"There will be {article(kind)}."),
        rng.choice(
            (
                Field("date", _STRING, date, f"It takes place on {date}."),
                Field("date", _STRING, date, f"It takes place on {MONTHS[month]} {day}, {year}."),
            )
        ),
        Field("time", _STRING, f"{hour:02d}:00", f"It starts at {hour:02d}:00."),
        Field("place", _STRING, place, f"The place is the {place}."),
        Field("guests", _INTEGER, guests, f"{guests} guests are invited."),
        Field("host", _STRING, host, f"The host is {host}."),
        Field("duration_minutes", _INTEGER, minutes, f"It takes {minutes} minutes."),
        Field("free", _BOOLEAN, is_free, "The entry is free." if is_free else "The entry is not free."),
        Field("speakers", _STRINGS, people, f"{people[0]}, {people[1]} and {people[2]} will speak."),
    ]


def _order(rng: random.Random) -> tuple[str, list[Field]]:
    name, number, city = rng.choice(NAMES), rng.randint(1000, 99999), rng.choice(CITIES)
    items, total, is_paid = shopping(rng), rng.randint(2, 400), rng.random() < 0.5
    status = rng.choice(("open", "sent", "delivered", "cancelled"))
    note: Any = rng.choice((None, rng.choice(("gift", "fragile", "urgent"))))
    return f"the order of {name}", [
        Field("customer", _STRING, name, f"The customer is {name}."),
        Field("order_number", _INTEGER, number, f"The order has the number {number}."),
        Field("items", _STRINGS, items, shopping_sentence(name, items)),
        Field("total", _INTEGER, total, f"The total is {total} dollars."),
        Field("paid", _BOOLEAN, is_paid, f"The order is {'paid' if is_paid else 'not paid'}."),
        Field(
            "status", {"type": "string", "enum": ["open", "sent", "delivered", "cancelled"]}, status, f"The status is {status}."
        ),
        Field("city", _STRING, city, f"The order goes to {city}."),
        Field("note", {"type": ["string", "null"]}, note, f"The note says {note}." if note else "There is no note."),
    ]


def _recipe(rng: random.Random) -> tuple[str, list[Field]]:
    dish, minutes, people = (
        rng.choice(("soup", "salad", "cake", "pizza", "pasta", "bread")),
        rng.randint(5, 120),
        rng.randint(1, 12),
    )
    items, is_hot = rng.sample(FOODS, 3), rng.random() < 0.5
    level = rng.choice(("easy", "medium", "hard"))
    return f"the {dish}", [
        Field("dish", _STRING, dish, f"The dish is {dish}."),
        Field("minutes", _INTEGER, minutes, f"It takes {minutes} minutes."),
        Field("servings", _INTEGER, people, f"It is enough for {people} {'person' if people == 1 else 'people'}."),
        Field("ingredients", _STRINGS, items, f"You need {items[0]}, {items[1]} and {items[2]}."),
        Field("hot", _BOOLEAN, is_hot, f"It is served {'hot' if is_hot else 'cold'}."),
        Field("level", {"type": "string", "enum": ["easy", "medium", "hard"]}, level, f"The recipe is {level}."),
    ]


def _weather(rng: random.Random) -> tuple[str, list[Field]]:
    city, degrees, wind = rng.choice(CITIES), rng.randint(-15, 38), rng.randint(0, 90)
    sky, is_rainy, day = rng.choice(("sunny", "cloudy", "foggy", "clear")), rng.random() < 0.5, rng.choice(("today", "tomorrow"))
    return f"the weather in {city}", [
        Field("city", _STRING, city, f"This is the weather in {city}."),
        Field("temperature", _INTEGER, degrees, f"The temperature is {degrees} degrees."),
        Field("sky", _STRING, sky, f"The sky is {sky}." if sky != "sunny" and sky != "foggy" else f"The weather is {sky}."),
        Field("rain", _BOOLEAN, is_rainy, "It rains." if is_rainy else "It does not rain."),
        Field("wind_kmh", _INTEGER, wind, f"The wind blows at {wind} kilometers per hour."),
        Field("day", {"type": "string", "enum": ["today", "tomorrow"]}, day, f"The report is for {day}."),
    ]


_SUBJECTS: tuple[Callable[[random.Random], tuple[str, list[Field]]], ...] = (_person, _product, _event, _order, _recipe, _weather)


def forms(rng: random.Random) -> Task:
    """Fill a JSON object from a text; the schema is in the response format or in the question."""
    _, offered = rng.choice(_SUBJECTS)(rng)
    count = rng.randint(2, min(6, len(offered)))
    fields = [offered[0], *rng.sample(offered[1:], count - 1)] if rng.random() < 0.7 else rng.sample(offered, count)
    told = [*fields, *rng.sample([each for each in offered if each not in fields], rng.randint(0, min(2, len(offered) - count)))]
    if rng.random() < 0.5:
        rng.shuffle(told)
    else:
        told.sort(key=offered.index)
    text = " ".join(each.sentence for each in told)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {each.name: each.schema for each in fields},
        "required": [each.name for each in fields],
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    expected = {each.name: each.value for each in fields}
    form = rng.randrange(3)
    shown = json.dumps(schema)
    if form == 0:
        request = rng.choice(
            (
                "{text}",
                "Fill in the form from this text: {text}",
                "Extract the data: {text}",
                "Give me the data as JSON.\n\n{text}",
                "Turn this text into JSON.\n{text}",
            )
        )
    elif form == 1:
        request = rng.choice(
            (
                "Fill in this JSON schema from the text.\n\nSchema: {schema}\n\nText: {text}",
                "{text}\n\nWrite this as JSON with the schema {schema}",
                "JSON schema:\n{schema}\n\nText:\n{text}\n\nAnswer with JSON only.",
                "Extract the data from the text as JSON that follows this schema: {schema}\n\n{text}",
            )
        )
    else:
        names = ", ".join(each.name for each in fields)
        request = rng.choice(
            (
                f"Write a JSON object with the keys {names} for this text: {{text}}",
                f"Extract {names} as JSON.\n\n{{text}}",
                f"Text: {{text}}\n\nGive me JSON with these keys: {names}",
            )
        )
    question = request.replace("{text}", text).replace("{schema}", shown)
    messages: tuple[Message, ...] = (Message("user", question),)
    if rng.random() < SYSTEM_SHARE:
        messages = (Message("system", rng.choice(SYSTEMS)), *messages)
    effort = rng.choice(EFFORTS) if rng.random() < 0.15 else None
    thought = ""
    if effort:
        thought = (
            f"I need {len(fields)} values." if effort == 50 else "\n".join(f"{each.name}: {each.sentence}" for each in fields)
        )
    return Task(
        kind="json",
        messages=messages,
        answer=Message("assistant", json.dumps(expected), reasoning=thought),
        check=filled(schema, expected),
        key=f"json {text} {sorted(expected)}",
        effort=effort,
        schema=schema if form == 0 else None,
    )
