"""Calling tools: one, several, none, and answering from their results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer.bench.tasks.talk import plain_fact
from deepinfer.bench.tasks.task import SYSTEM_SHARE, Task, calls, contains, is_reply, last_number
from deepinfer.bench.tasks.words import (
    CITIES,
    DAYS,
    FRUITS,
    JOBS,
    MONTH_DAYS,
    NAMES,
    PLACES,
    SMALL_TALK,
    SYSTEMS,
    THINGS,
    TRANSLATIONS,
    article,
)
from deepinfer.engine.chat import EFFORTS, Call, Message


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool.

    Attributes:
        arguments: of the call.
        request: what the user asks for, a sentence without its mark at the end.
        is_question: whether the request ends with a question mark.
        result: what the tool returns.
        answer: what the assistant says then.
    """

    arguments: dict[str, Any]
    request: str
    is_question: bool
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A kind of tool: names and descriptions that it may have, its parameters, and how it is used."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    properties: dict[str, dict[str, Any]]
    required: tuple[str, ...]
    use: Callable[[random.Random], Use]


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _whole(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


def _get_weather(rng: random.Random) -> Use:
    city, degrees = rng.choice(CITIES), rng.randint(-10, 36)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy"))
    request = rng.choice(
        ("What is the weather in {}", "How is the weather in {}", "What is the weather like in {} today")
    ).format(city)
    result = rng.choice((json.dumps({"temperature": degrees, "weather": sky}), f"{sky}, {degrees} degrees"))
    return Use({"city": city}, request, True, result, f"In {city} it is {sky}, and the temperature is {degrees} degrees.")


def _get_time(rng: random.Random) -> Use:
    city, time = rng.choice(CITIES), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    request = rng.choice(("What time is it in {}", "What is the local time in {}", "How late is it in {} now")).format(city)
    return Use({"city": city}, request, True, rng.choice((time, json.dumps({"time": time}))), f"It is {time} in {city}.")


def _calculate(rng: random.Random) -> Use:
    a, b = rng.randint(100, 9999), rng.randint(100, 9999)
    sign = rng.choice("+-*")
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    text = f"{a} {sign} {b}"
    request = rng.choice((f"What is {text}", f"How much is {text}"))
    return Use({"expression": text}, request, True, str(result), f"{text} = {result}")


def _send_email(rng: random.Random) -> Use:
    name = rng.choice(NAMES)
    address = f"{name.lower()}@example.com"
    subject = rng.choice(("Meeting", "Lunch", "Invoice", "Party", "Report", "Question"))
    body = rng.choice(
        ("See you tomorrow.", "Please call me.", "I will be late.", "Thank you for your help.", "Can we meet on Monday?")
    )
    request = f'Send an email to {address} with the subject "{subject}" and the text "{body}"'
    return Use({"to": address, "subject": subject, "body": body}, request, False, "sent", f"The email to {address} is sent.")


def _set_timer(rng: random.Random) -> Use:
    minutes = rng.randint(2, 90)
    request = rng.choice(
        ("Set a timer for {} minutes", "Start a timer of {} minutes", "Please set the timer to {} minutes")
    ).format(minutes)
    return Use({"minutes": minutes}, request, False, "ok", f"The timer is set for {minutes} minutes.")


def _set_alarm(rng: random.Random) -> Use:
    time = f"{rng.randint(5, 11):02d}:{rng.choice((0, 15, 30, 45)):02d}"
    request = rng.choice(("Wake me up at {}", "Set an alarm for {}", "Please set the alarm to {}")).format(time)
    return Use({"time": time}, request, False, "ok", f"The alarm is set for {time}.")


def _translate(rng: random.Random) -> Use:
    word, translations = rng.choice(tuple(TRANSLATIONS.items()))
    language, translated = rng.choice(tuple(zip(("French", "German", "Spanish", "Italian"), translations, strict=True)))
    request = rng.choice((f'Translate the word "{word}" into {language}', f'Translate "{word}" to {language}'))
    result = json.dumps({"translation": translated})
    return Use({"text": word, "language": language}, request, False, result, f'The translation of "{word}" is "{translated}".')


def _add_to_list(rng: random.Random) -> Use:
    item, amount = rng.choice(FRUITS), rng.randint(2, 12)
    plural = item[:-1] + "ies" if item.endswith("y") else f"{item}es" if item in ("peach", "mango") else f"{item}s"
    request = rng.choice((f"Add {amount} {plural} to my shopping list", f"Put {amount} {plural} on the shopping list"))
    return Use({"item": plural, "amount": amount}, request, False, "added", f"I added {amount} {plural} to your shopping list.")


def _book_table(rng: random.Random) -> Use:
    people, time, place = (
        rng.randint(2, 10),
        f"{rng.randint(17, 21)}:{rng.choice(('00', '30'))}",
        f"Restaurant {rng.choice(NAMES)}",
    )
    request = f"Book a table for {people} people at {place} at {time}"
    return Use(
        {"restaurant": place, "people": people, "time": time},
        request,
        False,
        json.dumps({"status": "booked"}),
        f"A table for {people} people at {place} is booked for {time}.",
    )


def _find_train(rng: random.Random) -> Use:
    start, end = rng.sample(CITIES, 2)
    time = f"{rng.randint(5, 22):02d}:{rng.randrange(60):02d}"
    request = rng.choice(
        (f"When does the next train from {start} to {end} leave", f"What is the next train from {start} to {end}")
    )
    return Use(
        {"from": start, "to": end},
        request,
        True,
        json.dumps({"departure": time}),
        f"The next train from {start} to {end} leaves at {time}.",
    )


def _look_up_phone(rng: random.Random) -> Use:
    name, number = rng.choice(NAMES), f"555-{rng.randrange(10_000):04d}"
    request = rng.choice(("What is the phone number of {}", "How can I call {}", "Which phone number does {} have")).format(name)
    return Use({"name": name}, request, True, number, f"The phone number of {name} is {number}.")


def _create_event(rng: random.Random) -> Use:
    month = rng.randrange(12)
    date = f"{rng.randint(2025, 2030)}-{month + 1:02d}-{rng.randint(1, MONTH_DAYS[month]):02d}"
    title = rng.choice(("Dentist", "Team meeting", "Birthday party", "Piano lesson", "Lunch with " + rng.choice(NAMES)))
    request = rng.choice((f'Add "{title}" to my calendar on {date}', f'Create an event "{title}" on {date}'))
    return Use({"title": title, "date": date}, request, False, "created", f'The event "{title}" is in your calendar on {date}.')


def _switch_light(rng: random.Random) -> Use:
    room, is_on = rng.choice(("kitchen", "bedroom", "bathroom", "living room", "office", "hall")), rng.random() < 0.5
    state = "on" if is_on else "off"
    request = rng.choice((f"Turn {state} the light in the {room}", f"Switch {state} the {room} light"))
    return Use({"room": room, "on": is_on}, request, False, "ok", f"The light in the {room} is {state}.")


def _set_heating(rng: random.Random) -> Use:
    room, degrees = rng.choice(("kitchen", "bedroom", "bathroom", "living room", "office")), rng.randint(15, 25)
    request = rng.choice((f"Set the heating in the {room} to {degrees} degrees", f"Make the {room} {degrees} degrees warm"))
    return Use(
        {"room": room, "degrees": degrees}, request, False, "ok", f"The heating in the {room} is set to {degrees} degrees."
    )


def _play_music(rng: random.Random) -> Use:
    style = rng.choice(("jazz", "rock", "classical music", "folk music", "pop music", "piano music"))
    request = rng.choice(("Play some {}", "I would like to hear {}", "Please play {}")).format(style)
    return Use({"style": style}, request, False, "playing", f"I am playing {style}.")


def _convert_money(rng: random.Random) -> Use:
    amount, rate = rng.randint(5, 900), rng.randint(2, 9)
    start, end = rng.sample(("EUR", "USD", "GBP", "JPY", "CHF"), 2)
    request = rng.choice((f"How much is {amount} {start} in {end}", f"What are {amount} {start} in {end}"))
    return Use(
        {"amount": amount, "from": start, "to": end},
        request,
        True,
        json.dumps({"amount": amount * rate, "currency": end}),
        f"{amount} {start} are {amount * rate} {end}.",
    )


def _search_people(rng: random.Random) -> Use:
    job, city, found = rng.choice(JOBS), rng.choice(CITIES), rng.sample(NAMES, 2)
    request = rng.choice((f"Find {article(job)} in {city}", f"I need {article(job)} in {city}"))
    return Use(
        {"job": job, "city": city}, request, False, json.dumps(found), f"I found two people in {city}: {found[0]} and {found[1]}."
    )


def _get_stock(rng: random.Random) -> Use:
    thing, number = rng.choice(THINGS), rng.randint(2, 200)
    request = rng.choice((f"How many of the product {thing} are in stock", f"What is the stock of the product {thing}"))
    return Use({"product": thing}, request, True, str(number), f"There are {number} in stock.")


def _get_hours(rng: random.Random) -> Use:
    place, start, end = rng.choice(PLACES), rng.randint(7, 11), rng.randint(16, 22)
    request = rng.choice((f"When does the {place} open", f"What are the opening hours of the {place}"))
    result = json.dumps({"open": f"{start}:00", "close": f"{end}:00"})
    return Use({"place": place}, request, True, result, f"The {place} is open from {start}:00 to {end}:00.")


def _read_file(rng: random.Random) -> Use:
    name = f"{rng.choice(('notes', 'report', 'todo', 'letter', 'data', 'plan'))}{rng.choice(('', '_1', '_2', '_new'))}.txt"
    verb, day = rng.choice(("Call", "Visit", "Write to", "Meet")), rng.choice(DAYS)
    line = f"{verb} {rng.choice(NAMES)} on {day}."
    request = rng.choice((f"What is in the file {name}", f"What does the file {name} say"))
    return Use({"path": name}, request, True, line, f"The file {name} says: {line}")


TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "current_weather"),
        ("Get the weather of a city.", "Current weather."),
        {"city": _text("Name of the city")},
        ("city",),
        _get_weather,
    ),
    Tool(
        ("get_time", "local_time", "clock"),
        ("Get the local time of a city.", "Time in a city."),
        {"city": _text("Name of the city")},
        ("city",),
        _get_time,
    ),
    Tool(
        ("calculate", "calculator", "evaluate"),
        ("Evaluate an arithmetic expression.", "Calculator for numbers."),
        {"expression": _text("For example 2 + 3")},
        ("expression",),
        _calculate,
    ),
    Tool(
        ("send_email", "write_email", "mail"),
        ("Send an email.", "Write an email to somebody."),
        {"to": _text("Address"), "subject": _text("Subject"), "body": _text("Text")},
        ("to", "subject", "body"),
        _send_email,
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        ("Start a timer.", "Set a timer in minutes."),
        {"minutes": _whole("Minutes")},
        ("minutes",),
        _set_timer,
    ),
    Tool(
        ("set_alarm", "alarm", "wake_up"),
        ("Set an alarm.", "Wake the user at a time."),
        {"time": _text("Time as HH:MM")},
        ("time",),
        _set_alarm,
    ),
    Tool(
        ("translate", "translate_text", "dictionary"),
        ("Translate a text.", "Translate into a language."),
        {"text": _text("What to translate"), "language": _text("Target language")},
        ("text", "language"),
        _translate,
    ),
    Tool(
        ("add_to_list", "add_item", "shopping_list"),
        ("Add something to the shopping list.",),
        {"item": _text("What to buy"), "amount": _whole("How many")},
        ("item", "amount"),
        _add_to_list,
    ),
    Tool(
        ("book_table", "reserve_table", "restaurant"),
        ("Book a table in a restaurant.", "Reserve a table."),
        {"restaurant": _text("Name"), "people": _whole("Number of people"), "time": _text("Time as HH:MM")},
        ("restaurant", "people", "time"),
        _book_table,
    ),
    Tool(
        ("find_train", "next_train", "trains"),
        ("Find the next train.", "Train connections."),
        {"from": _text("Start"), "to": _text("Destination")},
        ("from", "to"),
        _find_train,
    ),
    Tool(
        ("look_up_phone", "phone_book", "get_phone_number"),
        ("Find a phone number.", "Phone numbers of people."),
        {"name": _text("Name of the person")},
        ("name",),
        _look_up_phone,
    ),
    Tool(
        ("create_event", "add_event", "calendar"),
        ("Create an event in the calendar.",),
        {"title": _text("Title"), "date": _text("Date as YYYY-MM-DD")},
        ("title", "date"),
        _create_event,
    ),
    Tool(
        ("switch_light", "set_light", "light"),
        ("Turn a light on or off.", "Control the lights."),
        {"room": _text("Room"), "on": {"type": "boolean"}},
        ("room", "on"),
        _switch_light,
    ),
    Tool(
        ("set_heating", "heating", "set_temperature"),
        ("Set the temperature of a room.",),
        {"room": _text("Room"), "degrees": _whole("Degrees Celsius")},
        ("room", "degrees"),
        _set_heating,
    ),
    Tool(
        ("play_music", "music", "start_music"),
        ("Play music.", "Play a style of music."),
        {"style": _text("Style of music")},
        ("style",),
        _play_music,
    ),
    Tool(
        ("convert_money", "exchange", "convert_currency"),
        ("Convert an amount of money.",),
        {"amount": _whole("Amount"), "from": _text("Currency"), "to": _text("Currency")},
        ("amount", "from", "to"),
        _convert_money,
    ),
    Tool(
        ("search_people", "find_person", "directory"),
        ("Find people by job and city.",),
        {"job": _text("Job"), "city": _text("City")},
        ("job", "city"),
        _search_people,
    ),
    Tool(
        ("get_stock", "stock", "check_stock"),
        ("Get the number of products in stock.",),
        {"product": _text("Product")},
        ("product",),
        _get_stock,
    ),
    Tool(
        ("get_hours", "opening_hours", "hours"),
        ("Get the opening hours of a place.",),
        {"place": _text("Place")},
        ("place",),
        _get_hours,
    ),
    Tool(
        ("read_file", "open_file", "file"),
        ("Read a text file.", "Return the content of a file."),
        {"path": _text("Path of the file")},
        ("path",),
        _read_file,
    ),
)


def _schema(name: str, tool: Tool, rng: random.Random) -> dict[str, Any]:
    parameters = {"type": "object", "properties": tool.properties, "required": list(tool.required)}
    return {"name": name, "description": rng.choice(tool.descriptions), "parameters": parameters}


def tool_calls(rng: random.Random) -> Task:
    """A request with tools at hand: one call, several, none, or an answer after the result."""
    chosen = rng.sample(TOOLS, rng.randint(1, 5))
    names = [rng.choice(tool.names) for tool in chosen]
    schemas = tuple(_schema(name, tool, rng) for name, tool in zip(names, chosen, strict=True))
    effort = rng.choice(EFFORTS) if rng.random() < 0.25 else None
    head = (Message("system", rng.choice(SYSTEMS)),) if rng.random() < SYSTEM_SHARE else ()
    form = rng.random()
    if form < 0.15:
        return _no_call(rng, head, schemas, effort)
    # The tools are in random order, so the first ones are as good as any.
    count = rng.randint(2, min(3, len(chosen))) if form < 0.35 and len(chosen) > 1 else 1
    at = rng.sample(range(len(chosen)), count)
    uses = [chosen[each].use(rng) for each in at]
    expected = tuple(Call(names[each], use.arguments) for each, use in zip(at, uses, strict=True))
    user = Message("user", _request(rng, uses))
    thought = ""
    if effort:
        thought = " ".join(f"I need the tool {call.name}." for call in expected)
        if effort == 100:
            thought += " The arguments are in the request."
    asked = Message("assistant", "", reasoning=thought, calls=expected)
    key = f"tool {sorted(names)} {user.content}"
    if form < 0.7:
        return Task(
            kind="tool", messages=(*head, user), answer=asked, check=calls(expected), key=key, tools=schemas, effort=effort
        )
    results = tuple(Message("tool", use.result) for use in uses)
    thought = "The tool gave the result." if count == 1 else "The tools gave the results."
    answer = Message("assistant", " ".join(use.answer for use in uses), reasoning=thought if effort else "")
    check = contains(uses[-1].answer) if uses[-1].answer[-1] == "." else last_number(int(uses[-1].result))
    messages = (*head, user, asked, *results)
    return Task(kind="result", messages=messages, answer=answer, check=check, key=key, tools=schemas, effort=effort)


def _request(rng: random.Random, uses: list[Use]) -> str:
    """The requests of all uses in one message."""
    if len(uses) == 1 and not uses[0].is_question and rng.random() < 0.2:
        request = _ended(uses[0])
        return request if request.startswith(("I ", "Please")) else f"Please {request[0].lower()}{request[1:]}"
    return rng.choice((" ", " ", "\n")).join(map(_ended, uses))


def _ended(use: Use) -> str:
    """The request with its mark at the end."""
    if use.is_question:
        return f"{use.request}?"
    is_ended = use.request.endswith(('."', '?"'))
    return use.request if is_ended else f"{use.request}."


def _no_call(rng: random.Random, head: tuple[Message, ...], schemas: tuple[dict[str, Any], ...], effort: int | None) -> Task:
    """A question that no tool is needed for."""
    if rng.random() < 0.4:
        question, answer = rng.choice(tuple(SMALL_TALK.items()))
        check = is_reply()
    else:
        question, answer = plain_fact(rng)
        check = contains(answer.removesuffix("."))
    return Task(
        kind="tool",
        messages=(*head, Message("user", question)),
        answer=Message("assistant", answer, reasoning="I can answer without a tool." if effort else ""),
        check=check,
        key=f"no tool {question} {[each['name'] for each in schemas]}",
        tools=schemas,
        effort=effort,
    )
