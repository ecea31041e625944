"""begin, catch_up, status: a lab goes on whatever was skipped, also after a restart.

    begin("02_collectives")     # in the lab's first cell
    catch_up()                  # after a restart; catch_up("4.4") goes to that heading
    status()                    # what passed, and what is next

From `begin` on, each cell gets the names that it uses and that no cell has bound yet, just before
it runs: an exercise's from the learner's cell that passed, or else from the library; other names
from the lab's cells above. Only a Jupyter kernel does this; elsewhere `begin` does nothing.
"""

import ast
import builtins
import contextlib
import re
import sys

from ranklab.course import labs, progress
from ranklab.course.cells import Statement, find_lab, needs, statements_of, to_bind
from ranklab.course.check import is_stub
from ranklab.course.outline import is_passed, outline
from ranklab.course.status import status as table

_session = None  # of this kernel


def begin(stem):
    """Make the lab `stem` run whatever is skipped, and `%%ranks` known; see above."""
    global _session
    shell = _kernels_shell()
    if shell is None:
        return
    is_first = _session is None
    if is_first:
        from ranklab.magic import register

        register(shell)
        _session = Session(shell, labs.find_stem(stem))
        shell.events.register("pre_run_cell", lambda info: _session.before(info))
    _session.stem = labs.find_stem(stem)
    asked, records = outline(_session.stem), progress.load()
    passed = sum(is_passed(one.name, records) for one in asked)
    if passed and is_first:
        print(f"{passed} of {len(asked)} passed. catch_up() brings your answers back and says "
              "where to go on; status() lists all.")


def catch_up(place=None):
    """Bring back the learner's answers that passed, and take the library's for the others, up to
    the heading `place`, "4.4".

    place  also an exercise; by default the first that has not passed, after the last that has
    """
    if _session is None:
        print("Run the first cell of the lab, then this one again.")
        return
    lab, records = _session.lab(), progress.load()
    if lab is None:
        print(f"The notebook {_session.stem}.ipynb was not found, so your cells have to be run "
              "from the top. A function that no cell defines comes from the library.")
        return
    number = _first_open(lab, records) if place is None else lab.find(str(place))
    if number is None:
        print(f"No heading or exercise is called {place!r}; the headings are "
              f"{', '.join(dict.fromkeys(cell.headings[-1] for cell in lab.cells))}.")
        return
    section = lab.section(number)
    wanted = {one for cell in lab.cells[:number] for one in cell.defines & lab.exercises.keys()}
    wanted |= needs([one for cell in section for one in cell.statements])
    said = _session.supply({name for name in wanted if not _session.has(name)}, number)
    _session.last = number - 1
    goal = f"Go on at {_link(section[0].headings[-1])}." if section else "All of it is passed."
    _display(" ".join([*said, goal]))


def status(lab=None):
    """Show what passed in this lab and what comes next, with links; or the table of another lab."""
    stem = _session and _session.stem
    if stem is None or (lab is not None and labs.find_stem(lab) != stem):
        print(table(lab))
        return
    records, found, asked = progress.load(), _session.lab(), outline(stem)
    rows = []
    for one in asked:
        entry = records.get(one.name, progress.NEW)
        rows.append(f"| {_link(_heading(found, one))} | `{one.name}` | {entry['state']} |")
    coming = next((one for one in asked if not is_passed(one.name, records)), None)
    passed = sum(is_passed(one.name, records) for one in asked)
    after = f"Next: {_link(_heading(found, coming))}, `{coming.name}`." if coming else ""
    _display(f"**{stem}**: {passed} of {len(asked)} passed. {after}\n\n| | | |\n|---|---|---|\n"
             + "\n".join(rows), table(stem))


class Session:
    """What `begin` keeps in a kernel. last: the number of the lab's cell that ran last."""

    def __init__(self, shell, stem):
        self.shell, self.stem, self.last = shell, stem, -1

    def lab(self):
        """The lab as its file is now; None where it can't be found."""
        return find_lab(self.stem, self.shell.user_ns.get("__vsc_ipynb_file__"))

    def has(self, name, may_be_stub=()):
        """True when a cell can use `name`: it is bound, and no exercise that was left empty."""
        if name not in self.shell.user_ns:
            return hasattr(builtins, name)
        return name in may_be_stub or not (
            name in labs.names_of(self.stem) and is_stub(self.shell.user_ns[name]))

    def before(self, info):
        """Bind what the cell that is about to run needs and what is not there."""
        statements = statements_of(info.raw_cell)
        own = {name for one in statements for name in one.binds | one.checks}
        missing = {name for name in needs(statements) if not self.has(name, own)}
        lab = self.lab()
        place = lab.place_of(info.raw_cell, getattr(info, "cell_id", None), self.last) if lab else 0
        if said := missing and self.supply(missing, place, lab):
            print(_plain(" ".join(said)))
        self.last = place

    def supply(self, names, until, lab=None):
        """Bind `names`, as far as they are the lab's, by what stands above the cell `until`; give
        sentences that say whose they are.
        """
        records, lab = progress.load(), lab or self.lab()
        exercises = {each.name: each for each in labs.checks_of(self.stem).EXERCISES}
        if lab:
            own = {name: records[name].get("cell", "") for name in exercises
                   if is_passed(name, records)}
            kept = to_bind(names, lab.statements(until, own), self.has)
        else:
            kept = []
        # An exercise that stands below, or whose lab is not at hand
        bound = {name for one in kept for name in one.binds}
        kept += [Statement(frozenset({name}), answers=name)
                 for name in names & exercises.keys() - bound]
        yours = self._run(kept, exercises)
        whose = {name for one in kept for name in one.binds & exercises.keys()}
        here = {name for name in names - whose if name in self.shell.user_ns}
        said = (("Yours, as you passed it: ", whose & yours), ("The library's: ", whose - yours),
                ("From the cells above: ", here))
        return [f"{text}{', '.join(f'`{name}`' for name in sorted(found))}."
                for text, found in said if found]

    def _run(self, statements, exercises):
        """Run them in the notebook, without output; returns the exercises whose answer is the
        learner's.

        A name that was there keeps its value. Where a statement raises, the cell that needs it will
        say what is missing.
        """
        from IPython.utils.capture import capture_output

        space, failed, yours = self.shell.user_ns, set(), set()
        there = {name: space[name] for one in statements for name in one.binds
                 if name in space and self.has(name)}
        with capture_output():
            for one in statements:
                if one.node is None or one.answers in failed:
                    space[one.answers] = exercises[one.answers].answer
                    continue
                try:
                    exec(self._compiled(one), space)
                    yours |= {one.answers}
                except Exception:
                    failed |= {one.answers} - {""}
                    with contextlib.suppress(KeyError):
                        space[one.answers] = exercises[one.answers].answer
        space.update(there)
        return yours - failed

    def _compiled(self, statement):
        file = self.shell.compile.cache(statement.text)
        return compile(ast.Module([statement.node], []), file, "exec")


def _first_open(lab, records):
    """The number of the cell at which to go on; the end where everything is passed."""
    asked = [one.name for one in outline(lab.stem) if one.name in lab.exercises]
    passed = [name for name in asked if is_passed(name, records)]
    after = asked.index(passed[-1]) + 1 if passed else 0
    still = [name for name in asked[after:] + asked[:after] if name not in passed]
    return lab.find(still[0]) if still else len(lab.cells)


def _heading(lab, asked):
    """The title under which an exercise or prediction stands."""
    if lab is None:
        return asked.section
    return next((cell.headings[-1] for cell in lab.cells if f"{asked.name}=..." in cell.source
                 or asked.name in cell.defines), asked.section)


def _link(title):
    """A link to a heading. JupyterLab names a heading by its text, with "-" for each space."""
    text = _plain(title)
    return f"[{text}](<#{text.replace(' ', '-')}>)"


def _plain(text):
    """Markdown of ours without marks and links."""
    return re.sub(r"\[(.*?)\]\(<.*?>\)", r"\1", text).replace("`", "").replace("**", "")


def _display(text, plain=None):
    """Show Markdown in a notebook, and plain text where that can't be shown."""
    plain = plain or _plain(text)
    if _kernels_shell() is None:
        print(plain)
        return
    from IPython.display import display

    display({"text/plain": plain, "text/markdown": text}, raw=True)


def _kernels_shell():
    """The IPython of this Jupyter kernel; None in a terminal, a script or a class's grader."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None
