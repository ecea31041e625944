"""The labs in their order, and what each of them contains: found by name, never registered."""

import difflib
import functools
import importlib
import importlib.util
from pathlib import Path

from ranklab.course import index

STEMS = (
    "00_ranks", "01_baseline", "02_collectives", "03_data_parallel", "04_ddp", "05_horovod",
    "06_zero", "07_fsdp", "08_tensor_parallel", "09_pipeline_parallel", "10_context_parallel",
    "11_expert_parallel", "12_hybrid", "13_planner", "14_resilience", "15_cluster", "16_clinic",
)
TOUR = "tour"  # the notebook to begin with: it asks for nothing, so it is no lab and has no number


def idea(stem):
    """Return the name of the lab's modules: "02_collectives" -> "collectives"."""
    return stem.partition("_")[2]


def find_stem(text):
    """Find the stem that `text` means: "02", "2", "collectives" or "02_collectives".

    Raises: ValueError with the list of labs
    """
    text = str(text)
    for stem in STEMS:
        number, _, name = stem.partition("_")
        if text in (stem, number, str(int(number)), name):
            return stem
    raise ValueError(f"no lab is called {text!r}; the labs are {', '.join(STEMS)}")


def find_notebook(text):
    """Return the name of the notebook that `text` means: the tour's, or the stem of a lab.

    Raises: ValueError with the list of labs
    """
    return TOUR if text == TOUR else find_stem(text)


def written():
    """List the stems whose checks exist, in order."""
    return tuple(s for s in STEMS if importlib.util.find_spec(f"ranklab.checks.{idea(s)}"))


def checks_of(stem):
    """Import and return the module with the lab's EXERCISES and PREDICTIONS."""
    return importlib.import_module(f"ranklab.checks.{idea(stem)}")


@functools.cache
def find_exercise(name):
    """Find the Exercise of this name; return None where there is none.

    The checks of other labs are not imported, if the index knows its lab.
    """
    return _find("EXERCISES", name)


@functools.cache
def find_prediction(name):
    """Find the Prediction of this name; return None where there is none."""
    return _find("PREDICTIONS", name)


def _find(kind, name):
    # The lab that the index names comes first (False before True): the rest stay unloaded.
    for stem in sorted(written(), key=lambda stem: name not in index.entries().get(stem, ())):
        for item in getattr(checks_of(stem), kind):
            if item.name == name:
                return item
    return None


def names():
    """List the names of all exercises and predictions, lab by lab."""
    return [name for stem in written() for name in names_of(stem)]


def near(name, n=3):
    """Return the names of at most `n` exercises and predictions spelt like `name`."""
    return difflib.get_close_matches(str(name), names(), n)


def names_of(stem):
    """List the names of the lab's exercises and predictions; none for the tour."""
    if stem == TOUR:
        return []
    if stem in index.entries():
        return list(index.entries()[stem])
    checks = checks_of(stem)
    return [item.name for item in (*checks.EXERCISES, *checks.PREDICTIONS)]


def repository(start=None):
    """Find the nearest folder upwards that holds labs/source; return None outside a checkout."""
    start = Path(start or Path.cwd()).resolve()
    return next((p for p in (start, *start.parents) if (p / "labs" / "source").is_dir()), None)


def source(stem):
    """Read the text of labs/source/ for `stem`; return "" outside a checkout."""
    return _text(f"labs/source/{stem}.py")


def deck(stem):
    """Read the text of the deck of `stem`; return "" outside a checkout."""
    return _text(f"slides/{stem}.md")


def _text(name):
    root = repository() or repository(__file__)
    path = root and root / name
    return path.read_text(encoding="utf-8") if path and path.exists() else ""


def stem_of(name):
    """Find the lab that asks for the exercise or prediction `name`; return None if no lab does."""
    return next((stem for stem in written() if name in names_of(stem)), None)
