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
    selection = [question for question in bank if question.lab == lab and question.in_lab]
    if not selection:
        labs = ", ".join(sorted({question.lab for question in bank if question.in_lab}))
        raise ValueError(f"no interview questions for lab '{lab}'; there are some for {labs}")
    selection.sort(key=lambda question: question.level)
    rest = sum(question.lab == lab for question in bank) - len(selection)
    # the same numbers for every reader and every build: solutions must not change by themselves
    return LabQuestions(lab, [(question, draw(question, seed=0)) for question in selection], rest)


class LabQuestions:
    """The output of a cell: folded answers in a notebook, plain text anywhere else."""

    def __init__(self, lab, pairs, rest):
        self.lab, self.pairs, self.rest = lab, pairs, rest

    def __len__(self):
        return len(self.pairs)

    def __repr__(self):
        parts = []
        for place, (question, item) in enumerate(self.pairs, 1):
            lines = [f"{place}. (level {question.level}) " + plain(item.text, "   ").lstrip()]
            lines += [plain(f"{letter}) {option}", "     ")
                      for letter, option in zip("abcdefgh", item.options)]
            lines.append(plain("Answer: " + "\n\n".join(_answer(item)), "   "))
            lines += [plain(f"- {point}", "     ") for point in (*item.rubric, *_slips(item))]
            parts.append("\n".join(lines))
        return "\n\n".join([*parts, self._last_line()])

    def _repr_html_(self):
        parts = [question_html(place, *pair) for place, pair in enumerate(self.pairs, 1)]
        return "".join(parts) + to_html(self._last_line())

    def _last_line(self):
        number = self.lab.split("_")[0]
        return (f"{self.rest} more, with new numbers each time: run "
                f"`ranklab drill --lab {number}` in a terminal.")


def question_html(place, question, item, with_answer=True):
    """Render a question as HTML, its answer folded away or left out."""
    text = f"<p><b>{place}.</b> <i>level {question.level} of 5</i></p>{asked_html(item)}"
    if not with_answer:
        return text + "<hr>"
    return text + f"<details><summary>Answer</summary>{answer_html(item)}</details><hr>"


def asked_html(item):
    """Render the question's text as HTML, with its options."""
    options = "".join(f"<li>{to_html(text)}</li>" for text in item.options)
    return to_html(item.text) + (f'<ol type="a">{options}</ol>' if options else "")


def answer_html(item):
    """Render as HTML the answer, the reason, the points of a good one, and common wrong ones."""
    points, slips = ("".join(f"<li>{to_html(text)}</li>" for text in texts)
                     for texts in (item.rubric, _slips(item)))
    return ("".join(to_html(text) for text in _answer(item))
            + (f"<p>A good answer makes these points:</p><ul>{points}</ul>" if points else "")
            + (f"<p>Common wrong answers:</p><ul>{slips}</ul>" if slips else ""))


def _answer(item):
    """The paragraphs of the answer: the answer itself, and why."""
    letter = f"{'abcdefgh'[item.options.index(item.answer)]}) " if item.options else ""
    return [text for text in (letter + item.shown_answer(), item.why) if text]


def _slips(item):
    """The common wrong answers, each with what it confuses."""
    text = (lambda value: show(value, item.unit)) if item.kind == "number" else str
    return [f"{text(value)} - {confuses}" for value, confuses in item.wrong]
