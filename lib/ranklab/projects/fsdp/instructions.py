"""What a Llama is taught: instructions in Alpaca's form, from a file or made from real text.

A token counts in the loss where it is part of an answer; all others have the label IGNORE.
"""

import json
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ranklab import data
from ranklab.models.gpt import IGNORE

PROMPT = "{instruction}\nInput: {input}\nAnswer:"
STATEMENTS = ("import", "from", "def", "class", "return", "if", "for", "raise", "while", "assert")
ENGLISH = re.compile(r"# [A-Z][A-Za-z ,.']+")  # a comment
LENGTHS = range(12, 41)  # of a line, in bytes


class Example(NamedTuple):
    prompt: str
    answer: str


@dataclass(frozen=True)
class Instructions:
    """Examples to train on and examples that are never trained on."""

    name: str
    train: list[Example]
    held_out: list[Example]


def alpaca_file(path):
    """The Instructions of a file of yours; one in ten is held out, by the hash of its prompt.
    error  ValueError: the number of the first example without a field
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    sides = [], []
    for number, fields in enumerate(found, 1):
        for name in ("instruction", "input", "output"):
            if not isinstance(fields, dict) or not isinstance(fields.get(name), str):
                raise ValueError(f"{path}, example {number}: it needs the texts instruction, "
                                 f"input (it may be empty) and output, and has no {name}")
        prompt = PROMPT.format(**fields)
        sides[zlib.crc32(prompt.encode()) % 10 == 0].append(Example(prompt, fields["output"]))
    if not all(sides):
        raise ValueError(f"{path} has {len(sides[0])} examples to train on and {len(sides[1])} "
                         "held out: give more")
    return Instructions(Path(path).name, *sides)


def python_instructions(text, n=6000):
    """The Instructions, about n to train on, that ask about lines of `text`: Python and English."""
    seen = set()
    held_out = made_from(text.held_out, n // 10, seen)
    return Instructions(f"questions about {text.name}", made_from(text.train, n, seen), held_out)


def made_from(tokens, n, seen):
    """About n Examples about lines that are not in `seen`, then they are; each answer of a question
    as often as the others, so that none can be guessed.
    """
    found = {}
    for line in tokens.tobytes().decode("ascii", "ignore").split("\n"):
        line = line.strip()
        if len(line) in LENGTHS and line not in seen:
            seen.add(line)
            for question, text, answer in questions(line):
                found.setdefault(question, {}).setdefault(answer, []).append(
                    Example(PROMPT.format(instruction=question, input=text), answer))
    examples = [example for answers in found.values() for its in answers.values()
                for example in its[: n // len(found) // len(answers)]]
    random.Random(0).shuffle(examples)
    return examples


def questions(line):
    """[(question, the text that it is about, answer)]."""
    if ENGLISH.fullmatch(line):
        return [("Is it Python or English?", line[2:], "English")]
    if line.startswith("#"):
        return []
    found = [("Is it Python or English?", line, "Python"),
             ("Does it end with a colon?", line, "yes" if line.endswith(":") else "no")]
    word = line.split()[0]
    return found + [("Which statement is it?", line, word)] * (word in STATEMENTS)


# --- as tokens ------------------------------------------------------------------------------------

class Bytes:
    """A tokenizer as those of transformers are, whose tokens are bytes."""

    bos_token_id, eos_token_id = 2, 0  # ASCII's start of text, and python_text's end of a file

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())


def encode(example, tokenizer):
    """(the tokens of prompt and answer, how many are the prompt's)."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt, answer = (tokenizer.encode(each, add_special_tokens=False) for each in example)
    return [*begin, *prompt, *answer, tokenizer.eos_token_id], len(begin) + len(prompt)


def as_batch(encoded, n_ctx):
    """(tokens, labels) of these examples, as long as the longest one, but no longer than n_ctx.
    shape  two of (B, T), int64
    """
    T = min(n_ctx, max(len(tokens) for tokens, _ in encoded))
    at, tokens, labels = torch.arange(T), torch.zeros(len(encoded), T, dtype=torch.int64), []
    for row, (numbers, prompt) in zip(tokens, encoded):  # after the answer zeros: nobody sees them
        row[: len(numbers)] = torch.tensor(numbers[:T])
        labels.append(row.masked_fill((at < prompt) | (at >= len(numbers)), IGNORE))
    return tokens, torch.stack(labels)


def examples_at(encoded, batch, n_ctx, seed, step):
    """as_batch of step number `step`: each epoch has an order of its own."""
    epoch, place = divmod(step * batch, len(encoded))
    order = np.concatenate([np.random.default_rng((seed, e)).permutation(len(encoded))
                            for e in range(epoch, epoch + 2)])
    return as_batch([encoded[i] for i in order[place : place + batch]], n_ctx)


def text_at(tokens, batch, n_ctx, seed, step):
    """(tokens, labels) of windows of plain text, in which each token but the first counts."""
    rows, _ = data.batch_at(tokens, step, batch, n_ctx, seed)
    labels = rows.clone()
    labels[:, 0] = IGNORE
    return rows, labels
