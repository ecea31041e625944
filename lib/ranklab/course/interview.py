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
    options = _parser().parse_args(argv)
    if options.seed is None:
        options.seed = time.time_ns() % 2**32
    marks, sheets = Marks(home() / "drill.json"), Sheets(home() / "interviews.json")
    bank = {question.id: question for question in load()}
    if options.score:
        sheet = sheets.last()
    else:
        sheet = sheets.new(options, choose(bank.values(), options, marks))
    entries = [entry for entry in sheet["asked"] if entry["id"] in bank]
    rows = [(entry, bank[entry["id"]], draw(bank[entry["id"]], sheet["seed"]))
            for entry in entries]
    if not options.score:
        hold(sheet, rows, sheets.save, clock)
    try:
        score(rows, sheets.save, marks)
    except (Stop, KeyboardInterrupt):
        print()
    print(text := report(sheet, rows))
    if options.report:
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.report, f"{text}\n{transcript(rows)}")
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
    rest, result = minutes - sum(MINUTES[kind] for kind in last), []
    for kind in itertools.cycle(ORDER):
        rest -= MINUTES[kind]
        if rest < 0 and result:
            return result + last
        result.append(kind)


def choose(bank, options, marks):
    """Choose the questions, in order: weak ones, then new ones, from as many labs as possible."""
    dice, selection, labs = random.Random(options.seed), [], Counter()

    def order(question):
        priority = 0 if marks.weak(question.id) else 2 if marks.seen(question.id) else 1
        return priority, labs[question.lab], abs(question.level - options.level), dice.random()

    for kind in kinds(options.minutes):
        pool = [one for one in bank if one.kind == kind and one.id not in {q.id for q in selection}]
        near = [one for one in pool if abs(one.level - options.level) <= 1] or pool
        if near:
            selection.append(min(near, key=order))
            labs[selection[-1].lab] += 1
    return selection


class Sheets:
    """The file of interviews, by starting time: what was asked, typed and marked in each."""

    def __init__(self, path):
        self.path, self.sheets, self.can_write = path, records.load(path, _is_sheet), True
        self.name = max(self.sheets, default=None)

    def last(self):
        """Return the newest sheet; raise ValueError where there is none."""
        if self.name is None:
            raise ValueError(f"{self.path} holds no interview to score")
        return self.sheets[self.name]

    def new(self, options, questions):
        """Begin a sheet of these questions, each with its share of the time, and return it."""
        whole = sum(MINUTES[question.kind] for question in questions)
        self.name = time.strftime("%Y-%m-%d %H:%M:%S")
        self.sheets[self.name] = {
            "begun": self.name, "minutes": options.minutes, "level": options.level,
            "seed": options.seed, "asked": [
                {"id": question.id, "reply": None, "mark": None, "missed": [], "seconds": 0.0,
                 "share": 60 * options.minutes * MINUTES[question.kind] / whole}
                for question in questions]}
        return self.last()

    def save(self):
        """Write the sheet to the file; where no file can be written, tell the learner once."""
        if self.can_write:
            with records.change(self.path, _is_sheet) as sheets:
                sheets[self.name] = self.sheets[self.name]
            self.can_write = self.path.exists()


def _is_sheet(record):
    return (isinstance(record, dict) and {"begun", "minutes", "level", "seed"} <= set(record)
            and isinstance(record.get("asked"), list) and all(
                isinstance(entry, dict) and isinstance(entry.get("missed"), list)
                and {"id", "reply", "mark", "seconds", "share"} <= set(entry)
                for entry in record["asked"]))


# --- the clock runs -------------------------------------------------------------------------------

def hold(sheet, rows, save, clock):
    """Ask the questions until the time is up, or until q or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrows and long lines work where somebody types
    seconds, start = 60 * sheet["minutes"], clock()
    print(f"{len(rows)} questions in {sheet['minutes']:g} minutes, scored afterwards. Enter alone "
          "passes, q ends.\n")
    with _bell(seconds), contextlib.suppress(Stop, KeyboardInterrupt):
        for place, (entry, question, item) in enumerate(rows, 1):
            since = clock()
            rest = start + seconds - since
            if rest <= 0:
                break
            print(f"{place}/{len(rows)}  {question.lab}, level {question.level}: "
                  f"{clock_time(entry['share'])} for this, {clock_time(rest)} left")
            print(plain(item.text, "  ") + "\n")
            try:
                _answer(item, entry, save, lambda: clock() >= start + seconds)
            finally:
                entry["seconds"] = clock() - since
                save()
            print()
    print("\nThe interview is over.\n")


def _answer(item, entry, save, is_over):
    """Store the reply in entry["reply"]: "" if the question was skipped, None if time ran out."""
    if not item.rubric:
        entry["reply"] = read_reply(item) or (None if is_over() else "")
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

def score(rows, save, marks):
    """Give each answer its mark, from 0 to 1, and list the points that it missed.

    Raises: Stop if the person stops; answers not scored yet can be scored later
    """
    for entry, question, item in rows:
        if entry["reply"] is None or entry["mark"] is not None:
            continue
        print(f"{question.id}\n{plain(item.text, '  ')}\n")
        show_options(item)
        print("  You said:\n" + plain(entry["reply"] or "nothing", "    "))
        if item.rubric:
            missed = [point for point in item.rubric if not (entry["reply"] and _is_made(point))]
            entry["missed"], mark = missed, 1 - len(missed) / len(item.rubric)
            print("  A good answer:\n" + plain(item.answer, "    "))
        else:
            mark = grade(item, entry["reply"])
        if item.why:
            print(plain(item.why, "    "))
        entry["mark"] = round(mark, 3)
        save()
        marks.add(question.id, mark)
        print()


def _is_made(point):
    print(plain(f"- {point}", "    "))
    while (reply := read("      did you say it? y/n > ").lower()) not in ("y", "yes", "n", "no"):
        print("      y or n, please.")
    return reply.startswith("y")
