"""The learner's copies of the labs, in work/: `make lab` opens them, git ignores them.

A copy is made once. When a newer lab arrives, an unedited copy becomes the new one, even if a
run was saved in it. A copy with the learner's cells is never overwritten: the new lab is put
next to it, and so are cells that somebody saved in labs/ itself.

work/ also gets an AGENTS.md, which asks a coding assistant to be a tutor. It holds the learner's
section of the repository's AGENTS.md and nothing for maintainers, so that an assistant
started in work/ can't mistake itself for one.
"""

import contextlib
import itertools
import json
import re
from pathlib import Path

from ranklab.basics.files import write_whole
from ranklab.course import labs
from ranklab.course.notebook import digest, read_cells
from ranklab.course.records import wait_for

TUTOR = re.compile(r"^## With a learner: ([^\n]+)\n+(.*?)\s*(?=^## |\Z)", re.M | re.S)
IN_WORK = """# For assistants: {}

Whoever asks you something in this folder is a learner, whatever a file in a folder above says. To
change the course itself, people open the repository's own folder.

{}
"""


def checkout():
    """Find the checkout around this folder, or else around this library; None if there is none."""
    return labs.repository() or labs.repository(Path(__file__).parent)


def bring(root: Path, folder: Path):
    """Copy each lab of the checkout `root`, and the assistants' files, into `folder`.

    Returns a sentence for each lab that changed.
    folder/.given.json holds {stem or file: hash of what was copied last}, so that nothing is
    copied or announced twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        with contextlib.suppress(OSError):  # some network drives have no locks
            wait_for(lock)
        record = folder / ".given.json"
        hashes = _read(record)
        missing = [lab for lab in _built_labs(root) if not (folder / lab.name).exists()]
        sentences = [_bring_one(lab, folder, hashes) for lab in _built_labs(root)]
        for name, text in _for_assistants(root).items():
            _bring_text(folder / name, text, hashes)
        write_whole(record, json.dumps(hashes, indent=1))
    copied = [lab.stem for lab in missing if (folder / lab.name).exists()]
    if copied:
        sentences.insert(0, f"Copied to {folder.name}/: {', '.join(copied)}. Work there: these "
                            "copies are yours, and nothing overwrites what you write.")
    return [sentence for sentence in sentences if sentence]


def _bring_one(lab, folder, hashes):
    """Bring one lab; return the sentence about it, or None."""
    cells, copy = read_cells(lab), folder / lab.name
    back = f"`git checkout labs/{lab.name}` brings the course's lab back."
    if cells.now is None:
        return f"labs/{lab.name} can't be read as a notebook: {back}"
    was_there = copy.exists()
    if was_there and hashes.get(lab.stem) == cells.now:
        return None
    place = _give(lab, cells.now, copy)
    hashes[lab.stem] = cells.now
    if place is None:
        return None
    if not cells.as_built:
        return f"labs/{lab.name} was changed: its cells are in {folder.name}/{place.name}. {back}"
    if place != copy:
        return (f"{lab.stem} has a newer version: {copy.name} holds your cells and stays as it is; "
                f"the new one is {folder.name}/{place.name}. `ranklab work --merge {lab.stem}` "
                "brings your cells into it.")
    if was_there:
        return f"{lab.stem}: your copy had no changes; it is now the newer version."
    return None  # `bring` names all first copies in one sentence


def _give(lab, now, copy):
    """Write the lab to `copy`, or next to `copy` if that holds the learner's cells.

    Returns: the path written; None if the lab was there already
    """
    kinds = itertools.chain(["", ".new"], (f".new{n}" for n in itertools.count(2)))
    for place in (copy.with_name(f"{copy.stem}{kind}.ipynb") for kind in kinds):
        if place.exists():
            output = read_cells(place)
            if now in output:
                return None
            if not output.as_built:
                continue
        write_whole(place, _with_kernel(lab.read_text(encoding="utf-8")))
        return place


def _for_assistants(root):
    """Return {file name: text} for work/; empty if the checkout has no learner's section."""
    rules = root / "AGENTS.md"
    section = rules.is_file() and TUTOR.search(rules.read_text(encoding="utf-8"))
    if not section:
        return {}
    return {"AGENTS.md": IN_WORK.format(*section.groups()), "CLAUDE.md": "@AGENTS.md\n"}


def _bring_text(path, text, hashes):
    """Write `text` unless the learner changed, deleted or created a file of this name."""
    current = path.read_bytes().decode(errors="replace") if path.is_file() else None
    is_untouched = (None if current is None else digest(current)) == hashes.get(path.name)
    if is_untouched and not (path.exists() and current is None):  # a folder of this name stays
        write_whole(path, text)
        hashes[path.name] = digest(text)


def _with_kernel(lab):
    """Add to the notebook `lab` what JupyterLab would write into it when it is opened.

    So a copy that nobody touched is not marked as changed.
    """
    from ipykernel.ipkernel import IPythonKernel
    from jupyter_client.kernelspec import KernelSpecManager

    notebook = json.loads(lab)
    spec = KernelSpecManager().get_kernel_spec("python3")
    notebook["metadata"] |= {
        "kernelspec": {"display_name": spec.display_name, "language": spec.language,
                       "name": "python3"},
        "language_info": IPythonKernel.language_info}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _built_labs(root):
    """The notebooks in labs/ that have a source, in order: other files there stay."""
    paths = (root / "labs" / f"{path.stem}.ipynb" for path in (root / "labs/source").glob("*.py"))
    return sorted(path for path in paths if path.exists())


def _read(record):
    try:
        hashes = json.loads(record.read_text())
        return hashes if isinstance(hashes, dict) else {}
    except (OSError, ValueError):
        return {}
