"""`ranklab drill`: the interview bank in the terminal. It asks, names mistakes and keeps the score.

The score is one JSON file, $RANKLAB_HOME/drill.json: the last marks, from 0 to 1, of each question.
A question is weak when one of its last two marks is below 0.7, so two good answers remove it
from `--weak`.
"""
import random
import time

from ranklab.basics.options import number, positive
from ranklab.course import records
from ranklab.course.labs import find_stem
from ranklab.course.progress import home
from ranklab.interview.ask import SHARE, draw, judge
from ranklab.interview.bank import load
from ranklab.interview.text import plain
from ranklab.interview.units import read_number, show
from ranklab.projects.command import Command

KEPT = 5                     # marks kept per question
LETTERS = "abcdefgh"


class Stop(Exception):
    """The learner stopped: q, Ctrl-C or the end of the input."""


def drill(argv):
    """Ask the matching questions, up to the count; return the exit code.

    Questions come from the bank, the marks go to $RANKLAB_HOME/drill.json.
    Raises: ValueError with the list of labs
    """
    options = _parser().parse_args(argv)
    if options.seed is None:
        options.seed = time.time_ns() % 2**32
    marks = Marks(home() / "drill.json")
    questions = choose(load(), options, marks)
    if not questions:
        print("Nothing to ask: no question fits" + (
            "." if not options.weak else " and is weak. Well done; drop --weak." if marks.history
            else " and is weak: none was asked yet. Drop --weak."))
        return 0
    print(f"{len(questions)} questions. A number may carry a unit: 150 MB, 1.5e9, 3/4, 2*7/8*100.\n"
          "Enter alone shows the answer; q stops.\n")
    results = []
    try:
        for place, question in enumerate(questions, 1):
            mark = _ask(question, f"{place}/{len(questions)}", options.seed)
            results.append((question, mark))
            marks.add(question.id, mark)
    except (Stop, KeyboardInterrupt):
        print()
    _report(results, marks)
    return 0


def choose(questions, options, marks):
    """Choose the questions of the lab and level, in order; with --weak, only the weak ones."""
    lab = None if options.lab is None else find_stem(options.lab)
    fitting = [question for question in questions
               if lab in (None, question.lab) and options.level in (None, question.level)]
    random.Random(options.seed).shuffle(fitting)
    if options.weak:
        fitting = [question for question in fitting if marks.weak(question.id)]
    else:                                    # never asked comes before answered well
        fitting.sort(key=lambda question: marks.seen(question.id) and not marks.weak(question.id))
    return fitting[:options.count]


class Marks:
    """The score file: marks from 0 to 1 for each question id, the newest last."""

    def __init__(self, path):
        self.path, self.history = path, records.load(path, _are_marks)

    def seen(self, name):
        """Return whether the question was asked before."""
        return name in self.history

    def weak(self, name):
        """Return whether one of the last two marks is below 0.7."""
        return any(mark < SHARE for mark in self.history.get(name, [])[-2:])

    def add(self, name, mark):
        """Append a mark, after any that another terminal has added since."""
        with records.change(self.path, _are_marks) as self.history:
            self.history[name] = [*self.history.get(name, []), round(mark, 3)][-KEPT:]


def _are_marks(record):
    return isinstance(record, list) and all(isinstance(mark, (int, float)) for mark in record)


def _parser():
    parser = Command("ranklab drill", "Interview questions in the terminal. Numbers are new each "
                     "time; the score is kept.")
    parser.add_argument("--lab", help="a lab, such as 00 or 00_ranks (all)")
    parser.add_argument("--level", type=number(least=1, most=5), help="1 easy ... 5 hard (all)")
    parser.add_argument("--weak", action="store_true", help="only those you did not know")
    parser.add_argument("--count", type=positive, default=10, metavar="N",
                        help="how many questions")
    parser.add_argument("--seed", type=number(),
                        help="the same seed asks the same questions with the same numbers")
    return parser


def _ask(question, place, seed):
    item = draw(question, seed)
    print(f"{place}  {question.lab}, level {question.level}  ({question.id})")
    print(plain(item.text, "  ") + "\n")
    mark = _ask_open(item) if item.rubric else grade(item, read_reply(item))
    if item.why:
        print(plain(item.why, "      "))
    print(flush=True)
    return mark


def read_reply(item):
    """Ask until the reply is valid; return it as typed, or "" for Enter only.

    A reply is a number, or the letter of a choice.
    """
    prompt = f"  in {item.unit} > " if item.unit not in ("", "x") else "  > "
    if item.options:
        show_options(item)
        prompt = f"\n  a-{LETTERS[len(item.options) - 1]} > "
    while reply := read(prompt):
        try:
            value_of(item, reply)
        except ValueError as error:
            print(f"  {error}.")
        else:
            return reply
    return ""


def show_options(item):
    """Print the options of a choice; print nothing where there are none."""
    for letter, option in zip(LETTERS, item.options):
        print(plain(f"{letter}) {option}", "    "))


def value_of(item, reply):
    """Parse a reply: return a number in SI units, or one of the options.

    Raises: ValueError with one sentence when the reply is neither
    """
    if item.kind == "number":
        return read_number(reply, item.unit)
    letter, letters = reply.lower().strip(" ()."), LETTERS[:len(item.options)]
    if len(letter) != 1 or letter not in letters:
        raise ValueError(f"one letter of {', '.join(letters)}, please")
    return item.options[letters.index(letter)]


def grade(item, reply):
    """Grade a reply: 1.0 where it is right, else 0.0.

    Prints whether it is right, and for a wrong reply what was confused.
    """
    right_one = item.shown_answer() if item.kind == "number" else (
        LETTERS[item.options.index(item.answer)])
    if not reply:
        print(f"  ->    {right_one}")
        return 0.0
    value = value_of(item, reply)
    right, confuses = judge(item, value)
    is_number = item.kind == "number"
    if right:
        print("  ok    right" + (f" ({right_one})" if is_number and value != item.answer else ""))
    else:
        print(f"  no    it is {right_one}"
              + (f", not {show(value, item.unit)}." if is_number else "."))
    if confuses:
        print(plain(confuses, "        "))
    return float(right)


def _ask_open(item):
    read("  Answer aloud, as in the interview; then press Enter. > ")
    print(plain(item.answer, "      ") + "\n\n  The points of a good answer:")
    for line, point in enumerate(item.rubric, 1):
        print(plain(f"{line}. {point}", "    "))
    points = len(item.rubric)
    while True:
        reply = read(f"  How many of the {points} did you make? > ")
        if not reply or reply in map(str, range(points + 1)):
            return int(reply or 0) / points
        print(f"  a number from 0 to {points}, please.")


def read(prompt):
    """Read what is typed, without the spaces around it.

    Raises: Stop for q and at the end of the input
    """
    try:
        reply = input(prompt).strip()
    except EOFError:
        raise Stop from None
    if reply.lower() in ("q", "quit", "exit"):
        raise Stop
    return reply


def _report(results, marks):
    if not results:
        print("No question answered, no score.")
        return
    total = sum(mark for _, mark in results)
    print(f"{round(total, 1):g} of {len(results)} right.")
    for lab in sorted({question.lab for question, _ in results}):
        of_lab = [mark for question, mark in results if question.lab == lab]
        print(f"  {lab:16} {round(sum(of_lab), 1):g} of {len(of_lab)}")
    weak = [question.id for question, _ in results if marks.weak(question.id)]
    if weak:
        print(plain(f"Weak: {', '.join(weak)}. `ranklab drill --weak` asks them again, with new "
                    "numbers."))
