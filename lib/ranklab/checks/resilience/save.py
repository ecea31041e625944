"""The check of atomic_save: processes that die in the middle of it, and the order of its calls."""

import io
import os
import shutil
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import torch

from ranklab.checks.dying import Reduced, die, in_child, watched
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect, on_groups
from ranklab.checks.prover import Slip
from ranklab.checks.trial import called_with
from ranklab.resilience import atomic_save

OLD, NEW = ({"step": step, "w": torch.full((5000,), float(step))} for step in (1, 2))
BESIDE = ("Write to another file in the same folder. When it is complete, call os.replace(it, "
          "path): a name changes all at once.")
SEEN = "Call os.fsync and os.replace by these names: the check watches them."
LEFT = ("On any exception, remove the temporary file and re-raise. Always use the same temporary "
        "name for this path, so that the next save overwrites what a killed one left.")
IN_PLACE = "the old file is overwritten in place"
CLOSE = ("Close each descriptor that os.open or tempfile.mkstemp returns: otherwise no file can "
         "be opened after a thousand saves.")
SAME_FOLDER = ("If the temporary file is on another file system, os.replace raises, and a move "
               "becomes a copy: write in the folder of `path`.")
SYNC = ("The system keeps written bytes in memory for a while: call os.fsync(file.fileno()) before "
        "os.replace.")
SYNC_FIRST = ("If the power fails in between, the new name is there but its bytes are not: call "
              "os.fsync first.")
FLUSH = ("os.fsync syncs only what has reached the system: first torch.save, then file.flush(), "
         "then os.fsync.")
SYNC_FOLDER = ("The new name is an entry in the folder, so sync the folder as well: "
               "os.open(folder, os.O_RDONLY), os.fsync, os.close.")
FOLDER_LAST = ("The new name is an entry in the folder: os.fsync the folder after the name has "
               "changed.")
UNTOUCHED = "Never write to `path` itself, and never remove it."
RAISE = "The run must know that it has no new checkpoint."
MEET = ("Each path needs its own temporary file: put the whole name of `path` into its name, and "
        "remove no other file. with_suffix drops the .10.")


def content(path):
    """Describe the file at `path`: "the old one", "the new one", or what is there instead."""
    try:
        data = torch.load(path, weights_only=False)
        return next((name for name, state in (("the old one", OLD), ("the new one", NEW))
                     if data["step"] == state["step"] and torch.equal(data["w"], state["w"])),
                    "another one")
    except FileNotFoundError:
        return "not there"
    except Exception as error:
        return f"torn: torch.load raises {type(error).__name__}"


def _fresh(atomic_save):
    path = Path(tempfile.mkdtemp(), "rank.10")
    atomic_save(OLD, path)
    return path


def _holds(where, path, right, hint, folder_hint=LEFT):
    state, names = content(path), sorted(os.listdir(path.parent))
    expect(state == right, f"{where}: the file is {state}, not {right}", hint)
    expect(names == [path.name], f"{where}: the folder has {names}", folder_hint)


def _plain(atomic_save):
    path = _fresh(atomic_save)
    _holds("a first save", path, "the old one", BESIDE, folder_hint="")
    node = path.stat().st_ino
    with called_with("a str"):
        atomic_save(NEW, str(path))
    _holds("a second save, to a str", path, "the new one", BESIDE, folder_hint="")
    expect(path.stat().st_ino != node, IN_PLACE, "A kill in the "
           f"middle leaves a torn file. {BESIDE}")
    folder = os.getcwd()
    os.chdir(path.parent)
    try:
        with called_with("a name alone"):
            atomic_save(OLD, path.name)
    finally:
        os.chdir(folder)
    _holds('a save to "rank.10" alone', path, "the old one",
           "A file name without a folder belongs in os.getcwd().")
    free = _free_descriptor(path)
    for _ in range(8):
        atomic_save(OLD["w"], path)
    expect(_free_descriptor(path) < free + 8, "after 8 saves 8 more files are open", CLOSE)
    expect(torch.equal(torch.load(path), OLD["w"]),
           "a single tensor as the state is different in the file",
           "torch.save takes any state.")


def _free_descriptor(path):
    with open(path, "rb") as file:
        return file.fileno()


def _order(atomic_save):
    """Check the order of the calls, so that a power failure does no harm either."""
    path, calls = _fresh(atomic_save), []

    def note(name, *args, src_dir_fd=None, **more):
        first = (*args, *more.values())[0]
        status = os.stat(getattr(first, "fileno", lambda: first)(), dir_fd=src_dir_fd)
        parent = None
        if name in ("replace", "rename"):
            parent = os.stat(Path(first).parent, dir_fd=src_dir_fd).st_ino
        calls.append((status.st_ino, status.st_size, parent))

    with watched(note):
        atomic_save(NEW, path)
    node, size, folder = path.stat().st_ino, path.stat().st_size, path.parent.stat().st_ino
    renamed = next((i for i, call in enumerate(calls) if call[2] and call[0] == node), None)
    expect(renamed is not None, "no os.replace brings the file to `path`", SEEN)
    expect(calls[renamed][2] == folder, "the file is renamed from another folder", SAME_FOLDER)
    synced = [(i, call[1]) for i, call in enumerate(calls) if call[0] == node and not call[2]]
    early = [nbytes for i, nbytes in synced if i < renamed]
    expect(synced, "the file is never synced", SYNC)
    expect(early, "the file is synced after it was renamed", SYNC_FIRST)
    expect(size in early, (f"at os.fsync, only {max(early, default=0):,} of {size:,} bytes are "
                           "there"),
           FLUSH)
    folders = [i for i, call in enumerate(calls) if call[0] == folder]
    expect(folders, "the folder is never synced", SYNC_FOLDER)
    expect(max(folders) > renamed, "the folder is synced before the name changes", FOLDER_LAST)


def _killed(atomic_save):
    """Kill a save before each call, after several numbers of bytes, and while it pickles."""
    path, calls = _fresh(atomic_save), []
    with watched(lambda name, *_, **__: calls.append(name)):
        atomic_save(NEW, path)
    size = path.stat().st_size
    ways = {f"after {most:,} bytes": (partial(atomic_save, NEW), most)
            for most in (0, 1000, size // 2, size - 1)}
    ways["while it pickles"] = partial(atomic_save, {**NEW, "x": Reduced(die)}), None
    for number, name in enumerate(calls):
        ways[f"before os.{name}, call {number + 1}"] = partial(_until, atomic_save, number), None
    for way, (save, most) in ways.items():
        path = _fresh(atomic_save)
        end, state = in_child(partial(save, path), most), content(path)
        expect(end == "killed", f"killed {way}: it {end}",
               "Write the file in this process, and write it again in each call.")
        expect(state in ("the old one", "the new one"), f"killed {way}: the file is {state}",
               f"{UNTOUCHED} {BESIDE}")
        atomic_save(NEW, path)
        _holds(f"killed {way}, and saved again", path, "the new one", LEFT)


def _until(atomic_save, number, path):
    numbers = iter(range(number))
    with watched(lambda *_, **__: next(numbers, None) is None and die()):
        atomic_save(NEW, path)


def _errors(atomic_save):
    path = _fresh(atomic_save)
    size = path.stat().st_size
    ways = {f"a disk that is full after {most:,} bytes": (NEW, most)
            for most in (0, size // 2, size - 1)}
    ways["a state that can't be pickled"] = {"f": lambda: None}, None
    for way, (state, most) in ways.items():
        end = in_child(partial(atomic_save, state, path), most, dies=False)
        expect(end == "raised", f"{way}: nothing is raised", RAISE)
        _holds(way, path, "the old one", BESIDE)


def _at_once(atomic_save):
    """Run two saves in one folder at once: the second begins and ends during the first."""
    path = _fresh(atomic_save)
    neighbour, where = path.with_name("rank.1"), "saves to rank.1 and rank.10 at once"
    try:
        atomic_save({**NEW, "x": Reduced(partial(atomic_save, OLD, neighbour))}, path)
    except FileNotFoundError as error:
        raise Mistake(f"{where}: {os.path.basename(str(error.filename))} is gone", MEET) from None
    files = content(neighbour), content(path)
    expect(files == ("the old one", "the new one"), f"{where}: in them {' and '.join(files)}", MEET)


def check_atomic_save(atomic_save):
    with tempfile.TemporaryDirectory() as home:
        for part, holds in PARTS:
            on_groups(partial(_in, home, part), atomic_save, 1)
            yield holds


def _in(home, part, atomic_save, ranks):
    tempfile.tempdir = home  # of this rank, which ends with the launch
    yield partial(part, atomic_save)


PARTS = (
    (_plain, "torch.load reads the new state; a str, a Path, a name alone; nothing else is left"),
    (_order, "written beside, synced, renamed, and the folder synced: in this order"),
    (_killed, "killed after some bytes, while it pickles, before each call: the old one or the "
              "new, and the next save cleans up"),
    (_errors, "a full disk, a state that can't be pickled: an error, the old file, nothing left"),
    (_at_once, "two saves at once in one folder do not interfere"),
)


NAME, PATH = 'f".{path.name}.part"', "    path = Path(path)\n"
FLUSHED, SYNCED = "            file.flush()", "            os.fsync(file.fileno())"
AFTER = ("    folder = os.open(path.parent, os.O_RDONLY)\n    try:\n        os.fsync(folder)\n"
         "    finally:\n        os.close(folder)\n")
RENAME, SAVED = "        os.replace(part, path)\n", "torch.save(state, file)"
REMOVE = "        part.unlink(missing_ok=True)\n"
SAVE = Exercise(
    atomic_save, check_atomic_save, mistakes=(
        Slip(IN_PLACE, (f"path.with_name({NAME})", "path"),
             (RENAME, "        shutil.copyfile(part, path)\n        part.unlink()\n"),
             shutil=shutil),
        Slip(MEET, (f"with_name({NAME})", 'with_suffix(".tmp")'), (NAME, '"checkpoint.part"'),
             (PATH, f"{PATH}    for old in path.parent.glob('.*.part'):\n        old.unlink()\n")),
        Slip(LEFT, (NAME, "f'.{path.name}.{os.urandom(4).hex()}.part'"),
             (NAME, "f'.{path.name}.{os.getpid()}.part'"), (REMOVE, "        pass\n")),
        Slip(SAME_FOLDER, (f"path.with_name({NAME})", "Path(tempfile.mkdtemp(), path.name)"),
             tempfile=tempfile),
        Slip(FLUSH, (FLUSHED, "            #", SAVED, "torch.save(state, whole := io.BytesIO())\n"
              "            whole.seek(0)\n            shutil.copyfileobj(whole, file, 1000)"),
             io=io, shutil=shutil),
        Slip(SYNC, (SYNCED, "            #")),
        Slip(SYNC_FIRST, (SYNCED, "            #", RENAME, f"{RENAME}        with open(path) as "
                          "done:\n            os.fsync(done.fileno())\n")),
        Slip(SYNC_FOLDER, (AFTER, "")),
        Slip(FOLDER_LAST, (AFTER, "", RENAME, textwrap.indent(AFTER, "    ") + RENAME)),
        Slip(UNTOUCHED, (RENAME, "        path.unlink(missing_ok=True)\n"
                         "        os.rename(part, path)\n")),
        Slip(RAISE, (f"{REMOVE}        raise\n", f"{REMOVE}        return\n")),
        Slip(CLOSE, (AFTER, "    os.fsync(os.open(path.parent, os.O_RDONLY))\n")),
        Slip("atomic_save(state=<(5000,), float32>", (SAVED, "torch.save(dict(state), file)")),
        Slip("called with a str", (PATH, "")),
    ), hints=(
        "Which system call changes a whole file at once, or not at all?",
        "Write to another file in the same folder, then give it the name with os.replace. Its "
        "bytes must be on disk before that, and the folder's entry afterwards. What if writing "
        "raises?",
        "part = path.with_name(f'.{path.name}.part'); torch.save, file.flush(), "
        "os.fsync(file.fileno()); os.replace(part, path); then os.fsync of os.open(path.parent, "
        "os.O_RDONLY). On any error: part.unlink(missing_ok=True), raise",
    ))
