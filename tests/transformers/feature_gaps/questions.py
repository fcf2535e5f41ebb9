"""A few dozen small questions about small passages, for tests of everything that answers questions."""

from typing import Any

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
CITIES = ("Rome", "Oslo", "Bern", "Lima", "Cairo")


def questions(count: int) -> list[dict[str, Any]]:
    """Records with ``context``, ``question``, ``answers`` and ``group``; passages of different lengths."""
    rows = []
    for index in range(count):
        name, city = NAMES[index % len(NAMES)], CITIES[index % len(CITIES)]
        other = CITIES[(index + 1 + index // len(CITIES)) % len(CITIES)]
        context = f"{name} lives in {city}." + f" {other} is far away." * (index % 3)
        rows.append(
            {"context": context, "question": f"Where does {name} live?", "answers": [city], "group": index // 2}
        )
    return rows
