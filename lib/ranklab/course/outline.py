"""The order in which a lab asks its exercises and predictions, and which of them comes next."""

import re
from dataclasses import dataclass

from ranklab.course import index, labs

HEADING = re.compile(r"# #{2,3} (?:([\d.]*\d)\.? )?(.*)")
CHECKED = re.compile(r"(\w+) = check\(\1\)")


@dataclass(frozen=True)
class Asked:
    """An exercise or prediction, and the number of its heading."""

    name: str
    section: str = ""  # such as "4.3" or "8.1"; "Further" below a heading that begins with it

    def __str__(self):
        if self.section == "Further":
            return f"{self.name} (Further)"
        return f"{self.section} {self.name}".lstrip()


def outline(stem):
    """List all exercises and predictions of the lab, in the order of its cells.

    Without a source: in the order of its checks.
    """
    if stem in index.entries():
        return [Asked(name, entry["section"]) for name, entry in index.entries()[stem].items()]
    return asked_by(labs.source(stem), labs.names_of(stem))


def asked_by(source, names):
    """Return the Asked of these names: those in the lab's `source`, then the others."""
    items = [one for one in _asked_in(source) if one.name in names]
    names_of_items = {one.name for one in items}
    return items + [Asked(name) for name in names if name not in names_of_items]


def next_after(name, records):
    """Return one line on what comes after `name` in its lab, skipping what has passed."""
    stem = labs.stem_of(name)
    if stem is None:
        return ""
    items = outline(stem)
    place = [one.name for one in items].index(name)
    if next_item := first_open(items[:place] + items[place + 1:], place, records):
        return f"next: {next_item}"
    later = labs.written()[labs.written().index(stem) + 1:]
    return "all of this lab is passed" + (f"; next: lab {later[0]}" if later else "")


def first_open(items, place, records):
    """Return the first from `place` on that has not passed, or else before it; None if all have."""
    return next((one for one in items[place:] + items[:place] if not is_passed(one.name, records)),
                None)


def is_passed(name, records):
    """Return whether the learner's record of `name` says that it passed."""
    return records.get(name, {}).get("state") == "passed"


def _asked_in(source):
    sections, section = {}, ""
    for line in source.splitlines():
        if heading := HEADING.fullmatch(line):
            is_further = heading[2].startswith("Further")
            section = heading[1] or ("Further" if is_further else heading[2])
        elif checked := CHECKED.fullmatch(line):
            sections.setdefault(checked[1], section)
        elif line.startswith("check("):
            for name in re.findall(r"(\w+)=\.\.\.", line):
                sections.setdefault(name, section)
    return [Asked(name, section) for name, section in sections.items()]
