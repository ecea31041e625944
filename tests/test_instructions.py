"""Instructions that are made from real text. (What a file may not be: test_refusals.py.)"""

from collections import Counter

from ranklab import data
from ranklab.data import instructions


def test_they_are_about_real_lines_and_no_answer_can_be_guessed():
    taught = instructions.python_instructions(data.python_text())
    assert not {prompt for prompt, _ in taught.train} & {prompt for prompt, _ in taught.held_out}
    answers = Counter(answer for _, answer in taught.held_out)
    assert min(answers["yes"], answers["no"], answers["Python"], answers["English"]) == 100
    assert [answers[word] for word in instructions.STATEMENTS] == [20] * 10
