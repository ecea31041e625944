"""Instructions with answers, in Alpaca's format: from your own file, or made from real text.

    taught = python_instructions(python_text())
    taught = alpaca_file("alpaca.json")     # a list of {"instruction", "input", "output"}

As tokens, an example is a prompt followed by its answer. Only the tokens of answers count in the
loss; all others have the label IGNORE.
"""

import json
import random
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from ranklab.basics.targets import IGNORE

PROMPT = "{instruction}\nInput: {input}\nAnswer:"
FIELDS = ("instruction", "input", "output")
STATEMENTS = ("import", "from", "def", "class", "return", "if", "for", "raise", "while", "assert")
ENGLISH = re.compile(r"# [A-Z][A-Za-z ,.']+")  # a comment
LENGTHS = range(12, 41)  # of a line, in bytes


class Instructions(NamedTuple):
    """Pairs (prompt, answer)."""

    name: str
    train: list
    held_out: list  # never trained on


def alpaca_file(path):
    """Read Instructions from your file; hold out one in ten, by the hash of its prompt.

    Raises: ValueError with the number of the first example that lacks a field.
    """
    try:
        examples = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(examples, list):
        raise ValueError(f"{path} is no list of examples")
    sides = [], []
    for number, example in enumerate(examples, 1):
        for name in FIELDS:
            if not isinstance(example, dict) or not isinstance(example.get(name), str):
                raise ValueError(f"{path}, example {number} has no text called {name}; each needs "
                                 "instruction, input (which may be empty) and output")
        prompt = PROMPT.format(**example)
        sides[zlib.crc32(prompt.encode()) % 10 == 0].append((prompt, example["output"]))
    if not all(sides):
        raise ValueError(f"{path} has {len(sides[0])} examples to train on and {len(sides[1])} "
                         "held out: give more")
    return Instructions(Path(path).name, *sides)


def python_instructions(text, n=6000):
    """Make about n Instructions that ask about lines of `text`: Python and English.

    n is the number to train on; n // 10 more are held out.
    """
    used_lines = set()
    held_out = _pairs_about(text.held_out, n // 10, used_lines)
    train = _pairs_about(text.train, n, used_lines)
    return Instructions(f"questions about {text.name}", train, held_out)


def plain_text(text, n, length):
    """Return n pairs without a prompt: pieces from all over `text`."""
    pieces = text.train[: len(text.train) // n * n].reshape(n, -1)[:, :length]
    return [("", piece.tobytes().decode("ascii", "ignore")) for piece in pieces]


def _pairs_about(tokens, n, used_lines):
    """Return about n pairs about lines not yet in `used_lines`; add these lines to it.

    All answers to a question are equally frequent, so that none can be guessed.
    """
    by_question = {}
    for line in tokens.tobytes().decode("ascii", "ignore").split("\n"):
        line = line.strip()
        if len(line) in LENGTHS and line not in used_lines:
            used_lines.add(line)
            for question, about, answer in _questions(line):
                prompt = PROMPT.format(instruction=question, input=about)
                by_answer = by_question.setdefault(question, {})
                by_answer.setdefault(answer, []).append((prompt, answer))
    pairs = [pair for by_answer in by_question.values() for pairs in by_answer.values()
             for pair in pairs[: n // len(by_question) // len(by_answer)]]
    random.Random(0).shuffle(pairs)
    return pairs


def _questions(line):
    """List (question, the text that it is about, answer)."""
    if ENGLISH.fullmatch(line):
        return [("Is it Python or English?", line[2:], "English")]
    if line.startswith("#"):
        return []
    word, colon = line.split()[0], "yes" if line.endswith(":") else "no"
    questions = [("Is it Python or English?", line, "Python"),
                 ("Is a colon its end?", line, colon)]
    return questions + [("Which statement is it?", line, word)] * (word in STATEMENTS)


# --- as tokens ------------------------------------------------------------------------------------

class Bytes:
    """A tokenizer with the interface of transformers' tokenizers; a token is a byte."""

    bos_token_id, eos_token_id = 2, 0  # ASCII's start of text; what python_text has between files

    def encode(self, text, add_special_tokens):
        return list(text.encode())


def encode(pair, tokenizer):
    """Return (the tokens of prompt and answer, the number of tokens in the prompt)."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt, answer = (tokenizer.encode(each, add_special_tokens=False) for each in pair)
    return [*begin, *prompt, *answer, tokenizer.eos_token_id], len(begin) + len(prompt)


def as_batch(encoded, n_ctx):
    """Make a batch of encoded pairs, as long as the longest one, but no longer than n_ctx.

    Returns: (tokens, labels), each (B, T), int64.
    """
    T = min(n_ctx, max(len(tokens) for tokens, _ in encoded))
    tokens, labels = torch.zeros(2, len(encoded), T, dtype=torch.int64)
    labels.fill_(IGNORE)
    for i, (numbers, prompt) in enumerate(encoded):
        tokens[i, : len(numbers)] = torch.tensor(numbers[:T])
        labels[i, prompt : len(numbers)] = torch.tensor(numbers[prompt:T])
    return tokens, labels
