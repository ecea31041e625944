"""`ranklab status`: what the learner has passed, in the order of the labs, and what is next."""

from ranklab.course import labs, progress, spine
from ranklab.course.outline import is_passed, outline


def status(lab=None) -> str:
    """Return a table of one lab, or of each lab that was begun, then what comes next.

    lab: None: a lab that was not begun takes one line; "all": a table for every lab
    Raises: ValueError with the list of labs
    """
    stems = labs.written() if lab in (None, "all") else (labs.find_stem(lab),)
    if stems[0] not in labs.written():
        return f"{stems[0]} is not written yet"
    records, lines, current, last = progress.load(), [], stems[0], None
    for stem in stems:
        items = outline(stem)
        passed = [one for one in items if is_passed(one.name, records)]
        if passed:
            current, last = stem, passed[-1]
        lines.append(f"{stem:38} {len(passed):2} of {len(items)}")
        if lab or any(one.name in records for one in items):
            lines += [_line(one, records.get(one.name, progress.NEW)) for one in items]
    next_line = spine.next_after(last.name, records) if last else f"next: {outline(current)[0]}"
    rest = [] if lab else [spine.progress(records), "`ranklab status 06` lists all of lab 06"]
    return "\n".join([*lines, *rest, f"you are in {current}; {next_line}"])


def _line(one, entry):
    counts = [_count(entry["tries"], "try", "tries"),
              _count(entry.get("hints", 0), "hint", "hints")]
    counts = ", ".join(count for count in counts if count)
    return f"  {one.section:8} {one.name:28} {entry['state']:8} {counts}".rstrip()


def _count(number, one, more):
    return f"{number} {one if number == 1 else more}" if number else ""
