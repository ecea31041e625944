"""Hosts: virtual machines inside this one, for as long as this process lives (lab 15).

A host is a process with its own network, process table, mounts and name (Linux namespaces). Hosts
share the machine's cores, memory and disks. The machine's network is not touched: the cables of all
hosts end in a switch inside the first host, "ctl", with no way out. The namespaces have no
names, so the kernel removes them with their last process, however it ended.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from ranklab.engine.surroundings import patience

CONTROLLER = "ctl"
SUBNET = "10.77.0"  # inside only: several runs at once use the same subnet, without a conflict
TOOLS = ("unshare", "nsenter", "setpriv", "mount", "ip", "tc")  # util-linux and iproute2
FOLDER = "ranklab-hosts-"  # and the number of the process that made it
LIMIT = 30  # seconds for a command in a host
START_LIMIT = 10  # seconds for a host

# Process 1 of a host: $0 is its name, $1 its /etc/hosts. When it ends, all others in the host end.
# It ends when nobody holds the other end of its input any more, because our process is gone.
INIT = """
read -r pid _ < /proc/self/stat   # as the machine calls it: this is still the machine's /proc
mount -t proc proc /proc && mount --bind "$1" /etc/hosts && ip link set lo up || exit
echo "$0" > /proc/sys/kernel/hostname
for gpu in /dev/nvidia*; do [ -c "$gpu" ] && mount --bind /dev/null "$gpu"; done
echo "$pid"
while read -r _; do :; done
"""


class Hosts:
    """`with Hosts(3) as hosts:` gives you the hosts node1, node2, node3 and ctl inside the block.

    names: of the hosts that compute
    folder: a Path that all hosts share with this process. It is removed at the end (after a SIGKILL
        of this process, by the next Hosts)
    Raises: OSError if this machine does not allow it
    """

    def __init__(self, count):
        self.names = [f"node{i}" for i in range(1, count + 1)]
        self.folder, self.init, self.started = None, {}, []

    def __enter__(self):
        remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        try:
            lines = [f"{self.address(name)} {name}\n" for name in (CONTROLLER, *self.names)]
            (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            (self.folder / "tmp").mkdir()  # for what killed processes leave behind
            self._start(CONTROLLER)
            self._ip(CONTROLLER, "link add br0 type bridge",
                     f"addr add {self.address(CONTROLLER)}/24 dev br0", "link set br0 up")
            for name in self.names:
                self.power_on(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End all hosts, and all processes in them."""
        for name in list(self.init):
            self._kill(name)
        for process in self.started:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, name):
        return f"{SUBNET}.{1 if name == CONTROLLER else 11 + self.names.index(name)}"

    # --- hosts go on and off ----------------------------------------------------------------------

    def power_on(self, name):
        """Start the host, with an empty process table and a cable to the switch."""
        self._start(name)
        pid, card = self.init[name][1], f"02:00:00:00:00:{self.names.index(name):02x}"
        # The same card each time, or others would send to the old one until they ask again.
        self._ip(CONTROLLER,
                 f"link add {name} type veth peer name eth0 address {card} netns {pid}",
                 f"link set {name} master br0", f"link set {name} up")
        self._ip(name, f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up")

    def power_off(self, name):
        """Kill the host, whatever it is doing.

        Its cable is cut first, because otherwise the kernel would close its connections properly.
        """
        self._ip(CONTROLLER, f"link del {name}")
        self._kill(name)

    def _start(self, name):
        log = self.folder / f"{name}.log"
        with open(log, "w") as errors:
            process = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL",
                 "bash", "-c", INIT, name, str(self.folder / "hosts")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True)  # a Ctrl-C is for this process alone
        self.init[name] = process, None
        ready, _, _ = select.select([process.stdout], [], [], START_LIMIT * patience())
        pid = process.stdout.readline() if ready else ""
        if not pid:
            raise OSError(f"this machine lets no host be made: {log.read_text().strip()}")
        self.init[name] = process, int(pid)

    def _kill(self, name):
        process, pid = self.init.pop(name)
        process.stdin.close()
        process.stdout.close()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    # --- links ------------------------------------------------------------------------------------

    def shape(self, name, mbit):
        """Limit the host's sending to `mbit` megabits a second by a token bucket; None: don't."""
        bucket = f"replace dev eth0 root tbf rate {mbit}mbit burst 128kb latency 100ms"
        self._in_network(name, "tc", "qdisc", *(bucket if mbit else "del dev eth0 root").split())

    def cut(self, name):
        """Pull the host's cable out of the switch."""
        self._ip(CONTROLLER, f"link set {name} down")

    def join(self, name):
        self._ip(CONTROLLER, f"link set {name} up")

    def _ip(self, name, *lines):
        self._in_network(name, "ip", "-batch", "-", input="\n".join(lines))

    def _in_network(self, name, *argv, **options):
        _finish(["nsenter", "--target", str(self.init[name][1]), "--net", *argv], **options)

    # --- what runs on them ------------------------------------------------------------------------

    def run(self, name, argv, limit=LIMIT, check=True, **options):
        """Run the command on the host, in this process's folder; return its output.

        Raises: OSError if it fails, or takes longer than `limit` seconds
        """
        return _finish(self._on(name, argv), limit, check, **options)

    def popen(self, name, argv, **options):
        """Start a command on the host; return a Popen, and killing that kills the command."""
        self.started.append(subprocess.Popen(self._on(name, argv), start_new_session=True,
                                             stdin=subprocess.DEVNULL, **options))
        return self.started[-1]

    def _on(self, name, argv):
        return ["nsenter", "--target", str(self.init[name][1]), "--net", "--uts", "--mount",
                "--pid", "env", "--chdir", os.getcwd(), f"TMPDIR={self.folder}/tmp", "setpriv",
                "--pdeathsig", "KILL", *map(str, argv)]


def _finish(command, limit=LIMIT, check=True, **options):
    try:
        process = subprocess.run(command, text=True, capture_output=True,
                                 timeout=limit * patience(), **options)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command)} did not end in {limit} s") from None
    if check and process.returncode:
        raise OSError(f"{' '.join(command)}: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


def until(holds, limit, event, log=None):
    """Wait until holds() returns a true value; return that value.

    Raises: TimeoutError after `limit` seconds, more on a busy machine; it says that `event` did not
        happen, with the end of the file `log`
    """
    started, limit = time.monotonic(), limit * patience()
    while not (value := holds()):
        if time.monotonic() - started > limit:
            tail = Path(log).read_text(errors="replace").splitlines()[-5:] if log else []
            raise TimeoutError("\n    ".join([f"{event}: not in {limit:.0f} s", *tail]))
        time.sleep(0.1)
    return value


def remove_leftovers():
    """Remove the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def missing():
    """Return a sentence on why this machine can't have hosts; "" if it can."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "needs root: hosts are network namespaces"
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if absent:
        return f"needs root and {', '.join(absent)}, of util-linux and iproute2"
    try:
        with Hosts(1) as hosts:
            hosts.shape("node1", 200)
    except OSError as error:
        return f"needs root that may make network namespaces: {error}"
    return ""
