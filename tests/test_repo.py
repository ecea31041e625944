"""Rules of the repository: one stem in every folder, arrows one way, no private places.

One test a rule; a test that fails lists every place that breaks it.
"""

import ast
import functools
import importlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, repository_files

import ranklab
from ranklab import moved
from ranklab.course import build, labs

LIB = ROOT / "lib" / "ranklab"
SOURCES = sorted((ROOT / "labs" / "source").glob("[0-9]*.py"))
MODULES = sorted(LIB.rglob("*.py"))

# Arrows run one way: a module imports from its own layer or an earlier one.
LAYERS = (
    ("models", "data", "hardware", "basics", "formulas", "moved"),
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
# Packages whose __all__ names modules as well: what these define without an underscore is public.
SHELVES = ("clinic", "cluster", "course", "peers", "planner", "plots", "projects")
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


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


def named(path):
    return str(path.relative_to(ROOT))


def none_of(faults):
    """Fail with the list of faults, one a line."""
    faults = list(faults)
    assert not faults, "\n" + "\n".join(faults)


# --- one stem, every folder -------------------------------------------------------------------

def test_every_sibling_of_a_lab_exists():
    assert [source.stem for source in SOURCES] == list(labs.STEMS)
    wanted = [name for stem, idea in ((stem, labs.idea(stem)) for stem in labs.STEMS) for name in (
        f"labs/{stem}.ipynb", f"solutions/{stem}.ipynb", f"slides/{stem}.md",
        f"lib/ranklab/{idea}", f"lib/ranklab/checks/{idea}", f"lib/ranklab/projects/{idea}",
        f"tests/test_{idea}.py")]
    none_of(name for name in wanted
            if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists())


def test_nothing_has_a_stem_without_a_source():
    none_of(named(path) for folder in ("labs/[0-9]*.ipynb", "solutions/*.ipynb", "slides/[0-9]*.md")
            for path in ROOT.glob(folder) if path.stem not in labs.STEMS)


def test_notebooks_follow_from_their_sources():
    assert not build.stale(ROOT), "run `make build`"


@pytest.mark.parametrize("kind", ["EXERCISES", "PREDICTIONS"])
def test_names_are_unique_over_all_labs(kind):
    names = [item.name for stem in labs.written() for item in getattr(labs.checks_of(stem), kind)]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


# --- arrows -----------------------------------------------------------------------------------

def test_arrows_run_one_way():
    none_of(fault for path in MODULES if path != LIB / "__init__.py"  # it loads on first use
            for fault in arrow_faults(path))


def arrow_faults(path):
    part = part_of(path)
    if layer(part) is None:
        yield f"{part} is in no layer: add it to LAYERS"
        return
    docstring = ast.get_docstring(parse(path)) or ""
    for name in imports(parse(path)):
        other = name.split(".")[1] if name.startswith("ranklab.") else part
        if other == part or layer(other) is None:              # None: of ranklab/__init__.py
            continue
        if layer(other) > layer(part):
            yield f"{named(path)} must not name {name}: it comes later"
        if layer(other) == layer(part) == TECHNIQUES and other not in docstring:
            yield f"{named(path)} is made of {other}: its docstring must say so"


@pytest.mark.parametrize("line", ["from ranklab.clinic import hooks", "from ranklab import clinic",
                                  "import ranklab.clinic.hooks", "x = 'ranklab.clinic.hooks'",
                                  "x = 'ranklab.clinic.hooks:begin'"])
def test_an_arrow_is_seen_in_any_form(line):
    names = [*imports(ast.parse(f"def f():\n    {line}"))]
    assert [name.split(".")[:2] for name in names] == [["ranklab", "clinic"]]


def test_models_know_no_ranks():
    for path in sorted((LIB / "models").glob("*.py")):
        assert not [name for name in imports(parse(path)) if "distributed" in name], path
        assert not re.search("environ|getenv", path.read_text()), path


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


def test_checks_come_without_torchs_dtensor():
    """It brings sympy, and each notebook's first check would wait a second for it."""
    code = ("import importlib, sys\nfrom ranklab.course import labs\n"
            "for stem in labs.written(): labs.checks_of(stem)\n"
            "print([m for m in ('torch.distributed.tensor', 'sympy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_planner_needs_neither_torch_nor_numpy():
    """`ranklab plan` starts at once, and a browser has none of them."""
    code = ("import sys, ranklab.formulas, ranklab.planner.live, ranklab.projects.planner.plan\n"
            "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_globals_and_no_work_at_import():
    none_of(f"{named(path)}:{node.lineno}" for path in MODULES for node in work_at_import(path))


def work_at_import(path):
    """Statements of a module that run when it is imported, and `global` anywhere."""
    fine = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    for node in parse(path).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        is_finder = path == LIB / "__init__.py" and ast.unparse(node) == "moved.install()"
        if not (is_text or is_main or is_finder or isinstance(node, fine)):
            yield node
    yield from (node for node in ast.walk(parse(path)) if isinstance(node, ast.Global))


def test_public_functions_that_communicate_take_a_group():
    none_of(f"{named(path)}: {function.name} takes no group" for path in MODULES
            if part_of(path) not in ("engine", "meter")
            and layer(part_of(path)) in range(1, TECHNIQUES + 2)
            for function in parse(path).body if isinstance(function, ast.FunctionDef)
            and not function.name.startswith("_") and lacks_a_group(function))


def lacks_a_group(function):
    called = {node.func.attr for node in ast.walk(function) if isinstance(node, ast.Call)
              and ast.unparse(node.func).startswith("dist.")}
    takes = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
    groups = [name for name in takes if "group" in name or name in ("inside", "across")
              or f"group={name}.group" in ast.unparse(function)]        # a model that knows its own
    return called & VERBS and not groups


def test_no_file_for_leftovers():
    assert not {path.stem for path in MODULES} & {"utils", "util", "helpers", "helper", "misc",
                                                  "common"}


# --- what is public ---------------------------------------------------------------------------

def test_every_package_says_what_is_public():
    for path in sorted(LIB.rglob("__init__.py")):
        if part_of(path) == "checks" and path.parent != LIB / "checks":
            continue                                           # labs find EXERCISES there
        package = ".".join(path.parent.relative_to(LIB.parent).parts)
        module = importlib.import_module(package)
        for name in module.__all__:                            # a name, or a module on a shelf
            assert hasattr(module, name) or importlib.util.find_spec(f"{package}.{name}"), \
                f"{named(path)}: __all__ names {name}, which is not imported there"


def public_names(module):
    """What may be imported from it: its __all__, or what it defines without an underscore."""
    path = LIB.joinpath(*module.split(".")[1:])
    names = set()
    for node in parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_labs_import_public_names_only():
    none_of(fault for source in [*SOURCES, ROOT / "labs" / "source" / "tour.py"]
            for fault in private_imports(source))


def private_imports(source):
    tops = set(ranklab.__all__) | {part_of(path) for path in MODULES}
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"{source.stem}: import {alias.name}: take names from its package"
                        for alias in node.names
                        if alias.name.startswith("ranklab.") and alias.name.count(".") > 1)
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("ranklab"):
            continue
        place = node.module.split(".")[1:]
        is_on_a_shelf = len(place) == 2 and place[0] in SHELVES and (
            place[1] in public_names(f"ranklab.{place[0]}"))
        if len(place) > 1 and not is_on_a_shelf:
            yield (f"{source.stem}: {ast.unparse(node)}: import it from ranklab.{place[0]}, whose "
                   "__all__ must name it")
        elif private := {alias.name for alias in node.names} - (
                public_names(node.module) if place else tops):
            yield (f"{source.stem}: {node.module} does not offer {private}: import them in its "
                   "__init__.py, and name them in its __all__")


def test_modules_are_found_under_the_names_of_version_1():
    for old, new in moved.MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)


def test_the_table_of_contents_names_files_that_exist():
    lines = re.findall(r"^    .{28,29}  (\S.*)$", ranklab.__doc__, re.M)
    assert len(lines) == len(labs.STEMS) + 6
    for line in lines:
        folder = LIB
        for file in re.findall(r"[\w/]+\.py", line):        # the first of a line names the folder
            folder = LIB / file.rpartition("/")[0] if "/" in file else folder
            assert (folder / file.rpartition("/")[2]).exists(), line


# --- text -------------------------------------------------------------------------------------

def code_files():
    names = [name for name in repository_files() if name.endswith(".py")]
    return [ROOT / name for name in names if not name.startswith("labs/")]


def test_the_runner_runs_every_project():
    none_of(named(path) for path in LIB.glob("projects/*/__main__.py")
            if "import Project" not in path.read_text())


def test_lines_fit_and_code_is_ascii():
    none_of(f"{named(path)}:{number} {len(line)} columns: {line.strip()[:60]!a}"
            for path in [*code_files(), ROOT / "Makefile", ROOT / ".ci" / "run"]
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > COLUMNS or not line.isascii())


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
        place = forbidden.search(text)
        assert not place, f"{name} names {place[0]}"


def test_nothing_large_and_nothing_built_is_committed():
    for name in repository_files():
        size = (ROOT / name).stat().st_size
        assert size <= 500_000, f"{name} has {size} bytes"
        assert not name.startswith(("build/", ".venv/", ".ranklab/")), name
