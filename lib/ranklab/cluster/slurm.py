"""A real Slurm over Hosts: slurmctld and accounting on "ctl", a slurmd on each node (lab 15).

The daemons, their messages, queue and accounting are real. The hardware is emulated: nodes claim
GPUs that they don't have, and slurm.conf sets short waits. The hosts isolate processes, so there
are no cgroups.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from ranklab.cluster import hosts as machines
from ranklab.cluster.hosts import CONTROLLER, until

DAEMONS = ("munged", "slurmctld", "slurmd")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb")
TABLES = ("/usr/share/mysql/mysql_system_tables.sql", "/usr/share/mariadb/mysql_system_tables.sql")
READY = 30  # seconds for a daemon
PATH = 70  # characters: slurmd's sockets add 31 and a job's number, and the system takes 107
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

# The short waits: a silent node is DOWN after 5 s (SlurmdTimeout; 300 by default), and a
# requeued job may start after 5 s (cred_expire; 120 by default).
SLURM_CONF = """
ClusterName=ranklab
SlurmctldHost=ctl({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=5
MessageTimeout=5
TCPTimeout=2
KillWait=2
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{accounting}
"""
WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePass={folder}/munge.socket
"""
SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=ctl
DbdAddr={address}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=3306
StorageUser=root
StorageLoc=slurm_acct
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""


class Slurm:
    """A cluster that takes jobs, on Hosts; it ends with them.

    gpus, cpus: numbers that each node claims to have
    no_sacct: why there is no accounting; "" if there is
    Raises: TimeoutError if a daemon does not start, with the end of its log; OSError if the path of
        the hosts' folder is too long for sockets
    """

    def __init__(self, hosts, gpus=2, cpus=2):
        self.hosts, self.folder = hosts, hosts.folder
        if len(str(self.folder)) > PATH:
            raise OSError(f"{self.folder} has {len(str(self.folder))} characters, and Slurm's "
                          f"sockets need {PATH} or fewer: set TMPDIR to a shorter one")
        self.no_sacct = self._why_no_sacct()
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")} | {
            name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_"))}
        self._configure(gpus, cpus)
        self._daemon(CONTROLLER, "munged", "--foreground", "--force",
                     *(f"--{name}={self.folder}/munge.{ending}" for name, ending in (
                         ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"),
                         ("log-file", "log"), ("seed-file", "seed"))))
        until((self.folder / "munge.socket").exists, READY, "munged", self.folder / "munged.out")
        if not self.no_sacct:
            self._start_accounting()
        self._daemon(CONTROLLER, "slurmctld", "-D")
        for name in hosts.names:
            self.start_node(name)
        for name in hosts.names:
            self.wait_for_node(name, "idle", READY, self.folder / f"slurmd.{name}.log")

    # --- its daemons ------------------------------------------------------------------------------

    def _configure(self, gpus, cpus):
        values = {"folder": self.folder, "address": self.hosts.address(CONTROLLER), "gpus": gpus,
                  "cpus": cpus, "nodes": len(self.hosts.names)}
        accounting = "" if self.no_sacct else WITH_ACCOUNTING.format(**values)
        for name, text in (("slurm.conf", SLURM_CONF.format(accounting=accounting, **values)),
                           ("slurmdbd.conf", SLURMDBD_CONF.format(**values)),
                           ("cgroup.conf", "CgroupPlugin=cgroup/v1\n"),  # see start_node
                           ("gres.conf", f"Name=gpu File={self.folder}/gpu[0-{gpus - 1}]\n")):
            (self.folder / name).write_text(text)
        os.chmod(self.folder / "slurmdbd.conf", 0o600)
        for gpu in range(gpus):
            new_device(self.folder / f"gpu{gpu}")
        for name in ("state", *(f"spool.{node}" for node in self.hosts.names)):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        os.chmod(self.folder / "munge.key", 0o600)

    def _daemon(self, host, *argv, name=None):
        with open(self.folder / f"{name or argv[0]}.out", "w") as out:
            return self.hosts.popen(host, argv, stdout=out, stderr=out, env=self.environment)

    def start_node(self, name):
        """Start a slurmd on the host. It needs a folder of cgroups, but puts nothing there."""
        self._daemon(name, "sh", "-c", f"mount -t tmpfs none /sys/fs/cgroup && "
                     f"exec slurmd -D -N {name}", name=f"slurmd.{name}")

    def _why_no_sacct(self):
        absent = [name for name in ACCOUNTING if not shutil.which(name)]
        if absent:
            return f"no sacct: it needs {', '.join(absent)} (apt install slurmdbd mariadb-server)"
        return "" if any(map(os.path.exists, TABLES)) else "no sacct: it needs MariaDB's tables"

    def _start_accounting(self):
        """Start a database without users, because only this host can reach it. Of MariaDB's own
        tables it has only the one for stored procedures: a full installation takes ten seconds.
        """
        folder, client = self.folder / "database", ("mariadb", "--no-defaults", "-h", "127.0.0.1")
        folder.mkdir()
        self._daemon(CONTROLLER, "mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}",
                     f"--socket={self.folder}/mariadb.socket", "--bind-address=127.0.0.1",
                     "--skip-grant-tables", "--innodb-log-file-size=4M",
                     "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900")
        until(lambda: "mysql" in self._run(*client, "-e", "create database if not exists mysql; "
                                           "show databases", check=False),
              READY, "mariadbd", self.folder / "mariadbd.out")
        tables = Path(next(filter(os.path.exists, TABLES))).read_text()
        procedures = re.search(r"^CREATE TABLE IF NOT EXISTS proc .*$", tables, re.M)[0]
        self._run(*client, "mysql", "-e", procedures)
        self._daemon(CONTROLLER, "slurmdbd", "-D")
        until(lambda: "ranklab" in self._run("sacctmgr", "-n", "-i", "add", "cluster", "ranklab",
                                             check=False),
              READY, "slurmdbd", self.folder / "slurmdbd.log")

    def _run(self, *argv, check=True):
        return self.hosts.run(CONTROLLER, argv, check=check, env=self.environment)

    # --- jobs and nodes ---------------------------------------------------------------------------

    def submit(self, path, *arguments, options=(), **environment):
        """Run sbatch `options` path `arguments`, with these variables added; return the job ID."""
        output = self.hosts.run(CONTROLLER, ["sbatch", "--parsable", *options, path, *arguments],
                                env=self.environment | environment)
        return int(output.split(";")[0])

    def show(self, job):
        """Return Slurm's record of the job.

        {"JobState": "RUNNING", "NodeList": "node[1-2]", "Restarts": "0", ...}
        """
        return dict(re.findall(r"(\S+?)=(\S*)", self._run("scontrol", "-o", "show", "job", job)))

    def state(self, job):
        return self.show(job)["JobState"]

    def nodes_of(self, job):
        """Return the names of the nodes on which the job runs; the first one runs its script."""
        nodes = self.show(job)["NodeList"]
        return self._run("scontrol", "show", "hostnames", nodes).split()

    def wait_for(self, job, state, limit, log=None):
        """Wait until the job is in this state, or has completed since then; return its `show`.

        Raises: TimeoutError after `limit` seconds; RuntimeError if the job ends in a different
            state. Both include the end of the file `log`.
        """
        def reached():
            record = self.show(job)
            if record["JobState"] in (state, "COMPLETED"):
                return record
            if record["JobState"] in ENDED:
                tail = Path(log).read_text(errors="replace")[-2000:] if log else ""
                raise RuntimeError(f"job {job} is {record['JobState']}, not {state}\n{tail}")
            return None

        return until(reached, limit, f"job {job} {state}", log or self.folder / "slurmctld.log")

    def node_state(self, name):
        """Return "idle", "mix", "alloc" or "down*": the star means that the node does not answer.
        """
        return self._run("sinfo", "-h", "-N", "-n", name, "-o", "%t", check=False).strip()

    def why_down(self, name):
        """Return Slurm's words: "Not responding [root@2026-01-31T12:00:00]"; "" if it isn't down.
        """
        output = self._run("scontrol", "-o", "show", "node", name)
        return "".join(re.findall(r" Reason=(.*?\])", output))

    def wait_for_node(self, name, state, limit, log=None):
        """Wait until the node is in this state.

        Raises: TimeoutError after `limit` seconds, with the end of `log`, or of slurmctld's log.
        """
        until(lambda: self.node_state(name).startswith(state), limit, f"{name} {state}",
              log or self.folder / "slurmctld.log")

    def accounting(self, job):
        """Return a row for each start of the job.

        [{"State": "NODE_FAIL", "NodeList": "node[1-2]", ...}]
        """
        names = "State,NodeList,Elapsed,ExitCode"
        rows = self._run("sacct", "-D", "-X", "-P", "-n", "-j", job, f"--format={names}")
        return [dict(zip(names.split(","), row.split("|"))) for row in rows.splitlines()]


def new_device(path):
    """Create a device like /dev/null at `path`, because Slurm needs devices for GPUs."""
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


def missing():
    """Return a sentence on why Slurm can't run here; "" if it can."""
    absent = [name for name in DAEMONS if not shutil.which(name)]
    if absent:
        return f"needs Slurm: {', '.join(absent)} (apt install slurm-wlm munge)"
    if sentence := machines.missing():
        return sentence
    try:
        with tempfile.TemporaryDirectory() as folder:
            new_device(Path(folder, "gpu0"))
    except OSError as error:  # root of a container of its own user, as podman's, may not
        return f"needs root that may make device files: {error}"
    return ""
