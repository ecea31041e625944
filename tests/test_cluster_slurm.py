"""A real Slurm on hosts inside this machine: `make slurm` runs this, and CI; `make test` does not.

What a host is, what the project finds, and that nothing stays when its process is killed.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ranklab.cluster import hosts, slurm
from ranklab.cluster.hosts import Hosts, until
from ranklab.projects.cluster import links
from ranklab.projects.cluster.node_loss import lose_a_node, watching

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if sentence := hosts.missing():
        pytest.skip(sentence)


@pytest.fixture(autouse=True)
def nothing_stays():
    """After success and failure alike: no process in a host of ours, and no folder."""
    yield
    ours = f"{hosts.FOLDER}{os.getpid()}-"
    until(lambda: not processes(ours), 10, "the end of all processes")
    assert not [*Path(tempfile.gettempdir()).glob(f"{ours}*")]


@pytest.fixture(scope="module")
def daemons(namespaces):
    if sentence := slurm.missing():
        pytest.skip(sentence)


def test_a_job_that_loses_a_node_ends_as_if_nothing_had_happened(daemons):
    said = []
    with Hosts(3) as machines, watching(machines, print) as monitor:
        cluster = slurm.Slurm(machines)
        assert lose_a_node(cluster, monitor, both(said))
    text = "\n".join(said)
    assert "Slurm calls it DOWN: Not responding" in text and " 0 differ from" in text
    assert re.findall("sacct: ([A-Z_]+)", text) == ["NODE_FAIL", "COMPLETED"] or cluster.no_sacct
    if monitor:
        assert " tokens/s, MFU " in text
        assert "an alert reaches the webhook: node2: none of its ranks answers" in text


def both(said):
    """Prints, and keeps what is printed."""
    def say(*words):
        print(*words, flush=True)
        said.append(" ".join(map(str, words)))

    return say


def test_links_slow_flapping_and_cut():
    found = links.measure_links(print)
    assert found["flat"] > 1.5 * found["hierarchical"] and found["formula"] == 3
    assert links.FLAP * 0.5 < found["flapped"] < found["limit"]
    assert found["step"] < found["flapped"] / 4
    assert found["missing"] == ["node2"] and len(found["failures"]) == 4
    assert all(each["seconds"] < found["limit"] + 2 for each in found["failures"])


def test_a_host_has_a_name_processes_and_a_link_of_its_own():
    with Hosts(2) as machines:
        assert machines.run("node2", ["hostname"]) == "node2\n"
        assert "pytest" not in machines.run("node1", ["ps", "axww"])
        assert machines.run("node1", ["pwd"]).strip() == os.getcwd()
        serve = [sys.executable, "-m", "http.server", "--bind", "node1", "8000"]
        with open(machines.folder / "log", "w") as log:
            server = machines.popen("node1", serve, stdout=log, stderr=log)
        until(lambda: reaches(machines, "node2"), 20, "a web server on node1")
        ways = machines.run("node1", ["ip", "route"]).splitlines()
        assert len(ways) == 1 and ways[0].startswith("10.77.0.0/24 dev eth0")  # none leads out
        assert "10.77.0." not in subprocess.check_output(["ip", "address"], text=True)
        machines.cut("node1")
        assert not reaches(machines, "node2")
        machines.join("node1")
        until(lambda: reaches(machines, "node2"), 20, "node1 behind its link")
        machines.power_off("node1")
        assert server.wait(10) and not reaches(machines, "node2")
        machines.power_on("node1")
        with pytest.raises(OSError, match="No such file"):
            machines.run("node1", ["no-such-command"])


def reaches(machines, name):
    code = "import urllib.request as u; u.urlopen('http://node1:8000', timeout=1)"
    return "ok" in machines.run(name, ["sh", "-c", f'{sys.executable} -c "{code}" && echo ok'],
                                check=False)


def test_what_does_not_come_is_named_with_the_end_of_a_log(daemons):
    with Hosts(1) as machines:
        cluster = slurm.Slurm(machines)
        with pytest.raises(TimeoutError, match="node1 down: not in .* s\n    "):
            cluster.wait_for_node("node1", "down", 0.2)
        script = machines.folder / "fails.sh"
        script.write_text("#!/bin/sh\necho it is broken\nexit 3\n")
        log = machines.folder / "fails.log"
        job = cluster.submit(script, options=[f"--output={log}"])
        with pytest.raises(RuntimeError, match="(?s)job 1 is FAILED, not COMPLETED.*it is broken"):
            cluster.wait_for(job, "COMPLETED", 60, log)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_of_a_process_that_is_killed(number, daemons):
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:  # short: sockets lie in it
        folder, before = Path(folder), traces(folder)
        run = subprocess.Popen([sys.executable, "-m", "ranklab.projects.cluster", "--only", "job"],
                               env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
        sign = "saved/*/index.json" if number == signal.SIGKILL else "job.log"
        until(lambda: [*folder.glob(f"*/{sign}")] or run.poll() is not None, 120, sign)
        assert {"slurmctld", "slurmd"} < {name for name, _ in processes(folder)}
        run.send_signal(number)
        said = run.communicate(timeout=30)[0]
        until(lambda: traces(folder) == before, 20, "the end of all processes")
        left = [path.name.partition("-hosts-")[0] for path in folder.iterdir()]
        assert left == (["ranklab"] if number == signal.SIGKILL else []), said
        forget = "from ranklab.cluster import hosts; hosts.remove_leftovers()"  # as a next Hosts
        subprocess.run([sys.executable, "-c", forget], env=os.environ | {"TMPDIR": str(folder)})
        assert not [*folder.iterdir()]


def traces(folder):
    """Processes of this folder, and what the machine has: interfaces, named networks, mounts."""
    found = {f"interface {name}" for _, name in socket.if_nameindex()}
    found |= {f"mount {line.split()[4]}" for line in
              Path("/proc/self/mountinfo").read_text().splitlines()}
    return found | {f"network {path}" for path in Path("/run/netns").glob("*")} | processes(folder)


def processes(folder):
    """(name, number) of those with this folder for temporary files or in their command line."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            name = (process / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        if str(folder).encode() in said:
            found.add((name, process.name))
    return found
