"""`ranklab questions --anki FILE`: the bank as a text file that Anki imports as it is.

Its header lines and its quotes follow Anki's manual ("Text Files", docs.ankiweb.net): tabs,
HTML, and for each card an identity, so that a later file updates the cards and leaves their dates.
"""

import csv
import io
from pathlib import Path

from ranklab.course.labs import find_stem
from ranklab.course.questions import answer_html, asked_html
from ranklab.files import write_whole
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.options import new_file, number
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
    """The questions that fit are in the file; returns the exit code.
    error  ValueError with the list of labs
    """
    parser = Command("ranklab questions", "The interview questions as cards for Anki.")
    parser.add_argument("--anki", type=new_file, metavar="FILE", required=True,
                        help="write them here, such as ranklab.txt")
    parser.add_argument("--lab", help="a lab, such as 00 or 00_ranks (all)")
    parser.add_argument("--level", type=number(least=1, most=5), help="1 easy ... 5 hard (all)")
    wanted = parser.parse_args(argv)
    lab = None if wanted.lab is None else find_stem(wanted.lab)
    chosen = [question for question in load()
              if lab in (None, question.lab) and wanted.level in (None, question.level)]
    Path(wanted.anki).parent.mkdir(parents=True, exist_ok=True)
    write_whole(wanted.anki, cards(chosen))
    print(f"{len(chosen)} cards in {wanted.anki}: import them in Anki by File > Import.")
    return 0


def cards(questions):
    """The text of the file; numbers are drawn once, the same each time."""
    text = io.StringIO()
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    for question in questions:
        asked = draw(question)
        tags = (question.lab, f"level-{question.level}", question.kind)
        rows.writerow((f"ranklab-{question.id}", asked_html(asked), answer_html(asked),
                       " ".join(f"ranklab::{tag}" for tag in tags)))
    return HEADER + text.getvalue()
