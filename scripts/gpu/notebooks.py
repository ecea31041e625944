"""The solved labs under nbval: with NCCL where there are GPUs, else in rehearsal."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from parts import LeftOut

ROOT = Path(__file__).resolve().parent.parent.parent
FIRST = ("02", "03", "06", "08", "12")
LEFT = 20  # seconds: no lab begins with less
LIMIT = 590  # of the part


def labs(job):
    """Count the cells of each lab that pass; a rehearsal takes the first lab alone."""
    if not importlib.util.find_spec("nbval"):
        raise LeftOut("nbval is not installed")
    books = sorted((ROOT / "solutions").glob("[0-9]*.ipynb"))
    if job["rehearsal"]:
        books = books[:1]
    books.sort(key=lambda book: (book.name[:2] not in FIRST, book.name))
    started, shown, wrong = time.monotonic(), {}, []
    for book in books:
        left = LIMIT - (time.monotonic() - started)
        if left < LEFT:
            break
        passed, failed, text = cells(book, left)
        shown[book.stem] = f"{passed} cells passed" + f", {failed} failed" * bool(failed)
        print(text, flush=True)
        if failed or not passed:
            wrong.append(f"{book.stem}: {shown[book.stem]}\n{text[-1500:]}")
    assert not wrong, "\n".join(wrong)
    return shown


def cells(book, seconds):
    """Return (cells that passed, that failed, pytest's words) of one notebook."""
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "-p", "no:cacheprovider",
               "-p", "no:xdist", f"--timeout={seconds:.0f}", str(book)]
    if not importlib.util.find_spec("pytest_timeout"):
        command.remove(f"--timeout={seconds:.0f}")
    try:
        text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, text=True, timeout=seconds,
                              env={**os.environ, "PYTEST_ADDOPTS": ""}).stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode() + f"\nnot done after {seconds:.0f} s: 1 failed"
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed)", text)}
    return counted.get("passed", 0), counted.get("failed", 0), text
