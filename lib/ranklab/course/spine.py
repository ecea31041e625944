"""The spine: about nine hours through the course, for people who want to know how large models are
trained. Its order is not the order of the labs.
"""

from dataclasses import dataclass

from ranklab.course import labs
from ranklab.course.outline import is_passed, outline
from ranklab.course.outline import next_after as outline_next


@dataclass(frozen=True)
class Part:
    """The part of a lab that belongs to the spine.

    minutes   for its exercises and the reading around them, as the lab gives them
    sections  the headings of its exercises, 8.1 and so on for bugs
    more      what else to read there, in words
    """

    stem: str
    minutes: int
    sections: tuple = ()
    more: str = ""

    def has(self, item):
        """Return whether an exercise or prediction belongs to it."""
        return item.section in self.sections

    def asked(self):
        """Return the exercises and predictions, in the order of the lab."""
        return [each for each in outline(self.stem) if self.has(each)]

    def __str__(self):
        return ", ".join(filter(None, [_ranges(self.sections), self.more]))


SPINE = (
    Part("00_ranks", 50, ("4.1", "4.2", "4.3", "4.4")),
    Part("02_collectives", 70, ("4.1", "4.2", "4.3", "4.4")),
    Part("03_data_parallel", 95, ("4.1", "4.3", "4.4", "4.5", "8.1")),
    Part("01_baseline", 55, ("4.1", "4.2", "4.3")),
    Part("06_zero", 65, ("4.2", "4.3", "8.1"), more="the memory curves at the end of 4.6"),
    Part("08_tensor_parallel", 80, ("4.1", "4.2", "4.3", "4.4", "4.5")),
    Part("09_pipeline_parallel", 35, ("4.1", "4.2", "4.3")),
    Part("12_hybrid", 60, ("4.1", "4.2"), more="section 7"),
    Part("16_clinic", 20, ("4.1",)),
)
MINUTES = sum(part.minutes for part in SPINE)


def part_of(stem):
    """Return the Part of this lab, or None."""
    return next((part for part in SPINE if part.stem == stem), None)


def next_after(name, records):
    """Return one line on what comes after `name` in its lab.

    If `name` completes the lab's part of the spine, the line also says what comes next on the
    spine.
    """
    line, onward = outline_next(name, records), leads_to(labs.stem_of(name), records)
    return f"{line}; on the spine: {onward}" if onward else line


def leads_to(stem, records):
    """Return what comes next on the spine, as "02, 4.1 tree_rounds".

    Returns: "" until this lab's part of the spine is done, or if the lab has none
    """
    part = part_of(stem)
    is_done = part and all(is_passed(each.name, records) for each in part.asked())
    return _coming(records) if is_done else ""


def progress(records):
    """Return one line: how much of the spine has passed, and what comes next on it.

    A part's minutes count by the share of its exercises and predictions that have passed.
    """
    minutes = 0.0
    for part in SPINE:
        items = part.asked()
        rest = [each for each in items if not is_passed(each.name, records)]
        minutes += part.minutes * (1 - len(rest) / len(items))
    hours, next_line = f"spine: {minutes / 60:.1f} of {MINUTES / 60:.0f} h", _coming(records)
    return f"{hours}; next: {next_line}" if next_line else f"{hours}: all of it"


def _coming(records):
    """ "02, 4.1 tree_rounds": the first of the spine that has not passed; "" if all have."""
    return next((f"{part.stem[:2]}, {each}" for part in SPINE for each in part.asked()
                 if not is_passed(each.name, records)), "")


def _ranges(sections):
    """ "4.1, 4.3 to 4.5": neighbours of three or more as a range."""
    runs = []
    for section in sections:
        chapter, number = map(int, section.split("."))
        if runs and (chapter, number - 1) == runs[-1][-1]:
            runs[-1].append((chapter, number))
        else:
            runs.append([(chapter, number)])
    texts = [[f"{chapter}.{number}" for chapter, number in run] for run in runs]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in texts)
