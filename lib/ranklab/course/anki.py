"""`ranklab questions`: the bank, to read in the terminal or as a text file that Anki imports.

The file's header lines and its quotes follow Anki's manual ("Text Files", docs.ankiweb.net): tabs,
HTML, and an identity for each card, so that a later file updates the cards and keeps their dates.
"""

import argparse
import csv
import io
from pathlib import Path

from ranklab.basics.files import write_whole
from ranklab.basics.options import new_file, number
from ranklab.course import index
from ranklab.course.labs import find_stem
from ranklab.course.questions import answer_html, asked_html
from ranklab.interview.ask import draw, text_of
from ranklab.interview.bank import load
from ranklab.interview.text import plain
from ranklab.projects.command import Command

HEADER = """#separator:tab
#html:true
#notetype:Basic
#deck:ranklab
#columns:guid\tFront\tBack\tTags
#guid column:1
#tags column:4
"""


def export(argv):
    """Print the matching questions, or write them to a file; return the exit code.

    Raises: ValueError with the list of labs.
    """
    parser = Command("ranklab questions", "The interview questions: shown here, without answers, "
                     "or as cards for Anki, with them. `ranklab drill` asks them.")
    parser.add_argument("lab", nargs="?", default=argparse.SUPPRESS,
                        help="a lab, such as 00 or 00_ranks (all)")
    parser.add_argument("--lab", help="the same")
    parser.add_argument("--level", type=number(least=1, most=5), help="1 easy ... 5 hard (all)")
    parser.add_argument("--anki", type=new_file, metavar="FILE",
                        help="write them here with their answers, such as ranklab.txt")
    options = parser.parse_args(argv)
    lab = None if options.lab is None else find_stem(options.lab)
    questions = [question for question in load()
                 if lab in (None, question.lab) and options.level in (None, question.level)]
    if not options.anki:
        print(listed(questions))
        return 0
    Path(options.anki).parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.anki, cards(questions))
    print(f"{len(questions)} cards in {options.anki}: import them in Anki by File > Import.")
    return 0


def listed(questions):
    """Return the questions as text, lab by lab, easy ones first."""
    lines = []
    for lab in dict.fromkeys(question.lab for question in questions):
        group = sorted((each for each in questions if each.lab == lab), key=lambda each: each.level)
        lines.append(lab)
        for question in group:
            text = text_of(question) or index.questions()[question.id]
            lines.append(plain(f"level {question.level}, {question.id}: {text}", "  "))
    lines.append(f"{len(questions)} questions; `ranklab drill --lab 02` asks a lab's, and "
                 "judges your answers.")
    return "\n\n".join(lines)


def cards(questions):
    """Return the text of the file; numbers are drawn once, the same in every export."""
    text = io.StringIO()
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    for question in questions:
        item = draw(question)
        tags = (question.lab, f"level-{question.level}", question.kind)
        rows.writerow((f"ranklab-{question.id}", asked_html(item), answer_html(item),
                       " ".join(f"ranklab::{tag}" for tag in tags)))
    return HEADER + text.getvalue()
