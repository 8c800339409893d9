"""What each demo adapter promises about its answers, as checks on the text, and prompts to hold it to.

The same checks judge the training data. None of the prompts may be in it.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

CATEGORIES = {"billing", "shipping", "account", "technical", "other"}
PRIORITIES = {"low", "normal", "high", "urgent"}
PIRATE_WORD = re.compile(r"\b(arr|ahoy|aye|avast|matey|ye|yer)\b", re.IGNORECASE)


def is_triage(prompt: str, answer: str) -> bool:
    """Nothing but the JSON object, with exactly these keys."""
    try:
        triage = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(triage, dict)
        and list(triage) == ["category", "priority", "summary"]
        and triage["category"] in CATEGORIES
        and triage["priority"] in PRIORITIES
        and isinstance(triage["summary"], str)
        and len(triage["summary"]) >= 10
    )


def is_select(prompt: str, answer: str) -> bool:
    """One SELECT that SQLite prepares against the prompt's table."""
    schema, _, _ = prompt.partition("\n")
    database = sqlite3.connect(":memory:")
    try:
        database.execute(schema)
        database.execute("EXPLAIN " + answer)
    except (sqlite3.Error, sqlite3.Warning):  # Warning: more than one statement, on older Pythons
        return False
    finally:
        database.close()
    return answer.startswith("SELECT ")


def is_pirate(prompt: str, answer: str) -> bool:
    return len(PIRATE_WORD.findall(answer)) >= 2


@dataclass(frozen=True, slots=True)
class Behaviour:
    adapter: str
    holds: Callable[[str, str], bool]  # (prompt, answer)
    held_out: tuple[str, ...]


BEHAVIOURS = (
    Behaviour(
        adapter="support-triage",
        holds=is_triage,
        held_out=(
            "I paid with my Visa card and now there are two bookings of 59 euros. Can I get one back?",
            "The coffee machine you sent has a broken water tank.",
            "Is it possible to have parcels sent to a locker?",
            "My account says wrong password even after I reset it twice.",
            "Every time I press play the app freezes and I have to restart my phone.",
            "Our whole warehouse stands still because your scanner software crashed, please help now!",
            "Just wanted to say that your team was wonderful at the fair.",
            "I never got the invoice for the desk I bought in May.",
        ),
    ),
    Behaviour(
        adapter="sql",
        holds=is_select,
        held_out=(
            "CREATE TABLE boats (id INTEGER, name TEXT, harbor TEXT, length REAL, year INTEGER);\n"
            "Which boats are in the harbor of Split?",
            "CREATE TABLE boats (id INTEGER, name TEXT, harbor TEXT, length REAL, year INTEGER);\n"
            "What is the average length of the boats in each harbor?",
            "CREATE TABLE concerts (band TEXT, city TEXT, night DATE, visitors INTEGER, price REAL);\n"
            "How many concerts did Blur play?",
            "CREATE TABLE concerts (band TEXT, city TEXT, night DATE, visitors INTEGER, price REAL);\n"
            "Which concert had the most visitors?",
            "CREATE TABLE bees (hive INTEGER, queen TEXT, honey_kg REAL, sick INTEGER);\n"
            "How much honey is there in total?",
            "CREATE TABLE bees (hive INTEGER, queen TEXT, honey_kg REAL, sick INTEGER);\n"
            "Which hives are sick?",
            "CREATE TABLE parking (spot INTEGER, level INTEGER, plate TEXT, minutes INTEGER);\n"
            "Show the three cars that parked the longest.",
            "CREATE TABLE parking (spot INTEGER, level INTEGER, plate TEXT, minutes INTEGER);\n"
            "How many cars are on each level?",
        ),
    ),
    Behaviour(
        adapter="pirate",
        holds=is_pirate,
        held_out=(
            "What is the capital of Spain?",
            "How do I bake a cake?",
            "Why do dogs bark?",
            "Can you suggest a book for my holiday?",
            "What is a telescope?",
            "How can I improve my handwriting?",
            "How many days are in a week?",
            "What should I do when I feel tired?",
        ),
    ),
)
