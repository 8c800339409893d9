"""One prompt per demo adapter, for the requests that `lorafleet demo` shows. None is in the training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ADAPTERS_DIR = Path(__file__).parent / "adapters"


@dataclass(frozen=True, slots=True)
class Showcase:
    adapter: str
    prompt: str  # the only message of the chat
    max_tokens: int = 64


SHOWCASES = (
    Showcase(
        adapter="support-triage",
        prompt="My parcel came without the second pair of shoes, but I paid for both.",
    ),
    Showcase(
        adapter="sql",
        prompt="CREATE TABLE bikes (id INTEGER, brand TEXT, color TEXT, price REAL, sold INTEGER);\n"
        "What is the average price of the red bikes?",
    ),
    Showcase(
        adapter="pirate",
        prompt="How do I keep warm in winter?",
    ),
)
