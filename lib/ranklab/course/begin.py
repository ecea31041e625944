"""begin, catch_up, status: a lab goes on no matter what was skipped, even after a restart.

    begin("02_collectives")     # in the lab's first cell
    catch_up()                  # after a restart; catch_up("4.4") goes to that heading
    status()                    # what passed, and what is next

After `begin`, just before a cell runs, the names that it uses and that no cell has bound yet are
bound: an exercise from the learner's cell that passed, or else from the library; other names
from the lab's cells above. This needs a Jupyter kernel; elsewhere `begin` does nothing.
"""

import builtins
import re
import sys

from ranklab.course import labs, progress, spine
from ranklab.course.cells import Statement, define, find_lab, needs, statements_of, to_bind
from ranklab.course.check import is_stub
from ranklab.course.outline import first_open, is_passed, outline
from ranklab.course.show import kernels_shell, notebooks_display
from ranklab.course.status import status as table
from ranklab.engine.forkserver import start_fork_server

_sessions = []  # the one of this kernel, from `begin` on


def begin(stem):
    """Make the lab `stem` run no matter which cells are skipped, and load `%%ranks`; see above."""
    shell, stem = kernels_shell(), labs.find_stem(stem)
    if shell is None:
        return
    if _sessions:
        _sessions[0].stem = stem
        return
    from ranklab.magic import register

    if sys.platform != "win32":
        start_fork_server()  # the learner reads meanwhile; every lab soon launches
    register(shell)
    _sessions.append(Session(shell, stem))
    shell.events.register("pre_run_cell", _sessions[0].before)
    items, records = outline(stem), progress.load()
    count = sum(is_passed(one.name, records) for one in items)
    if count:
        print(f"{count} of {len(items)} passed. catch_up() brings your answers back and says "
              "where to go on; status() lists all.")


def catch_up(place=None):
    """Restore the answers that passed, and use the library's for the others, up to `place`.

    place: a heading, "4.4", or an exercise or a prediction; by default the first that has not
           passed, after the last that has
    """
    if not _sessions:
        print("Run the first cell of the lab, then this one again.")
        return
    session = _sessions[0]
    lab = session.lab()
    if lab is None:
        print(f"The notebook {session.stem}.ipynb was not found, so your cells have to be run "
              "from the top. A function that no cell defines comes from the library.")
        return
    number = _first_open(lab, progress.load()) if place is None else lab.find(str(place))
    if number is None:
        print(f"No heading or exercise is called {place!r}; the headings are "
              f"{', '.join(dict.fromkeys(cell.headings[-1] for cell in lab.cells))}.")
        return
    section = lab.section(number)
    names = {name for cell in lab.cells[:number] for name in cell.defines & lab.exercises.keys()}
    names |= needs([one for cell in section for one in cell.statements])
    sentences = session.supply(session.missing(names, number), number)
    session.last = number - 1
    goal = f"Go on at {_link(section[0].headings[-1])}" if section else "All of it is passed."
    if place is None and (onward := spine.leads_to(session.stem, progress.load())):
        goal += f" (on the spine: {onward})"
    _display(" ".join([*sentences, goal]))


def status(lab=None):
    """Show what passed in this lab and what comes next, with links; or the table of another lab."""
    session = _sessions[0] if _sessions else None
    if session is None or (lab is not None and labs.find_stem(lab) != session.stem):
        print(table(lab))
        return
    records, notebook, items = progress.load(), session.lab(), outline(session.stem)
    rows = []
    for one in items:
        entry = records.get(one.name, progress.NEW)
        rows.append(f"| {_link(_heading(notebook, one))} | `{one.name}` | {entry['state']} |")
    next_item = _next(items, records)
    count = sum(is_passed(one.name, records) for one in items)
    goal = f"Next: {_link(_heading(notebook, next_item))}, `{next_item.name}`." if next_item else ""
    _display(f"**{session.stem}**: {count} of {len(items)} passed. {goal} "
             f"({spine.progress(records)})\n\n"
             "| | | |\n|---|---|---|\n" + "\n".join(rows), table(session.stem))


class Session:
    """The state that `begin` keeps in a kernel.

    last  the number of the lab's cell that ran last; ran: the numbers of all that ran
    made  {name: the number of the lab's cell that bound it last}
    """

    def __init__(self, shell, stem):
        self.shell, self.stem = shell, stem
        self.last, self.ran, self.made = -1, set(), {}

    @property
    def stem(self):
        return self._stem

    @stem.setter
    def stem(self, stem):
        self._stem = stem
        self.exercises = {each.name: each for each in labs.checks_of(stem).EXERCISES}

    def lab(self):
        """Read the lab from its file, as it is now; return None where the file can't be found."""
        return find_lab(self.stem, self.shell.user_ns.get("__vsc_ipynb_file__"))

    def before(self, info):
        """Bind the names that the cell about to run needs and that are still missing."""
        statements, lab = statements_of(info.raw_cell), self.lab()
        place = lab and lab.place_of(info.raw_cell, getattr(info, "cell_id", None), self.last)
        names_of_cell = {name for one in statements for name in one.binds | one.checks}
        # A cell that the learner added most likely comes after the last one.
        until = self.last + 1 if place is None else place
        names = self.missing(needs(statements), place, names_of_cell)
        if sentences := names and self.supply(names, until):
            print(_plain(" ".join(sentences)))
        for name in {name for one in statements for name in one.binds}:
            self.made[name] = place
        if place is not None:
            self.last = place
            self.ran.add(place)

    def missing(self, names, place, names_of_cell=()):
        """Find the `names` that the cell `place` can't use yet.

        names_of_cell: those that the cell itself defines or checks; their stubs may stay
        """
        lab = self.lab()
        return {name for name in names if not self._is_bound(name, names_of_cell)
                or place is not None and self._is_old(name, lab, place)}

    def _is_bound(self, name, names_of_cell=()):
        """Return False for a name that no cell has bound, and for an exercise left empty."""
        if name not in self.shell.user_ns:
            return hasattr(builtins, name)
        return (name not in self.exercises or name in names_of_cell
                or not is_stub(self.shell.user_ns[name]))

    def _is_old(self, name, lab, place):
        """Return True where a different cell bound it, because the cell above did not run."""
        cell = lab.binder(name, place)
        return (name not in self.exercises and cell not in self.ran
                and self.made.get(name) not in (None, cell) and cell is not None)

    def _is_there(self, name, cell):
        """Return True where it has the value from the lab's cell `cell`, or the learner's own."""
        if not self._is_bound(name) or cell is None or name in self.exercises:
            return self._is_bound(name)
        return self.made.get(name) in (None, cell)

    def supply(self, names, until):
        """Bind those of `names` that the lab has, by the cells above the cell `until`.

        Returns: sentences that name the origin of these answers
        """
        records, lab, statements = progress.load(), self.lab(), []
        if lab:
            texts = {name: records[name].get("cell", "") for name in self.exercises
                     if is_passed(name, records)}
            statements = to_bind(names, lab.statements(until, texts), self._is_there)
        # An exercise that comes later, or whose lab is not at hand
        bound = {name for one in statements for name in one.binds}
        statements += [Statement(frozenset({name}), answers=name)
                       for name in names & self.exercises.keys() - bound]
        learner_names = self._run(statements, names)
        exercises = {name for one in statements for name in one.binds & self.exercises.keys()}
        names_above = {name for name in names & bound - exercises if name in self.shell.user_ns}
        groups = (("Yours, as you passed it: ", exercises & learner_names),
                  ("The library's: ", exercises - learner_names),
                  ("From the cells above: ", names_above))
        return [f"{text}{', '.join(f'`{name}`' for name in sorted(group))}."
                for text, group in groups if group]

    def _run(self, statements, names):
        """Run the statements in the notebook, without output.

        Names that were bound keep their values, except `names`.
        Returns: the exercises whose answer is the learner's
        """
        from IPython.utils.capture import capture_output

        space = self.shell.user_ns
        bound = {name for one in statements for name in one.binds}
        values = {name: space[name] for name in bound - names
                  if name in space and self._is_bound(name)}
        with capture_output():
            learner_names = define(statements, space, self.exercises)
        space.update(values)
        self.made |= {name: one.cell for one in statements for name in one.binds - values.keys()}
        return learner_names


def _first_open(lab, records):
    """Return the number of the cell at which to go on; the end where everything has passed."""
    next_item = _next(outline(lab.stem), records)
    return lab.find(next_item.name) if next_item else len(lab.cells)


def _next(items, records):
    """Return the first open one after the last that passed, or else before it; or None."""
    marks = [is_passed(one.name, records) for one in items]
    place = max((number for number, is_done in enumerate(marks, 1) if is_done), default=0)
    return first_open(items, place, records)


def _heading(lab, item):
    """Return the heading of an exercise or prediction."""
    number = lab and lab.find(item.name)
    return item.section if number is None else lab.cells[number].headings[-1]


def _link(title):
    """Return a link to a heading. JupyterLab's anchor is its text, with "-" for each space."""
    text = _plain(title)
    return f"[{text}](<#{text.replace(' ', '-')}>)"


def _plain(text):
    """Strip marks and links from our own Markdown."""
    return re.sub(r"\[(.*?)\]\(<.*?>\)", r"\1", text).replace("`", "").replace("**", "")


def _display(text, plain=None):
    """Show Markdown in a notebook, and plain text where that can't be shown."""
    plain, display = plain or _plain(text), notebooks_display()
    if display is None:
        print(plain)
        return
    display({"text/plain": plain, "text/markdown": text}, raw=True)
