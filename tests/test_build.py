"""The builder: labs and solutions follow from one source and the library, or are called stale."""

import importlib.util
import itertools
import linecache
import re
import textwrap

import nbformat
import pytest

from ranklab.checks.exercise import Exercise, Prediction
from ranklab.course import build as builder
from ranklab.course import labs
from ranklab.course.build import (
    BuildError, build, free_names, lab_notebook, solution_notebook, stale,
)
from ranklab.course.stubs import ADVICE, advice

STEM = "00_ranks"
SOURCE = '''\
# %% [markdown]
# # 00 Doubles

# %%
import math

from operator import mul

# %% [markdown]
# **Predict.**

# %%
check = dict
check(big_number=..., other=...)

# %% tags=["nbval-check-output"]
def double(x):
    """Twice x."""
    # what is given stays said
    x = x
    # one line, with mul:
    # two factors
    raise NotImplementedError("exercise 4.1: about 1 line")


print("before", double.__name__)

# %%
def half(x):
    ### BEGIN SOLUTION
    y = x / 2
    ### END SOLUTION
    return y


### BEGIN SOLUTION
print(half(double(3)))
### END SOLUTION

# %%
1

# %%
1
'''
ANSWER = '''\
def helper(x):
    return x


def double(x):
    """Twice x: the library's text."""
    return mul(2, x)  # why not


class Known:
    pass
'''
numbers = itertools.count()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with one small lab; `double` is its exercise, and big_number its prediction."""
    (tmp_path / "labs" / "source").mkdir(parents=True)
    (tmp_path / "labs" / "source" / f"{STEM}.py").write_text(SOURCE)
    number = Prediction("big_number", solution="2 ** 3 / 4", answer=lambda: 2)
    monkeypatch.setattr(builder.labs, "find_prediction", {"big_number": number}.get)
    library(tmp_path, monkeypatch, ANSWER)
    return tmp_path


def library(root, monkeypatch, text):
    """From now on the library's answer is `double` of this text."""
    path = root / f"library{next(numbers)}.py"
    path.write_text(text)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exercise = Exercise(module.double, lambda _: iter(()), ("", "", ""))
    monkeypatch.setattr(builder.labs, "find_exercise", {"double": exercise}.get)


def change(root, old, new):
    path = root / "labs" / "source" / f"{STEM}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def code(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def test_the_lab_is_the_source_without_marked_solutions(root):
    notebook = lab_notebook(root, STEM)
    nbformat.validate(notebook)
    text = code(notebook)
    assert "check(big_number=..., other=...)" in text and "NotImplementedError" in text
    assert "def half(x):\n    ...\n    return y" in text, "an indented solution leaves valid Python"
    assert "SOLUTION" not in text and "x / 2" not in text and "print(half" not in text
    for cell in notebook.cells:
        assert cell.cell_type != "code" or (cell.outputs, cell.execution_count) == ([], None)
        compile(cell.source if cell.cell_type == "code" else "", "cell", "exec")


def test_the_solution_has_the_librarys_text_and_the_working(root):
    text = code(solution_notebook(root, STEM))
    assert '"""Twice x: the library\'s text."""\n    return mul(2, x)  # why not' in text
    assert "NotImplementedError" not in text and "helper" not in text
    assert "print(\"before\", double.__name__)" in text, "what is around the stub stays"
    assert "check(big_number=2 ** 3 / 4, other=...)" in text
    assert "def half(x):\n    y = x / 2\n    return y\n\n\nprint(half(double(3)))" in text


BROKEN = '''\

# %%
def double(x):
    """Twice x: the library's text."""
    return add(x, 2)

# %% [markdown]
# **Look.**

# %% tags=["nbval-check-output"]
double(3)

# %%
check(big_number=...)

# %%
print("not a look")

# %%
double = check(double)
'''


def test_a_program_to_be_mended_stays_and_is_looked_at_then_the_marked_one(root):
    change(root, SOURCE[SOURCE.index("# %% tags"):SOURCE.index("# %%\ndef half")], BROKEN)
    cells = [cell for cell in solution_notebook(root, STEM).cells if cell.cell_type == "code"]
    found, look, _, _, mended, again, check = [
        cell for cell in cells if re.search("double|big_number=|not a look", cell.source)][1:8]
    assert "return add(x, 2)" in found.source and "<- new" not in found.source
    assert look.source == again.source == "double(3)" and check.source == "double = check(double)"
    assert "tags" not in look.metadata and again.metadata["tags"] == ["nbval-check-output"]
    assert mended.source.splitlines()[2:] == ["    return mul(2, x)  # why not  # <- new"]
    assert "add(x, 2)" in code(lab_notebook(root, STEM)), "the learner mends it in place"
    assert "mul" not in code(lab_notebook(root, STEM)).replace("import mul", "")
    change(root, "from operator import mul\n", "")
    with pytest.raises(BuildError, match="the answer double uses mul"):
        solution_notebook(root, STEM)


def test_marks_stand_in_comments_and_within_the_columns():
    full = f"    y = {'x + ' * 22}x"
    text = builder.marked("def f(x):\n    y = x\n    return y", f"def f(x):\n{full}\n    return y")
    assert text.splitlines()[1:3] == ["    # new:", full] and len(full) < 101
    left_out = builder.marked("def f(x):\n    if x:\n        x += 1\n    return x",
                              "def f(x):\n    return x")
    assert left_out.splitlines()[1:3] == ["    # gone: if x:", "        # gone: x += 1"]
    with pytest.raises(BuildError, match="a mark is not in a comment"):
        builder.marked('"""a"""', '"""a\nb"""')


def test_advice_leaves_the_stub_and_is_found_by_name(root):
    assert "# what is given stays said" in code(lab_notebook(root, STEM))
    assert "# one line" not in code(lab_notebook(root, STEM))
    assert advice(SOURCE, "double") == ["one line, with mul: two factors"]
    stub = SOURCE[SOURCE.index("def double"):SOURCE.index("print(")]
    method = "class A:\n" + textwrap.indent(stub, " " * 4)
    assert advice(method, "A") == ["double: one line, with mul: two factors"]


def test_all_advice_of_the_labs_is_some_exercises_first_hint():
    for stem in labs.written():
        source = labs.source(stem)
        found = [line for item in labs.checks_of(stem).EXERCISES
                 for line in advice(source, item.name)]
        assert len(found) == len(ADVICE.findall(source)), stem


def test_a_missing_import_is_named(root):
    change(root, "from operator import mul\n", "")
    with pytest.raises(BuildError, match="00_ranks: the answer double uses mul, which no earlier"):
        solution_notebook(root, STEM)


def test_an_import_in_a_later_cell_does_not_count(root):
    change(root, "from operator import mul\n", "")
    change(root, "# %%\n1\n\n# %%\n1", "# %%\nfrom operator import mul")
    with pytest.raises(BuildError, match="uses mul"):
        solution_notebook(root, STEM)


def test_a_helper_of_the_library_must_be_imported_by_name(root, monkeypatch):
    library(root, monkeypatch, ANSWER.replace("mul(2, x)", "helper(mul(2, x)) + math.pi"))
    with pytest.raises(BuildError, match="uses helper, which"):
        solution_notebook(root, STEM)


def test_a_cell_that_is_no_python_is_named(root):
    change(root, "import math\n", "import math import\n")
    with pytest.raises(BuildError, match="a cell is not Python"):
        solution_notebook(root, STEM)


@pytest.mark.parametrize("source, names", [
    ("def f(x): return x + y", {"y"}),
    ("def f(x=dist): return [x for x in x if x > limit]", {"dist", "limit"}),
    ("def f(n): return f(n - 1)", set()),
    ("class A(Base):\n    def g(self): super().g(); return torch.ones(1)",
     {"Base", "super", "torch"}),
    ("@wrap\ndef f(x: Tensor) -> Out:\n    def g(): return x, later\n    return g",
     {"wrap", "Tensor", "Out", "later"}),
    ("def f():\n    import os\n    for i in range(3): os, i\n    return lambda z: z + w",
     {"range", "w"}),
    ("def f(x):\n    try: pass\n    except ValueError as e: return e\n    with x as y: return y",
     {"ValueError"}),
])
def test_free_names(source, names):
    assert free_names(source) == names


def test_ids_are_unique_and_stay_when_another_cell_changes(root):
    before = [cell.id for cell in lab_notebook(root, STEM).cells]
    assert len(set(before)) == len(before), "two equal cells, too"
    change(root, "stays said", "stays said, changed")
    after = [cell.id for cell in lab_notebook(root, STEM).cells]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def built_without_running(root, monkeypatch):
    monkeypatch.setattr(builder, "execute", lambda notebook, root: None)
    build(root)
    assert stale(root) == []


def test_what_is_stale_is_said(root, monkeypatch):
    assert stale(root) == [f"labs/{STEM}.ipynb", f"solutions/{STEM}.ipynb"]
    built_without_running(root, monkeypatch)
    library(root, monkeypatch, ANSWER.replace("# why not", "# because"))
    assert stale(root) == [f"solutions/{STEM}.ipynb"], "the library's answer was edited"
    built_without_running(root, monkeypatch)
    change(root, "**Predict.**", "**Predict!**")
    assert stale(root) == [f"labs/{STEM}.ipynb", f"solutions/{STEM}.ipynb"]
    built_without_running(root, monkeypatch)
    change(root, ' tags=["nbval-check-output"]', "")
    assert len(stale(root)) == 1, "tags count, in the solution"


def test_a_notebook_edited_by_hand_is_stale(root, monkeypatch):
    built_without_running(root, monkeypatch)
    path = root / "solutions" / f"{STEM}.ipynb"
    path.write_text(path.read_text().replace("import math", "import cmath"))
    assert stale(root) == [f"solutions/{STEM}.ipynb"]


def test_a_decks_last_slide_says_what_the_labs_end_says(root, monkeypatch):
    monkeypatch.setattr(builder, "execute", lambda *_: None)
    end = "\n".join(f"# {i}. {word}." for i, word in enumerate(("one", "two", "three"), 1))
    source = root / "labs" / "source" / f"{STEM}.py"
    source.write_text(SOURCE + f"\n# %% [markdown]\n# ## 10. Take with you\n#\n{end}\n#\n# Next\n")
    build(root, [STEM])
    deck = root / "slides" / f"{STEM}.md"
    deck.parent.mkdir()
    deck.write_text("# Take with you\n\n1. a\n2. b\n3. c\n\n**Ask**\n")
    assert stale(root, [STEM]) == [f"slides/{STEM}.md"]
    build(root, [STEM])
    assert deck.read_text() == "# Take with you\n\n1. one.\n2. two.\n3. three.\n\n**Ask**\n"
    assert not stale(root, [STEM])


def test_what_is_current_is_not_run_again(root, monkeypatch):
    runs = []
    monkeypatch.setattr(builder, "execute", lambda notebook, root: runs.append(notebook))
    build(root)
    build(root)
    assert len(runs) == 1
    build(root, force=True)
    assert len(runs) == 2


def test_another_text_keeps_the_outputs_and_other_code_does_not(root, monkeypatch):
    build(root)
    runs = []
    monkeypatch.setattr(builder, "execute", lambda notebook, root: runs.append(notebook))
    change(root, "# **Predict.**", "# **Predict**, in other words.")
    build(root)
    there = nbformat.read(root / "solutions" / f"{STEM}.ipynb", as_version=4)
    assert "other words" in str(there.cells) and "before double" in str(there.cells)
    assert runs == [] and stale(root) == []
    change(root, "import math", "import cmath")
    build(root)
    assert len(runs) == 1


def test_another_docstring_keeps_the_outputs_unless_lines_move(root, monkeypatch):
    change(root, "def half(x):\n", 'def half(x):\n    """Half of x."""\n')
    build(root)
    runs = []
    monkeypatch.setattr(builder, "execute", lambda notebook, root: runs.append(notebook))
    change(root, "Half of x.", "Return half of x.")
    build(root)
    there = nbformat.read(root / "solutions" / f"{STEM}.ipynb", as_version=4)
    assert "Return half of x." in str(there.cells) and "before double" in str(there.cells)
    assert runs == [] and stale(root) == []
    change(root, "Return half of x.", "Return half of x.\n    ")
    build(root)
    assert len(runs) == 1


def test_the_solution_is_executed_and_keeps_its_outputs(root):
    build(root)
    notebook = nbformat.read(root / "solutions" / f"{STEM}.ipynb", as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output["text"] for output in outputs if "text" in output][-2:] == [
        "before double\n", "3.0\n"]
    assert {"nbval-check-output"} == {tag for cell in notebook.cells
                                      for tag in cell.metadata.get("tags", ())}
    lab = nbformat.read(root / "labs" / f"{STEM}.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in lab.cells)
    assert not any(cell.metadata.get("tags") for cell in lab.cells), "nothing to compare with"
    assert stale(root) == []


@pytest.mark.parametrize("cell, sentence", [
    ("import os\nprint(os.getcwd())", "an output shows a path of this machine"),
    ("print('0123456789\\n' * 50_000)", "bytes; the limit is 400000"),
    ("raise ValueError('seen')", "00_ranks: .*ValueError: seen"),
    ("import os; os._exit(1)", "00_ranks: Kernel died"),
])
def test_what_a_solution_may_not_do(root, cell, sentence):
    source = root / "labs" / "source" / f"{STEM}.py"
    source.write_text(f"# %%\n{cell}\n")
    with pytest.raises(BuildError, match=f"(?s){sentence}"):
        build(root)
    assert not (root / "solutions" / f"{STEM}.ipynb").exists(), "nothing half-done is written"
