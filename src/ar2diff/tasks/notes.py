"""The fourth kind of the structured task: a note about an event or a contact, some of whose facts are missing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ar2diff.tasks import words
from ar2diff.tasks.draw import Draw
from ar2diff.tasks.passages import Exercise, Keys, choose_keys, draw_name, draw_time, join_words, one_line

EVENT_KEYS: Keys = {
    "event": ("event", "title", "what"),
    "date": ("date", "day"),
    "time": ("time", "start"),
    "place": ("place", "location", "where"),
    "contact": ("contact", "host"),
}
CONTACT_KEYS: Keys = {
    "name": ("name", "contact", "person"),
    "phone": ("phone", "tel"),
    "company": ("company", "employer"),
    "city": ("city", "town"),
    "job": ("job", "position"),
}


@dataclass(frozen=True, slots=True)
class NoteSubject:
    """What a note is about. The first key's fact is always told, by an opening; any other by a sentence or not."""

    keys: Keys
    openings: tuple[str, ...]
    sentences: dict[str, tuple[str, ...]]
    draw_facts: Callable[[Draw], dict[str, Any]]


NOTE_SUBJECTS = (
    NoteSubject(
        EVENT_KEYS,
        (
            "Reminder: {event}.",
            "You are invited to the {event}.",
            "Do not miss our {event}.",
            "Next up is the {event}.",
        ),
        {
            "date": ("It is on {date}.", "The date is {date}.", "Save {date} for it."),
            "time": ("We start at {time}.", "Doors open at {time}.", "Be there by {time}."),
            "place": ("Come to {place}.", "It is held in {place}.", "We meet at {place}."),
            "contact": ("Ask {contact} for details.", "{contact} is the host.", "Questions go to {contact}."),
        },
        lambda d: {
            "event": d.pick(words.EVENTS),
            "date": f"{d.integer(1, 28)} {d.pick(words.MONTHS)}",
            "time": draw_time(d),
            "place": d.pick(words.PLACES),
            "contact": draw_name(d),
        },
    ),
    NoteSubject(
        CONTACT_KEYS,
        ("Spoke with {name} today.", "New contact: {name}.", "{name} left a message.", "Please call {name} back."),
        {
            "phone": ("The number is {phone}.", "Phone {phone}.", "Reach them on {phone}."),
            "company": ("The company is {company}.", "Works for {company}.", "Now with {company}."),
            "city": ("Based in {city}.", "The office is in {city}.", "Lives in {city}."),
            "job": ("By trade: {job}.", "Position: {job}.", "Hired as {job}."),
        },
        lambda d: {
            "name": draw_name(d),
            "phone": f"{d.integer(100, 999)}-{d.integer(1000, 9999)}",
            "company": d.pick(words.COMPANIES),
            "city": d.pick(words.CITIES),
            "job": d.pick(words.JOBS),
        },
    ),
)
NOTE_ASKS = (
    "Fill a one-line JSON object with {keys}. Use null for what is missing.",
    "Write the note as JSON on one line with {keys}; null where nothing is said.",
    "Extract {keys} as a one-line JSON object, null if not given.",
    "One-line JSON please: {keys}. A value that is not in the note is null.",
    "Give {keys} as a JSON object on one line. Unknown values are null.",
)


def build_note(draw: Draw) -> Exercise:
    """An event or contact note as a JSON object, null for what the note does not say."""
    subject = draw.pick(NOTE_SUBJECTS)
    facts = subject.draw_facts(draw)
    first, *others = subject.keys
    told = draw.sample(others, draw.integer(2, 3))
    asked = draw.sample([first, *draw.sample(others, 3)], 4)
    keys = choose_keys(draw, subject.keys, asked)
    sentences = [draw.pick(subject.openings), *(draw.pick(subject.sentences[field]) for field in told)]
    passage = " ".join(sentences).format(**facts)
    answer = {key: facts[field] if field in (first, *told) else None for field, key in keys.items()}
    return Exercise(draw.pick(NOTE_ASKS).format(keys=join_words(list(keys.values()))), passage, one_line(answer))
