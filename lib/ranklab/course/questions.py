"""The interview questions that a lab shows, answers folded away."""
from ranklab.interview.ask import draw
from ranklab.interview.bank import load
from ranklab.interview.text import plain, to_html
from ranklab.interview.units import show


def questions(lab):
    """Return the interview questions that `lab` shows, ready for a notebook or for print.

    Raises: ValueError naming the labs that have questions
    """
    bank = load()
    shown = [question for question in bank if question.lab == lab and question.in_lab]
    if not shown:
        labs = ", ".join(sorted({question.lab for question in bank if question.in_lab}))
        raise ValueError(f"no interview questions for lab '{lab}'; there are some for {labs}")
    shown.sort(key=lambda question: question.level)
    more = sum(question.lab == lab for question in bank) - len(shown)
    # the same numbers for every reader and every build: solutions must not change by themselves
    return LabQuestions(lab, [(question, draw(question, seed=0)) for question in shown], more)


class LabQuestions:
    """The output of a cell: folded answers in a notebook, plain text anywhere else."""

    def __init__(self, lab, drawn, more):
        self.lab, self.drawn, self.more = lab, drawn, more

    def __len__(self):
        return len(self.drawn)

    def __repr__(self):
        parts = []
        for place, (question, asked) in enumerate(self.drawn, 1):
            lines = [f"{place}. (level {question.level}) " + plain(asked.text, "   ").lstrip()]
            lines += [plain(f"{letter}) {option}", "     ")
                      for letter, option in zip("abcdefgh", asked.options)]
            lines.append(plain("Answer: " + "\n\n".join(_answer(asked)), "   "))
            lines += [plain(f"- {point}", "     ") for point in (*asked.rubric, *_slips(asked))]
            parts.append("\n".join(lines))
        return "\n\n".join([*parts, self._last_line()])

    def _repr_html_(self):
        parts = [question_html(place, *drawn) for place, drawn in enumerate(self.drawn, 1)]
        return "".join(parts) + to_html(self._last_line())

    def _last_line(self):
        number = self.lab.split("_")[0]
        return (f"{self.more} more, with new numbers each time: run "
                f"`ranklab drill --lab {number}` in a terminal.")


def question_html(place, question, asked, with_answer=True):
    """Render a question as HTML, its answer folded away or left out."""
    text = f"<p><b>{place}.</b> <i>level {question.level} of 5</i></p>{asked_html(asked)}"
    if not with_answer:
        return text + "<hr>"
    return text + f"<details><summary>Answer</summary>{answer_html(asked)}</details><hr>"


def asked_html(asked):
    """Render the question's text as HTML, with its options."""
    options = "".join(f"<li>{to_html(text)}</li>" for text in asked.options)
    return to_html(asked.text) + (f'<ol type="a">{options}</ol>' if options else "")


def answer_html(asked):
    """Render as HTML the answer, the reason, the points of a good one, and common wrong ones."""
    points, slips = ("".join(f"<li>{to_html(text)}</li>" for text in texts)
                     for texts in (asked.rubric, _slips(asked)))
    return ("".join(to_html(text) for text in _answer(asked))
            + (f"<p>A good answer makes these points:</p><ul>{points}</ul>" if points else "")
            + (f"<p>Common wrong answers:</p><ul>{slips}</ul>" if slips else ""))


def _answer(asked):
    """The paragraphs of the answer: the answer itself, and why."""
    letter = f"{'abcdefgh'[asked.options.index(asked.answer)]}) " if asked.options else ""
    return [text for text in (letter + asked.shown_answer(), asked.why) if text]


def _slips(asked):
    """The common wrong answers, each with what it confuses."""
    text = (lambda value: show(value, asked.unit)) if asked.kind == "number" else str
    return [f"{text(value)} - {confuses}" for value, confuses in asked.wrong]
