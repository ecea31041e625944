"""Make .venv ready: a Python that is new enough, the pinned packages, and ranklab in place.

uv does the work; pip fetches it where it is missing, and uv is told what pip was told. Standard
library only, and nothing newer than Python 3.6 in the syntax, so that an old Python can still say
what is wrong. A second run compares a stamp and is done in 0.1 s. Every way to fail ends in one
sentence that says what to do.
"""
import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

from sentences import (
    AGAIN, NEWEST, OLDEST, SPACE_FOR_CUDA, SPACE_NEEDED, Stop, cause, explain, said_once,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = "course,mpi,bench,hf,cluster,site"   # the extras that install in seconds
NCCL = "2.30.7"    # from 2.30.3 on several ranks may share a GPU; torch 2.13 brings 2.29.7
OLDEST_UV = (0, 9)                            # of those on the PATH; tried with 0.9.0
CHANGES = re.compile(rb"(?<=\n) (\x1b\[\d+m)?[-+~](?=[\x1b ]|$)")    # 150 names, at uv's end
# pip's settings, as the variable or the option by which uv is told the same.
VARIABLES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX",
             "find-links": "UV_FIND_LINKS", "trusted-host": "UV_INSECURE_HOST",
             "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT",
             "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "ALL_PROXY"}


def check_platform():
    """Raise Stop under Windows, which is sent to WSL; Linux and macOS pass."""
    if sys.platform == "win32":
        raise Stop("ranklab needs Linux or macOS: on Windows run `wsl --install` once, "
                   "open the Ubuntu terminal, and do `make lab` there.")


def new_enough(python):
    """Return True when the command `python` starts and is OLDEST or newer."""
    code = "import sys; sys.exit(sys.version_info[:2] < %r)" % (OLDEST,)
    try:
        return subprocess.call([python, "-c", code], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def check_python(argv):
    """Hand over to a newer Python of this machine where this one is too old."""
    if sys.version_info[:2] >= OLDEST:
        return
    for minor in range(OLDEST[1], NEWEST[1] + 1):      # the older ones are the better tried
        python = shutil.which("python3.%d" % minor)
        if python and new_enough(python):
            os.execv(python, [python, os.path.abspath(__file__)] + argv)
    raise Stop("Python %s is too old: ranklab needs 3.%d or newer; install it (Debian, Ubuntu: "
               "`apt install python3.12 python3.12-venv`), then `make lab PYTHON=python3.12`."
               % (platform.python_version(), OLDEST[1]))


def check_space(venv, torch):
    """Refuse to start what can't finish; say it early when only the CUDA wheels would not fit."""
    free = shutil.disk_usage(str(venv.parent)).free
    if free < SPACE_NEEDED:
        raise Stop("The disk is nearly full: %.1f GB are free in %s and the packages need %.0f GB; "
                   "free some, %s." % (free / 1e9, venv.parent, SPACE_NEEDED / 1e9, AGAIN))
    if free < SPACE_FOR_CUDA and sys.platform == "linux" and torch != "cpu":
        print("%.1f GB are free; PyTorch with CUDA takes up to %.0f GB. Without a GPU use "
              "TORCH=cpu." % (free / 1e9, SPACE_FOR_CUDA / 1e9))


def pins():
    """Return a hash of everything that decides what is installed."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    content = (EXTRAS + NCCL).encode() + b"".join(f.read_bytes() for f in files)
    return hashlib.sha256(content).hexdigest()


def read_stamp(venv):
    """Return what the last finished set-up wrote, or {}."""
    try:
        stamp = json.loads((venv / "ranklab-setup.json").read_text())
        return {"root": stamp["root"], "torch": stamp.get("torch", ""), "pins": stamp["pins"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


@contextlib.contextmanager
def alone(venv):
    """Let one set-up at a time work on `venv`: two pips in one folder would spoil it."""
    import fcntl                           # not on Windows, which never comes here
    with open(str(venv) + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command, screen=True):
    """Run an installer; return its exit code and what it wrote to stderr, also on the screen.

    A terminal stays one for the installer, which draws its progress on no other thing.
    """
    terminal = screen and sys.stderr.isatty()
    reader, writer = terminal_like_ours() if terminal else os.pipe()
    process = subprocess.Popen([str(c) for c in command], cwd=str(ROOT), stderr=writer,
                               stdin=subprocess.DEVNULL,
                               stdout=None if screen else subprocess.DEVNULL)
    os.close(writer)
    output, shown = b"", 0
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:                    # so Linux says that nobody writes to a terminal any more
            part = b""
        if not part:
            break
        output += part
        if screen:
            progress = CHANGES.split(output, 1)[0]
            sys.stderr.write(progress[shown:].decode(errors="replace"))
            sys.stderr.flush()
            shown = len(progress)
    os.close(reader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace"))
    return process.wait(), text.replace("\r", "\n")


def terminal_like_ours():
    """Return the two ends of a new terminal that is as wide as this one."""
    import fcntl                           # none of the three is on Windows, which never comes here
    import pty
    import termios
    reader, writer = pty.openpty()
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


def install(*command):
    """Run an installer; raise Stop with the sentence for it where it fails."""
    code, output = run(command)
    if code:
        raise Stop(explain(output, code), cause(output))


def pin(name):
    """Return `name` with its pinned version, as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.startswith(name + "=="))


def numbers(version):
    """Return a version as numbers to compare by: (2, 30, 7)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def has_pip():
    """Return True when this Python has pip."""
    return importlib.util.find_spec("pip") is not None


def find_uv():
    """Return the command `uv`: of the PATH, or what pip fetches into build/uv."""
    path = shutil.which("uv")
    if path:
        said = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True).stdout.split()
        if len(said) > 1 and numbers(said[1]) >= OLDEST_UV:
            return path
    uv = ROOT / "build" / pin("uv") / "bin" / "uv"
    if not uv.exists():
        if not has_pip():
            raise Stop("Neither uv nor pip is here: install one of them (Debian, Ubuntu: `apt "
                       "install python3-pip`; uv: https://docs.astral.sh/uv), %s." % AGAIN)
        install(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade",
                "--root-user-action=ignore", "--target", uv.parent.parent, pin("uv"))
    return str(uv)


def pip_settings():
    """Return {setting: value} of pip's files and variables, as `pip install` takes them."""
    if not has_pip():
        return {}
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, universal_newlines=True).stdout
    settings = {}
    for section in ("global", "install", ":env:"):        # the later one counts
        for line in said.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith(section + "."):
                settings[name[len(section) + 1:]] = ast.literal_eval(value)
    return settings


class Uv:
    """`uv pip install` into one environment, with the pins, and with what pip was told."""

    def __init__(self, venv):
        self.command, self.venv = find_uv(), venv
        settings = pip_settings()
        if not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & os.environ.keys():
            # pip takes the newest of all indexes, uv that of the first which has the package.
            os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
            for setting, variable in VARIABLES.items():
                if settings.get(setting):
                    separator = "," if setting == "find-links" else " "
                    os.environ.setdefault(variable, separator.join(settings[setting].split()))
        self.pins = ["-c", "constraints.txt"]
        for path in settings.get("constraint", "").split():
            self.pins += ["-c", path]
        self.asks_indexes = settings.get("no-index", "").lower() not in ("1", "true", "yes", "on")
        if not self.asks_indexes:
            self.pins += ["--no-index"]

    def arguments(self, *wanted):
        """Return the command that installs `wanted`."""
        return [self.command, "pip", "install", "--python", self.venv / "bin" / "python",
                *self.pins, *wanted]

    def lacks(self, *wanted, reasons):
        """Return why `wanted` can't be had, one of `reasons`, words of SIGNS; "" where it can.

        Raises: Stop for another reason
        """
        code, output = run(self.arguments("--dry-run", "--no-deps", *wanted), screen=False)
        reason = cause(output) if code else ""
        if code and reason not in reasons:
            sys.stderr.write(output)
            raise Stop(explain(output, code), reason)
        return reason


def create(uv, venv):
    """Make a fresh, empty environment at `venv`; remove an older environment, nothing else."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise Stop("%s holds something that is not a Python environment: name another folder "
                   "(VENV=...), or empty this one." % venv)
    shutil.rmtree(str(venv), ignore_errors=True)
    install(uv.command, "venv", "--quiet", "--python", sys.executable, venv)


def choose_torch(uv, tag):
    """Return what to ask uv for, so that PyTorch's wheels of `tag` (cpu, cu128, auto) come.

    Raises: Stop; its cause is "torch's index" where PyTorch's own index is out of reach
    """
    # A mirror or a folder that pip was told about comes first; the public index has no tags.
    if tag != "auto":
        tagged = "%s+%s" % (pin("torch"), tag)
        if not uv.lacks(tagged, reasons=("no build", "nothing", "conflict")):
            return [tagged]
    reason = "closed" if not uv.asks_indexes else uv.lacks(
        "--torch-backend=" + tag, pin("torch"),
        reasons=("no build", "nothing", "conflict", "network", "closed"))
    if not reason:
        return ["--torch-backend=" + tag]
    if reason in ("no build", "conflict"):
        raise Stop("PyTorch's own index has no %s for the tag %s and this machine: TORCH= takes "
                   "cpu, pip, auto or a tag such as cu128." % (pin("torch"), tag), reason)
    raise Stop("PyTorch's own index can't be reached: check the network, %s; or TORCH=pip takes "
               "the ordinary index's PyTorch, up to 3 GB." % AGAIN, "torch's index")


def choose_cpu_if_it_comes(uv):
    """Return choose_torch() for the CPU; [] where a CPU's wheels are out of reach."""
    print("No GPU here (nvidia-smi is not on the PATH), so PyTorch's CPU wheels are taken, 0.2 GB; "
          "TORCH=pip takes those with CUDA, 3 GB.", flush=True)
    try:
        return choose_torch(uv, "cpu")
    except Stop as stop:
        if stop.cause != "torch's index":  # nobody asked for the gigabytes of the ordinary index
            raise
    free = shutil.disk_usage(str(uv.venv.parent)).free
    unreached = "PyTorch's index can't be reached"
    if free < SPACE_FOR_CUDA:
        raise Stop("%s, and the ordinary index's PyTorch, with CUDA, takes up to %.0f GB where "
                   "%.1f GB are free: check the network, or free some space, %s."
                   % (unreached, SPACE_FOR_CUDA / 1e9, free / 1e9, AGAIN))
    print("%s: going on with the ordinary index's PyTorch, with CUDA, up to 3 GB." % unreached,
          flush=True)
    return []


def fill(uv, tag):
    """Install the pins, and ranklab in place (edits of lib/ count at once).

    tag  of PyTorch's wheels; "" is the ordinary index's; None is for us to choose
    Returns: the tag that was taken
    """
    if tag is None:
        torch = choose_cpu_if_it_comes(uv)
        tag = "cpu" if torch else ""
    else:
        torch = choose_torch(uv, tag) if tag else []
    # pip is there for who wants a package of their own beside ours
    install(*uv.arguments(*torch, "pip", "-e", ".[%s]" % EXTRAS))
    return tag


# name and version of the NCCL that came with torch, if any
WHICH_NCCL = """import importlib.metadata as metadata
for each in metadata.distributions():
    if (each.name or "").startswith("nvidia-nccl-cu"):
        print(each.name, each.version)"""


def bring_nccl(uv):
    """Where a GPU is, replace torch's NCCL by one that lets ranks share it, if torch's can't.

    Without it all else works, so that it does not come is no error.
    """
    if not shutil.which("nvidia-smi"):
        return
    said = subprocess.run([str(uv.venv / "bin" / "python"), "-c", WHICH_NCCL],
                          stdout=subprocess.PIPE, universal_newlines=True).stdout.split()
    if len(said) != 2 or numbers(said[1]) >= numbers(NCCL):
        return
    name, version = said
    # --no-deps: torch asks for exactly its own version.
    code, _ = run(uv.arguments("--no-deps", name + "==" + NCCL), screen=False)
    if code:
        print("NCCL %s could not be had, so ranks can't share a GPU; all else works with torch's "
              "NCCL %s." % (NCCL, version), flush=True)
    else:
        print("NCCL %s is in the place of torch's %s: with RANKLAB_SHARE_GPU=1 several ranks share "
              "a GPU." % (NCCL, version), flush=True)


def wheels(asked, stamp):
    """Return the tag of PyTorch's wheels: TORCH=, else that of the stamp; None is chosen later."""
    if asked:
        return "" if asked == "pip" else asked
    if stamp:                              # an environment of before we chose holds pip's default
        return stamp["torch"]
    has_gpu = sys.platform != "linux" or shutil.which("nvidia-smi")
    return "" if has_gpu else None


def setup(venv, asked):
    """Make `venv` hold exactly what this checkout asks for; `asked` is what TORCH= says."""
    stamp = read_stamp(venv)
    torch = wheels(asked, stamp)
    wanted = {"root": str(ROOT), "torch": torch, "pins": pins()}
    works = new_enough(str(venv / "bin" / "python"))
    if works and stamp == wanted:
        return
    check_space(venv, "cpu" if torch is None else torch)
    uv = Uv(venv)
    # A folder that was moved keeps the old place in its scripts; two kinds of torch don't mix.
    moved = stamp and (stamp["root"], stamp["torch"]) != (wanted["root"], torch)
    if not works or moved:
        print("making %s with Python %s" % (venv, platform.python_version()))
        create(uv, venv)
    print("installing the pinned packages into %s" % venv, flush=True)
    wanted["torch"] = fill(uv, torch)
    bring_nccl(uv)
    (venv / "ranklab-setup.json").write_text(json.dumps(wanted))


def main(argv):
    parser = argparse.ArgumentParser(description="make .venv ready")
    parser.add_argument("--venv", default=".venv", help="where the environment is")
    parser.add_argument("--torch", default="",
                        help="PyTorch's wheels: cpu, pip (the ordinary index's), auto, cu128, ...")
    options = parser.parse_args(argv)

    def work():
        check_platform()
        check_python(argv)
        venv = pathlib.Path(os.path.abspath(options.venv))
        with alone(venv):
            setup(venv, options.torch)

    return said_once(work, lambda error: explain(str(error), 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
