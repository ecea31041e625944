"""What each mistake shows: tables/{exercise}.json, built by running each mistake once.

A table holds {launch: {sentence: [digest of each program, or null]}}, of the first launch that
shows the mistake, and a hash of all code that it depends on, without comments and docstrings.
"""

import ast
import functools
import hashlib
import importlib
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from ranklab.basics.files import write_whole
from ranklab.basics.imports import imported
from ranklab.checks.exercise import Exercise
from ranklab.checks.prover import digest
from ranklab.checks.trial import unwatched

TABLES = Path(__file__).with_name("tables")
TELLING = {"facts.py", "proof.py", "tables.py", "__init__.py"}  # of this package: not what is seen


class PassingMistake(Exception):
    """A mistake that no stage sees, or an answer that is refused."""


def path_of(proof):
    return TABLES / f"{proof.name}.json"


@functools.cache
def _read(path):
    return json.loads(path.read_text())


def load(proof):
    """Return {launch: {sentence: [digest, ...]}}; {} where it is not built yet."""
    path = path_of(proof)
    return _read(path)["shows"] if path.exists() else {}


def is_current(proof):
    path = path_of(proof)
    return path.exists() and json.loads(path.read_text())["of"] == dependencies(proof)


def dependencies(proof):
    """Return the hash of the code of all files that the check imports, and those import in turn."""
    start = Path(importlib.import_module(proof.module).__file__)
    files = sorted(imported([start]), key=str)
    code = "\n".join(_code_of(path) for path in files
                     if not (path.parent == TABLES.parent and path.name in TELLING))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@functools.cache
def _code_of(path):
    """Return the code of a file without what a reader adds to it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and (
                isinstance(node.body[0], ast.Expr)
                and isinstance(getattr(node.body[0].value, "value", None), str)):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)  # not ast.dump: that differs between Pythons


def build_all(proofs):
    """Yield (proof, pairs of its sentences that look alike), a few of them at a time.

    Raises: PassingMistake at the end, when all others are built.
    """
    from ranklab.basics.machine import cores  # psutil: only whoever builds needs it

    if not proofs:
        return
    errors = []
    with ProcessPoolExecutor(min(4, cores(), len(proofs)), get_context("spawn")) as pool:
        tasks = [pool.submit(_build_named, proof.module, proof.name) for proof in proofs]
        for proof, task in zip(proofs, tasks):
            try:
                yield proof, task.result()
            except PassingMistake as error:
                errors.append(str(error))
    if errors:
        raise PassingMistake("\n".join(errors))


def _build_named(module, name):
    return build(next(item for item in vars(importlib.import_module(module)).values()
                      if isinstance(item, Exercise) and item.name == name))


def build(proof):
    """Write the table.

    Returns: pairs of sentences that look alike.
    Raises: PassingMistake, where no stage sees one, or the answer itself is refused.
    """
    text = text_of(proof)
    TABLES.mkdir(exist_ok=True)
    write_whole(path_of(proof), text)
    _read.cache_clear()
    return alike(proof)


def text_of(proof):
    """Run each mistake up to the first launch that shows it; return the table.

    What differs from the table that is there by rounding alone stays as it is: so another CPU
    changes no byte.
    """
    code = dependencies(proof)  # first: an edit during the build leaves the table stale
    old, shows = load(proof), {}
    with unwatched():
        for stage, ranks, _ in proof.launches():
            if difference := proof.difference(stage, ranks, proof.plain_answer()):
                raise PassingMistake(f"{proof.name}: its own answer is refused: "
                                     f"{proof.named(stage, ranks, difference).what}")
            if errors := proof.errors_of_what_is_right(stage, ranks):
                raise PassingMistake(f"{proof.name}: what is right raises {errors[0]}; a check "
                                     "may only ask for a ValueError")
        for slip in proof.mistakes:
            for number, fn in enumerate(slip.functions(proof.answer)):
                key, stage, shown = _first_difference(proof, fn)
                if shown is None:
                    raise PassingMistake(f"{proof.name}: no stage sees a mistake (its program "
                                         f"{number}): {slip.says}")
                before = old.get(key, {}).get(slip.says, [])
                if number < len(before) and _is_same(before[number], shown, stage):
                    shown = before[number]
                shows.setdefault(key, {}).setdefault(slip.says, []).append(shown)
    keys = [proof.key(stage, ranks) for stage, ranks, _ in proof.launches()]
    return _text(code, {key: shows[key] for key in keys if key in shows})


def _first_difference(proof, fn):
    for stage, ranks, _ in proof.launches():
        if difference := proof.difference(stage, ranks, fn):
            return proof.key(stage, ranks), stage, digest.of_difference(difference)
    return "", None, None


def _is_same(x, y, stage):
    return digest.is_alike(x, y, digest.tolerance_of(stage))


def _text(code, shows):
    """A line for each sentence: a diff shows which mistake now shows something else."""
    launches = []
    for key, of_launch in shows.items():
        lines = [f"  {json.dumps(says)}: {json.dumps(each, separators=(',', ':'))}"
                 for says, each in of_launch.items()]
        launches.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
    return f'{{"of": "{code}",\n"shows": {{\n' + ",\n".join(launches) + "\n}}\n"


def alike(proof):
    """Return the pairs of sentences that show the same: a learner is told neither."""
    stages = {proof.key(stage, ranks): stage for stage, ranks, _ in proof.launches()}
    pairs = set()
    for key, of_launch in load(proof).items():
        programs = [(says, each) for says, digests in of_launch.items() for each in digests]
        for i, (says, one) in enumerate(programs):
            pairs |= {(says, sentence) for sentence, two in programs[:i]
                      if sentence != says and _is_same(one, two, stages[key])}
    return sorted(pairs)
