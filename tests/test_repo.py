"""Rules of the repository: one stem in every folder, arrows one way, no private places."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT, repository_files

from ranklab.course import build, labs

LIB = ROOT / "lib" / "ranklab"
SOURCES = sorted((ROOT / "labs" / "source").glob("[0-9]*.py"))
MODULES = sorted(LIB.rglob("*.py"))

# Arrows run one way: a module imports from its own layer or an earlier one.
LAYERS = (
    ("models", "data", "schedules", "hardware", "files", "flat",
     "options", "machine", "targets", "moved"),
    ("engine", "mesh", "meter", "collectives", "parallel"),
    tuple(labs.idea(stem) for stem in labs.STEMS),              # the techniques
    ("hybrid", "planner", "trainer", "text_trainer", "image_trainer", "stop_signal", "checkpoint"),
    ("peers",),                                                 # production tools beside ours
    ("plots", "projects"),
    ("checks", "interview", "course", "cli", "magic", "pytest_plugin"),
)
VERBS = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "broadcast", "reduce", "gather",
         "scatter", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
         "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"}
MODULE = re.compile(r"ranklab(\.\w+)+(:\w+)?")  # also "ranklab.module:function", for a loader
COLUMNS = 100


def part_of(path):
    """lib/ranklab/meter/ops.py -> "meter": the layer's name for a module."""
    return path.relative_to(LIB).parts[0].removesuffix(".py")


def layer(part):
    return max((i for i, names in enumerate(LAYERS) if part in names), default=None)


def imports(tree):
    """Every module of ranklab or others that a file names: by an import, also inside a function, or
    by a string that is a dotted name and no more.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from ranklab import hybrid` imports the module ranklab.hybrid
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "ranklab" else [node.module]
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            yield node.value.partition(":")[0]


def parse(path):
    return ast.parse(path.read_text())


def named(path):
    return str(path.relative_to(ROOT))


# --- one stem, every folder -------------------------------------------------------------------

@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_sibling_of_a_lab_exists(source):
    stem, idea = source.stem, labs.idea(source.stem)
    assert stem in labs.STEMS
    wanted = [f"labs/{stem}.ipynb", f"solutions/{stem}.ipynb", f"slides/{stem}.md",
              f"lib/ranklab/{idea}", f"lib/ranklab/checks/{idea}", f"lib/ranklab/projects/{idea}",
              f"tests/test_{idea}.py", f"tests/wrong_answers/{idea}"]
    missing = [name for name in wanted
               if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
    assert not missing


def test_nothing_has_a_stem_without_a_source():
    stems = {path.stem for path in SOURCES}
    for folder in ("labs/[0-9]*.ipynb", "solutions/*.ipynb", "slides/[0-9]*.md"):
        for path in ROOT.glob(folder):
            assert path.stem in stems, f"{named(path)} has no labs/source/{path.stem}.py"


def test_notebooks_follow_from_their_sources():
    assert not build.stale(ROOT), "run `make build`"


@pytest.mark.parametrize("kind", ["EXERCISES", "PREDICTIONS"])
def test_names_are_unique_over_all_labs(kind):
    names = [item.name for stem in labs.written() for item in getattr(labs.checks_of(stem), kind)]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


# --- arrows -----------------------------------------------------------------------------------

@pytest.mark.parametrize("path", MODULES, ids=named)
def test_arrows_run_one_way(path):
    part, tree = part_of(path), parse(path)
    if path == LIB / "__init__.py":
        return                                                 # loads its names on first use
    own_layer = layer(part)
    assert own_layer is not None, f"{part} is in no layer: add it to LAYERS"
    docstring = ast.get_docstring(tree) or ""
    for name in imports(tree):
        if not name.startswith("ranklab."):
            continue
        other = name.split(".")[1]
        if other == part or layer(other) is None:              # None: of ranklab/__init__.py
            continue
        assert layer(other) <= own_layer, f"{part} must not name {name}: it comes later"
        if own_layer == layer(other) == 2:
            assert other in docstring, f"{part} is made of {other}: its docstring must say so"


@pytest.mark.parametrize("line", ["from ranklab.clinic import hooks", "from ranklab import clinic",
                                  "import ranklab.clinic.hooks", "x = 'ranklab.clinic.hooks'",
                                  "x = 'ranklab.clinic.hooks:begin'"])
def test_an_arrow_is_seen_in_any_form(line):
    names = [*imports(ast.parse(f"def f():\n    {line}"))]
    assert [name.split(".")[:2] for name in names] == [["ranklab", "clinic"]]


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(p) == "models"], ids=named)
def test_models_know_no_ranks(path):
    text = path.read_text()
    assert not [name for name in imports(ast.parse(text)) if "distributed" in name]
    assert "environ" not in text and "getenv" not in text


def test_matplotlib_stays_in_plots():
    users = {part_of(path) for path in MODULES
             if any(name.split(".")[0] in ("matplotlib", "pylab") for name in imports(parse(path)))}
    assert users <= {"plots"}


def test_import_is_light():
    """Nothing heavy at import: one fresh interpreter, every module but the plots."""
    names = [".".join(p.relative_to(LIB.parent).with_suffix("").parts).removesuffix(".__init__")
             for p in MODULES if part_of(p) != "plots"]
    code = (f"import importlib, sys\nfor n in {names}: importlib.import_module(n)\n"
            "print([m for m in ('matplotlib', 'deepspeed', 'IPython') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_no_globals_and_no_work_at_import(path):
    tree = parse(path)
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)], "no `global`"
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        if path == LIB / "__init__.py" and ast.unparse(node) == "moved.install()":
            continue                                           # old names of modules are found
        fine = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef,
                ast.ClassDef)
        assert is_text or is_main or isinstance(node, fine), f"line {node.lineno} runs at import"


@pytest.mark.parametrize("path", [p for p in MODULES if layer(part_of(p)) in (1, 2, 3)
                                  and part_of(p) not in ("engine", "meter")], ids=named)
def test_public_functions_that_communicate_take_a_group(path):
    for function in parse(path).body:
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        called = {node.func.attr for node in ast.walk(function) if isinstance(node, ast.Call)
                  and ast.unparse(node.func).startswith("dist.")}
        takes = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
        groups = [name for name in takes if "group" in name or name in ("inside", "across")
                  or f"group={name}.group" in ast.unparse(function)]    # a model that knows its own
        assert groups or not called & VERBS, \
            f"{function.name} calls {called & VERBS} but takes no group"


def test_no_file_for_leftovers():
    for path in MODULES:
        assert path.stem not in ("utils", "util", "helpers", "helper", "misc", "common"), path


# --- text -------------------------------------------------------------------------------------

def code_files():
    names = [name for name in repository_files() if name.endswith(".py")]
    return [ROOT / name for name in names if not name.startswith("labs/")]


@pytest.mark.parametrize("path", sorted(LIB.glob("projects/*/__main__.py")), ids=named)
def test_the_runner_runs_every_project(path):
    assert "import Project" in path.read_text()


def test_lines_fit_and_code_is_ascii():
    wrong = []
    for path in [*code_files(), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS or not line.isascii():
                wrong.append(f"{named(path)}:{number} {len(line)} columns: {line.strip()[:60]!a}")
    assert not wrong, "\n" + "\n".join(wrong)


# --- no private places ------------------------------------------------------------------------

def test_no_place_of_one_machine_and_no_registry_is_named():
    # Written in two parts, so that this file does not contain what it looks for.
    hosts = "|".join(("pypi" + r"\.org", "python" + "hosted", "npmjs" + r"\.(org|com)",
                      "download.py" + "torch", "anaconda" + r"\.org"))
    places = r"(?<![\w.$}~-])/(" + "root|Users/" + r"\w+|home/[a-z]\w*|work/\w+)\b"
    forbidden = re.compile(f"{hosts}|{places}")
    for name in repository_files():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue                                           # a picture
        found = forbidden.search(text)
        assert not found, f"{name} names {found[0]}"


def test_nothing_large_and_nothing_built_is_committed():
    for name in repository_files():
        size = (ROOT / name).stat().st_size
        assert size <= 500_000, f"{name} has {size} bytes"
        assert not name.startswith(("build/", ".venv/", ".ranklab/")), name
