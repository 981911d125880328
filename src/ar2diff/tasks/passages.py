"""The four kinds of the structured task: people, an order, a table, a note; each a text and its one right answer.

A kind draws values, tells them in one of several wordings, and asks for some of them under chosen names in a
chosen order. Values are written in the text exactly as the answer needs them, so the answer is determined.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ar2diff.tasks import words
from ar2diff.tasks.draw import Draw


@dataclass(frozen=True, slots=True)
class Exercise:
    """One problem before it becomes messages: what is asked, of which text, and the answer."""

    instruction: str
    passage: str
    answer: str


Keys = Mapping[str, tuple[str, ...]]

PEOPLE_KEYS: Keys = {
    "name": ("name", "full_name", "person"),
    "age": ("age", "years"),
    "city": ("city", "town", "home"),
    "job": ("job", "occupation", "work"),
}
PEOPLE_FRAMES = (
    "{name}, {age}, is {a_job} in {city}.",
    "{name} is {age} and works as {a_job} in {city}.",
    "In {city} lives {name}, {a_job} aged {age}.",
    "At {age}, {name} is employed as {a_job} in {city}.",
    "{city} is home to {name}, {age} years old, {a_job} by trade.",
    "The {job} {name} is {age} and lives in {city}.",
    "{name} ({age}) came to {city} to work as {a_job}.",
    "We also met {name} from {city}: {a_job}, {age} years old.",
)
PEOPLE_ASKS = (
    "Turn the text into a one-line JSON list of objects with {keys}, one per person.",
    "Extract every person as an object with {keys}. Answer with one JSON list on one line.",
    "Give a one-line JSON list. Each person becomes an object with {keys}.",
    "List the people as JSON on one line: a list of objects with {keys}.",
    "Read the text and write its people as a JSON list on one line; each object has {keys}.",
    "JSON list please, one line, an object per person with {keys}.",
)

ORDER_KEYS: Keys = {
    "customer": ("customer", "client", "buyer"),
    "items": ("items", "lines", "goods"),
    "city": ("ship_to", "city", "destination"),
}
ITEM_KEYS: Keys = {
    "product": ("product", "item", "article"),
    "quantity": ("quantity", "count", "qty"),
    "price": ("price", "unit_price"),
}
ORDER_FRAMES = (
    "{customer} orders {items} and wants delivery to {city}.",
    "Please send {items} to {city}. The customer is {customer}.",
    "Order from {customer}: {items}. Ship to {city}.",
    "New order. Client: {customer}. Goods: {items}. Destination: {city}.",
    "For {customer} in {city}: {items}.",
    "A parcel goes to {city} with {items}; {customer} pays for it.",
    "{customer} wrote from {city} today and would like {items}.",
)
ITEM_FRAMES = (
    "{quantity} x {product} at {price}",
    "{product} ({quantity} pieces, {price} each)",
    "{quantity_word} times the {product} for {price} each",
    "{product}, {quantity} of them at {price}",
)
ORDER_ASKS = (
    "Write the order as one-line JSON with {keys}; {items} is a list of objects with {item_keys}.",
    "Turn this order into JSON on one line. Keys: {keys}. Each of {items} has {item_keys}.",
    "Convert to a one-line JSON object with {keys}, where {items} lists objects with {item_keys}.",
    "Give the order as a JSON object on one line: {keys}. Every entry of {items} holds {item_keys}.",
    "One-line JSON please, with {keys}. In {items}, one object per article with {item_keys}.",
)


def join_words(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def one_line(value: Any) -> str:
    """The answer's form: `json.dumps` on one line, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def draw_name(draw: Draw) -> str:
    """A first and a last name, of any two languages."""
    return f"{draw.pick(words.FIRST_NAMES)} {draw.pick(words.LAST_NAMES)}"


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def _price(draw: Draw) -> int | float:
    """A price whose shortest decimal form is the one in the text: whole, or with two decimals that end in 1 to 9."""
    whole = draw.integer(2, 95)
    return whole if draw.chance(40) else float(f"{whole}.{draw.integer(0, 9)}{draw.integer(1, 9)}")


def choose_keys(draw: Draw, keys: Keys, fields: Sequence[str]) -> dict[str, str]:
    """The asked fields in order, each with the name it gets in the answer."""
    return {field: draw.pick(keys[field]) for field in fields}


def build_people(draw: Draw) -> Exercise:
    """One to three people in a text, as a JSON list of objects with two to four of their facts."""
    fields = ["name", *draw.sample(["age", "city", "job"], draw.integer(1, 2))]
    keys = choose_keys(draw, PEOPLE_KEYS, draw.sample(fields, len(fields)))
    people = [_draw_person(draw) for _ in range(draw.pick((1, 2, 2, 2, 3)))]
    frames = draw.sample(PEOPLE_FRAMES, len(people))
    passage = " ".join(
        frame.format(**person, a_job=_with_article(str(person["job"])))
        for frame, person in zip(frames, people, strict=True)
    )
    answer = [{key: person[field] for field, key in keys.items()} for person in people]
    return Exercise(draw.pick(PEOPLE_ASKS).format(keys=join_words(list(keys.values()))), passage, one_line(answer))


def _draw_person(draw: Draw) -> dict[str, Any]:
    return {
        "name": draw_name(draw),
        "age": draw.integer(18, 79),
        "city": draw.pick(words.CITIES),
        "job": draw.pick(words.JOBS),
    }


def build_order(draw: Draw) -> Exercise:
    """An order with one to three items, as a nested JSON object."""
    keys = choose_keys(draw, ORDER_KEYS, draw.sample(["customer", "items", "city"], 3))
    item_fields = draw.sample(["product", "quantity", *(["price"] if draw.chance(50) else [])], 2)
    item_keys = choose_keys(draw, ITEM_KEYS, item_fields)
    products = draw.sample(words.PRODUCTS, draw.pick((1, 2, 2, 3)))
    frame = draw.pick(ITEM_FRAMES)
    items = [{"product": p, "quantity": draw.integer(1, 10), "price": _price(draw)} for p in products]
    told = [frame.format(**item, quantity_word=words.NUMBER_WORDS[item["quantity"]]) for item in items]  # type: ignore[index]
    facts: dict[str, Any] = {"customer": draw_name(draw), "city": draw.pick(words.CITIES)}
    passage = draw.pick(ORDER_FRAMES).format(**facts, items=join_words(told))
    facts["items"] = [{key: item[field] for field, key in item_keys.items()} for item in items]
    ask = draw.pick(ORDER_ASKS).format(
        keys=join_words(list(keys.values())), items=keys["items"], item_keys=join_words(list(item_keys.values()))
    )
    return Exercise(ask, passage, one_line({key: facts[field] for field, key in keys.items()}))


@dataclass(frozen=True, slots=True)
class TableSubject:
    """What a table is about: its columns' names, how a row is told, and how its values are drawn."""

    columns: Keys
    frames: tuple[str, ...]
    draw_row: Callable[[Draw], dict[str, Any]]


TABLE_SUBJECTS = (
    TableSubject(
        {"product": ("Product", "Item"), "price": ("Price", "Cost"), "stock": ("Stock", "Left")},
        (
            "The {product} costs {price} and {stock} are left.",
            "We have {stock} of the {product}, sold at {price}.",
            "For {price} you get the {product}; {stock} remain.",
        ),
        lambda d: {"product": d.pick(words.PRODUCTS), "price": _price(d), "stock": d.integer(2, 99)},
    ),
    TableSubject(
        {"name": ("Name", "Player"), "city": ("City", "From"), "points": ("Points", "Score")},
        (
            "{name} from {city} scored {points} points.",
            "With {points} points, {name} came from {city}.",
            "{city} sent {name}, who got {points} points.",
        ),
        lambda d: {"name": draw_name(d), "city": d.pick(words.CITIES), "points": d.integer(3, 99)},
    ),
    TableSubject(
        {"city": ("City", "To"), "time": ("Time", "Leaves"), "platform": ("Platform", "Track")},
        (
            "The train to {city} leaves at {time} from platform {platform}.",
            "At {time} a train goes to {city}, platform {platform}.",
            "Platform {platform} has the {time} train to {city}.",
        ),
        lambda d: {"city": d.pick(words.CITIES), "time": draw_time(d), "platform": d.integer(1, 19)},
    ),
    TableSubject(
        {"name": ("Name", "Employee"), "job": ("Job", "Role"), "room": ("Room", "Office")},
        (
            "{name} is our {job} and sits in room {room}.",
            "Room {room} belongs to {name}, the {job}.",
            "Our {job}, {name}, has room {room}.",
        ),
        lambda d: {"name": draw_name(d), "job": d.pick(words.JOBS), "room": d.integer(10, 420)},
    ),
)
TABLE_ASKS = (
    "Make a Markdown table with the columns {keys}.",
    "Turn the text into a Markdown table. Columns: {keys}.",
    "Write this as a Markdown table with {keys} as columns, in text order.",
    "Put the facts into a Markdown table that has the columns {keys}.",
    "Show {keys} in a Markdown table, one row per sentence.",
)


def draw_time(draw: Draw) -> str:
    """A time such as 14:05."""
    return f"{draw.integer(7, 21):02d}:{draw.integer(0, 11) * 5:02d}"


def build_table(draw: Draw) -> Exercise:
    """Two or three told rows as a Markdown table with two or three of their facts as columns."""
    subject = draw.pick(TABLE_SUBJECTS)
    fields = draw.sample(list(subject.columns), draw.pick((2, 2, 3)))
    columns = choose_keys(draw, subject.columns, fields)
    rows = [subject.draw_row(draw) for _ in range(draw.integer(2, 3))]
    one_frame = draw.pick(subject.frames) if draw.chance(50) else None
    passage = " ".join((one_frame or draw.pick(subject.frames)).format(**row) for row in rows)
    lines = [list(columns.values()), ["---"] * len(columns), *([str(row[f]) for f in columns] for row in rows)]
    answer = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return Exercise(draw.pick(TABLE_ASKS).format(keys=join_words(list(columns.values()))), passage, answer)
