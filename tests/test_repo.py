"""Rules of the repository: one stem in every folder, arrows one way, no private places."""

import ast
import importlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, repository_files

import ranklab
from ranklab.course import build, labs

LIB = ROOT / "lib" / "ranklab"
SOURCES = sorted((ROOT / "labs" / "source").glob("[0-9]*.py"))
MODULES = sorted(LIB.rglob("*.py"))

# Arrows run one way: a module imports from its own layer or an earlier one.
LAYERS = (
    ("models", "data", "hardware", "basics", "moved"),
    ("engine", "mesh", "meter", "collectives"),
    ("baseline",),                                              # one process: the first technique
    ("checkpoint", "trainer"),                                  # its loop, and what it saves
    tuple(labs.idea(stem) for stem in labs.STEMS
          if labs.idea(stem) not in ("collectives", "baseline", "hybrid", "planner")),
    ("hybrid", "planner"),
    ("peers",),                                                 # production tools beside ours
    ("plots", "projects"),
    ("checks", "interview", "course", "cli", "magic", "pytest_plugin"),
)
TECHNIQUES = 4                                                  # their place in LAYERS
VERBS = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "broadcast", "reduce", "gather",
         "scatter", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
         "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"}
COLUMNS = 100


def part_of(path):
    """lib/ranklab/meter/ops.py -> "meter": the layer's name for a module."""
    return path.relative_to(LIB).parts[0].removesuffix(".py")


def layer(part):
    return max((i for i, names in enumerate(LAYERS) if part in names), default=None)


def imports(tree):
    """Every module name that is imported anywhere in the file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from ranklab import hybrid` imports the module ranklab.hybrid
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "ranklab" else [node.module]


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
    mine = layer(part)
    assert mine is not None, f"{part} is in no layer: add it to LAYERS"
    said = ast.get_docstring(tree) or ""
    for name in imports(tree):
        other = (name or "").split(".")[1:2]
        if not name.startswith("ranklab.") or other == [part]:
            continue
        other = other[0]
        if layer(other) is None:
            continue                                           # a name of ranklab/__init__.py
        assert layer(other) <= mine, f"{part} must not import {other}: it comes later"
        if mine == layer(other) == TECHNIQUES:
            assert other in said, f"{part} is made of {other}: its docstring must say so"


def public_names(module):
    """What may be imported from it: its __all__, or what it defines without an underscore."""
    path = LIB.joinpath(*module.split(".")[1:])
    tree = parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(eval(ast.unparse(node.value), {"_HOME_OF": ranklab.__all__}))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("path", sorted(LIB.rglob("__init__.py")), ids=named)
def test_every_package_says_what_is_public(path):
    package = ".".join(path.parent.relative_to(LIB.parent).parts)
    module = importlib.import_module(package)
    for name in module.__all__:                                # a name, or a module on a shelf
        assert hasattr(module, name) or importlib.util.find_spec(f"{package}.{name}"), name


def test_the_table_of_contents_names_files_that_exist():
    lines = re.findall(r"^    .{28,29}  (\S.*)$", ranklab.__doc__, re.M)
    assert len(lines) == len(labs.STEMS) + 5
    for line in lines:
        folder = LIB
        for file in re.findall(r"[\w/]+\.py", line):         # the first of a line names the folder
            folder = LIB / file.rpartition("/")[0] if "/" in file else folder
            assert (folder / file.rpartition("/")[2]).exists(), line


SHELVES = ("cluster", "peers", "plots", "projects")            # packages of independent modules


@pytest.mark.parametrize("source", [*SOURCES, ROOT / "labs" / "source" / "tour.py"],
                         ids=lambda path: path.stem)
def test_labs_import_public_names_only(source):
    tops = set(ranklab.__all__) | {part_of(path) for path in MODULES}
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("ranklab"):
            continue
        place = node.module.split(".")[1:]
        assert len(place) <= (2 if place[:1] and place[0] in SHELVES else 1), ast.unparse(node)
        public = public_names(node.module) if place else tops
        private = {alias.name for alias in node.names} - public
        assert not private, f"{node.module} does not offer {private}"


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


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(p) not in ("engine", "meter")
                                  and layer(part_of(p)) in range(1, TECHNIQUES + 2)], ids=named)
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
