"""`ranklab interview`: a mock interview against the clock, scored afterwards, with a report.

Questions answered wrongly in a drill come first, then those never asked. While the clock runs,
nothing is judged. Then the machine judges numbers and choices, and the person scores the other
answers against the rubric, point by point. Each line typed is saved at once, in
$RANKLAB_HOME/interviews.json. The marks go into the drill's file.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from ranklab.basics.files import write_whole
from ranklab.basics.options import new_file, number
from ranklab.course import records
from ranklab.course.drill import Marks, Stop, grade, read, read_reply, show_options
from ranklab.course.interview_report import clock_time, report, transcript
from ranklab.course.progress import home
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.interview.text import plain
from ranklab.projects.command import Command

MINUTES = {"number": 3, "choice": 2, "open": 6, "design": 15}  # that an answer takes, roughly
ORDER = ("number", "choice", "open", "number", "choice", "number", "open", "choice", "number")


def interview(argv, clock=time.monotonic):
    """Hold an interview, or score the last one; return the exit code.

    clock: returns seconds, and keeps running while somebody types
    Raises: ValueError if there is no saved interview to score
    """
    wanted = _parser().parse_args(argv)
    if wanted.seed is None:
        wanted.seed = time.time_ns() % 2**32
    marks, sheets = Marks(home() / "drill.json"), Sheets(home() / "interviews.json")
    bank = {question.id: question for question in load()}
    if wanted.score:
        sheet = sheets.last()
    else:
        sheet = sheets.new(wanted, choose(bank.values(), wanted, marks))
    entries = [entry for entry in sheet["asked"] if entry["id"] in bank]
    drawn = [(entry, bank[entry["id"]], draw(bank[entry["id"]], sheet["seed"]))
             for entry in entries]
    if not wanted.score:
        hold(sheet, drawn, sheets.save, clock)
    try:
        score(drawn, sheets.save, marks)
    except (Stop, KeyboardInterrupt):
        print()
    print(said := report(sheet, drawn))
    if wanted.report:
        Path(wanted.report).parent.mkdir(parents=True, exist_ok=True)
        write_whole(wanted.report, f"{said}\n{transcript(drawn)}")
    return 0


def _parser():
    parser = Command("ranklab interview", "A mock interview: timed, typed, scored by a rubric.")
    parser.add_argument("--minutes", type=number(float, above=0, most=240), default=45,
                        help="how long; from 30 on the last question is a system design")
    parser.add_argument("--level", type=number(least=1, most=5), default=3,
                        help="1 easy ... 5 hard; questions come from it, one below and one above")
    parser.add_argument("--report", type=new_file, metavar="FILE",
                        help="write the report here, with all answers, as Markdown")
    parser.add_argument("--score", action="store_true",
                        help="go on scoring the last interview, and report it again")
    parser.add_argument("--seed", type=number(),
                        help="the same seed asks the same questions with the same numbers")
    return parser


# --- what is asked --------------------------------------------------------------------------------

def kinds(minutes):
    """Return the kinds of questions that fit into this many minutes, in order; at least one."""
    last = ["design"] if minutes >= 2 * MINUTES["design"] else []
    left, found = minutes - sum(MINUTES[kind] for kind in last), []
    for kind in itertools.cycle(ORDER):
        left -= MINUTES[kind]
        if left < 0 and found:
            return found + last
        found.append(kind)


def choose(bank, wanted, marks):
    """Choose the questions, in order: weak ones, then new ones, from as many labs as possible."""
    dice, chosen, labs = random.Random(wanted.seed), [], Counter()

    def order(question):
        known = 0 if marks.weak(question.id) else 2 if marks.seen(question.id) else 1
        return known, labs[question.lab], abs(question.level - wanted.level), dice.random()

    for kind in kinds(wanted.minutes):
        pool = [one for one in bank if one.kind == kind and one.id not in {it.id for it in chosen}]
        near = [one for one in pool if abs(one.level - wanted.level) <= 1] or pool
        if near:
            chosen.append(min(near, key=order))
            labs[chosen[-1].lab] += 1
    return chosen


class Sheets:
    """The file of interviews, by starting time: what was asked, typed and marked in each."""

    def __init__(self, path):
        self.path, self.kept, self.can_write = path, records.load(path, _is_sheet), True
        self.name = max(self.kept, default=None)

    def last(self):
        """Return the newest sheet; raise ValueError where there is none."""
        if self.name is None:
            raise ValueError(f"{self.path} holds no interview to score")
        return self.kept[self.name]

    def new(self, wanted, chosen):
        """Begin a sheet of these questions, each with its share of the time, and return it."""
        whole = sum(MINUTES[question.kind] for question in chosen)
        self.name = time.strftime("%Y-%m-%d %H:%M:%S")
        self.kept[self.name] = {
            "begun": self.name, "minutes": wanted.minutes, "level": wanted.level,
            "seed": wanted.seed, "asked": [
                {"id": question.id, "reply": None, "mark": None, "missed": [], "seconds": 0.0,
                 "share": 60 * wanted.minutes * MINUTES[question.kind] / whole}
                for question in chosen]}
        return self.last()

    def save(self):
        """Write the sheet to the file; where no file can be written, tell the learner once."""
        if self.can_write:
            with records.change(self.path, _is_sheet) as kept:
                kept[self.name] = self.kept[self.name]
            self.can_write = self.path.exists()


def _is_sheet(record):
    return (isinstance(record, dict) and {"begun", "minutes", "level", "seed"} <= set(record)
            and isinstance(record.get("asked"), list) and all(
                isinstance(entry, dict) and isinstance(entry.get("missed"), list)
                and {"id", "reply", "mark", "seconds", "share"} <= set(entry)
                for entry in record["asked"]))


# --- the clock runs -------------------------------------------------------------------------------

def hold(sheet, drawn, save, clock):
    """Ask the questions until the time is up, or until q or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrows and long lines work where somebody types
    seconds, begun = 60 * sheet["minutes"], clock()
    print(f"{len(drawn)} questions in {sheet['minutes']:g} minutes, scored afterwards. Enter alone "
          "passes, q ends.\n")
    with _bell(seconds), contextlib.suppress(Stop, KeyboardInterrupt):
        for place, (entry, question, asked) in enumerate(drawn, 1):
            since = clock()
            left = begun + seconds - since
            if left <= 0:
                break
            print(f"{place}/{len(drawn)}  {question.lab}, level {question.level}: "
                  f"{clock_time(entry['share'])} for this, {clock_time(left)} left")
            print(plain(asked.text, "  ") + "\n")
            try:
                _answer(asked, entry, save, lambda: clock() >= begun + seconds)
            finally:
                entry["seconds"] = clock() - since
                save()
            print()
    print("\nThe interview is over.\n")


def _answer(asked, entry, save, is_over):
    """Store the reply in entry["reply"]: "" if the question was skipped, None if time ran out."""
    if not asked.rubric:
        entry["reply"] = read_reply(asked) or (None if is_over() else "")
        return
    print("  Type your answer. A line with a dot alone ends it.")
    lines = []
    while not is_over():
        line = read("  > ")
        if line == "." or not line and not lines:
            break
        lines.append(line)
        entry["reply"] = "\n".join(lines)
        save()
    if not lines and not is_over():
        entry["reply"] = ""


@contextlib.contextmanager
def _bell(seconds):
    """Print a line if the block still runs after `seconds`.

    It does not interrupt what is being typed.
    """
    def ring(*_):  # not print(), because it may come in the middle of another print()
        os.write(sys.__stdout__.fileno(), b"\n  Time is over. Enter: what you typed counts.\n")

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


# --- afterwards -----------------------------------------------------------------------------------

def score(drawn, save, marks):
    """Give each answer its mark, from 0 to 1, and list the points that it missed.

    Raises: Stop if the person stops; answers not scored yet can be scored later
    """
    for entry, question, asked in drawn:
        if entry["reply"] is None or entry["mark"] is not None:
            continue
        print(f"{question.id}\n{plain(asked.text, '  ')}\n")
        show_options(asked)
        print("  You said:\n" + plain(entry["reply"] or "nothing", "    "))
        if asked.rubric:
            missed = [point for point in asked.rubric if not (entry["reply"] and _is_made(point))]
            entry["missed"], mark = missed, 1 - len(missed) / len(asked.rubric)
            print("  A good answer:\n" + plain(asked.answer, "    "))
        else:
            mark = grade(asked, entry["reply"])
        if asked.why:
            print(plain(asked.why, "    "))
        entry["mark"] = round(mark, 3)
        save()
        marks.add(question.id, mark)
        print()


def _is_made(point):
    print(plain(f"- {point}", "    "))
    while (reply := read("      did you say it? y/n > ").lower()) not in ("y", "yes", "n", "no"):
        print("      y or n, please.")
    return reply.startswith("y")
