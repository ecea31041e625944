"""Job: a training job, with everything that a scheduler must know (lab 15)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A job under torchrun: one agent on each node, one rank on each GPU.

    command   arguments of each rank's Python: ("-m", "ranklab.projects.hybrid", "--size", "10b")
    minutes   the scheduler ends the job after this time
    save_seconds  how long a save may take after a signal; a minute more must fit into the job
    restarts  how often torchrun may restart all ranks on the same nodes
    requeues  how often the scheduler may start the whole job again
    interface name of the interface between nodes; "": NCCL or gloo chooses
    image     of the job's container in Kubernetes
    """

    name: str
    nodes: int
    gpus: int
    command: tuple[str, ...]
    cpus: int = 8  # for each GPU
    minutes: int = 24 * 60
    save_seconds: int = 300
    restarts: int = 3
    requeues: int = 10
    interface: str = ""
    image: str = ""
    environment: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if min(self.nodes, self.gpus, self.cpus, self.minutes) < 1:
            raise ValueError(f"nodes={self.nodes}, gpus={self.gpus}, cpus={self.cpus} and "
                             f"minutes={self.minutes} must be at least 1")
        if not self.command or min(self.save_seconds, self.restarts, self.requeues) < 0:
            raise ValueError("a job needs a command, and none of its numbers may be below 0")
        if self.save_seconds + 60 >= 60 * self.minutes:
            raise ValueError(f"a save of {self.save_seconds} s and a minute to requeue do not fit "
                             f"into a job of {self.minutes} minutes")
