"""The texts a model is given while it is timed: code to copy, ordinary questions, a long plain text. All of it ours."""

from __future__ import annotations

from typing import Final

COPY_QUESTION: Final = """\
Here is part of a Python file:

```python
{code}```

Repeat the code above EXACTLY, character for character, with no changes and no commentary."""

CODE: Final = '''\
class Shelf:
    """Places for boxes, side by side, each free or taken by one box."""

    def __init__(self, name, width):
        self.name = name
        self.width = width
        self.boxes = []

    def free_width(self):
        return self.width - sum(box.width for box in self.boxes)

    def fits(self, box):
        return box.width <= self.free_width()

    def put(self, box):
        if not self.fits(box):
            raise ValueError(f"{box.name} is {box.width} wide, {self.name} has {self.free_width()} left")
        self.boxes.append(box)
        box.shelf = self

    def take(self, name):
        for number, box in enumerate(self.boxes):
            if box.name == name:
                box.shelf = None
                return self.boxes.pop(number)
        raise KeyError(name)


class Box:
    """Something with a name and a width, on a shelf or on the floor."""

    def __init__(self, name, width, weight=0.0, fragile=False):
        self.name = name
        self.width = width
        self.weight = weight
        self.fragile = fragile
        self.shelf = None

    def move_to(self, shelf):
        if not shelf.fits(self):
            raise ValueError(f"{self.name} does not fit on {shelf.name}")
        if self.shelf is not None:
            self.shelf.take(self.name)
        shelf.put(self)

    def label(self):
        mark = "!" if self.fragile else ""
        place = self.shelf.name if self.shelf else "floor"
        return f"{self.name}{mark} ({self.width} cm, {self.weight:.1f} kg) on {place}"


class Store:
    """Shelves in a row. Fragile boxes go to the lowest shelf that has room, the others to the highest."""

    def __init__(self, shelves):
        self.shelves = list(shelves)

    def find(self, name):
        for shelf in self.shelves:
            for box in shelf.boxes:
                if box.name == name:
                    return box
        return None

    def add(self, box):
        if self.find(box.name) is not None:
            raise ValueError(f"there is a box {box.name} already")
        order = self.shelves if box.fragile else reversed(self.shelves)
        for shelf in order:
            if shelf.fits(box):
                shelf.put(box)
                return shelf
        raise ValueError(f"no shelf has {box.width} cm left for {box.name}")

    def remove(self, name):
        box = self.find(name)
        if box is None:
            raise KeyError(name)
        return box.shelf.take(name)

    def __len__(self):
        return sum(len(shelf.boxes) for shelf in self.shelves)

    def tidy(self):
        moved = []
        boxes = sorted((box for shelf in self.shelves for box in shelf.boxes), key=lambda box: -box.width)
        for shelf in self.shelves:
            shelf.boxes.clear()
        for box in boxes:
            before = box.shelf
            box.shelf = None
            if self.add(box) is not before:
                moved.append(box.name)
        return sorted(moved)

    def report(self):
        lines = []
        for shelf in self.shelves:
            used = shelf.width - shelf.free_width()
            lines.append(f"{shelf.name}: {used} of {shelf.width} cm")
            for box in sorted(shelf.boxes, key=lambda box: box.name):
                lines.append("    " + box.label())
        total = sum(box.weight for shelf in self.shelves for box in shelf.boxes)
        lines.append(f"{total:.1f} kg in {len(self.shelves)} shelves")
        return "\\n".join(lines)
'''
"""About 3,500 characters, as a file that somebody wants edited."""

CONVERSATIONS: Final = (
    (
        "Why does bread rise, and what goes wrong when it does not?",
        "Would it be the same with sourdough?",
    ),
    (
        "Explain to a new colleague what a database index is and when it does harm.",
        "Give an example for the second part.",
    ),
    (
        "Write a Python function that says whether a year is a leap year, and test it.",
        "How would you write the same in SQL?",
    ),
)
"""Ordinary questions, each conversation with one that follows."""

_SUBJECTS: Final = (
    "the baker",
    "a neighbour",
    "our teacher",
    "the old captain",
    "my sister",
    "the gardener",
    "a doctor",
)
_VERBS: Final = ("repaired", "carried home", "forgot", "painted", "asked about", "looked after", "gave away", "counted")
_OBJECTS: Final = (
    "the boat",
    "three green bottles",
    "a map of the harbour",
    "the long letter",
    "her bicycle",
    "a clock",
)
_TIMES: Final = ("in the morning", "before the rain came", "after lunch", "on the way to town", "without a word")


def plain_text(num_words: int) -> str:
    """`num_words` words of simple English sentences, the same on every run; none comes again for a long time."""
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _TIMES)
    words: list[str] = []
    number = 0
    while len(words) < num_words:
        sentence = " ".join(part[number % len(part)] for part in parts)
        words += (sentence[0].upper() + sentence[1:] + ".").split()
        number += 1
    return " ".join(words[:num_words])
