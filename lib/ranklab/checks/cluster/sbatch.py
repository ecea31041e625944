"""sbatch_script: its options are parsed, and its text is run by a shell."""

from typing import NamedTuple

from ranklab.checks.cluster import batch_run
from ranklab.checks.cluster.findings import finding
from ranklab.checks.cluster.torchrun import LARGE, SMALL, rank_environment, torchrun_options
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.cluster.job import Job
from ranklab.cluster.sbatch import sbatch_script

SBATCH_OPTIONS = ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time",
                  "requeue", "open-mode", "signal")
SRUN_OPTIONS = "cpus-per-task", "kill-on-bad-exit", "wait"
TORCHRUN_OPTIONS = "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-id", "--max-restarts"


class Start(NamedTuple):
    """A script that runs as several jobs, which may share a host; srun exits with 0."""

    job: Job
    numbers: tuple

    def __str__(self):
        return (f"{self.job.nodes} x {self.job.gpus} GPUs, job "
                f"{' and '.join(map(str, self.numbers))}")


class Failure(NamedTuple):
    """A script whose srun exits with 7 after this many requeues; None: the variable is not set."""

    job: Job
    requeues: int | None

    def __str__(self):
        return f"srun ends with 7, after {self.requeues or 0} requeues of {self.job.requeues}"


def _see_options(fn, case):
    script = fn(case.job)
    begins = isinstance(script, str) and script.startswith("#!")
    yield {"that it is a text which begins with #! and a shell": begins}
    options = batch_run.header(script)
    yield {**{f"#SBATCH --{name}": options.get(f"--{name}") for name in SBATCH_OPTIONS},
           "#SBATCH --output": _output(options.get("--output"))}


def _output(name):
    return finding("%j" in (name or ""), f"{name!r}, without %j: all jobs with the same name write "
                                         "to the same file")


def _see_start(fn, case):
    script, ports = fn(case.job), []
    for number in case.numbers:
        run = batch_run.run(script, case.job, number)
        at = [*run.words, "torchrun"].index("torchrun")
        options, words = batch_run.options(run.words[:at]), run.words[at + 1:]
        is_torchrun = at < len(run.words) and "" not in options
        by_torchrun, endpoint = torchrun_options(words, TORCHRUN_OPTIONS)
        host, _, port = endpoint.rpartition(":")
        yield {"what srun starts on each node": _started(run, is_torchrun),
               **{f"srun --{name}": options.get(f"--{name}") for name in SRUN_OPTIONS},
               **rank_environment(case.job, run.variables), **by_torchrun,
               "the host where ranks meet": host,
               f"the port of job {number}": _port(port),
               f"the port of job {number}, which may share a host,": finding(
                   port not in ports, f"{port}, too"),
               "the script's exit code": run.code, "the job that is requeued": run.requeued}
        ports.append(port)


def _started(run, is_torchrun):
    words = run.words or run.alone * ["torchrun, without srun, on this node alone"]
    return finding("torchrun" if is_torchrun else words,
                   f"{' '.join(words) or 'nothing'}; the shell says {run.said!r}")


def _port(port):
    is_free = port.isdigit() and 1024 <= int(port) < 65536
    return finding(is_free, f"{port!r}, not one from 1024 to 65535")


def _see_end(fn, case):
    run = batch_run.run(fn(case.job), case.job, restarts=case.requeues, code=7)
    is_last = (case.requeues or 0) >= case.job.requeues
    yield {"the job that is requeued": finding(
        run.requeued, f"{run.requeued!r}; the shell says {run.said!r}"),
        **({"the script's exit code": run.code} if is_last else {})}


OPEN, HEAD = "#!/bin/bash\n", 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
TASKS, CPUS = "--ntasks-per-node=1 --gpus-per-node={job.gpus}", "--cpus-per-task={cpus}\n#"
SRUN, QUOTED = "srun --cpus-per-task={cpus} --kill-on-bad-exit=0", "={shlex.quote(text)}"
WAIT, CODE = "--wait={job.save_seconds + 30} torchrun", "code=$?\n"
EXPORT, NAMED = "export {name}=", '["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]'
PORT, LIMIT = "$((20000 + SLURM_JOB_ID % 10000))", '"${{SLURM_RESTART_COUNT:-0}}" -lt'
SHUTDOWN = '    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.save_seconds)\n'
SBATCH = Proof(
    sbatch_script,
    Stage("#SBATCH lines ask for nodes, one task on each, GPUs, CPUs, time, signal, requeue, "
          "output", _see_options, (Start(SMALL, (4711,)), Start(LARGE, (4711,))),
          note="sbatch reads only the options before the first command."),
    Stage("run by a shell: a torchrun on each host; ranks, command and variables are the job's",
          _see_start, (Start(SMALL, (59999999,)), Start(LARGE, (4711, 59965520)))),
    Stage("srun fails: requeued, 4 times and no more; then the script ends with srun's exit code",
          _see_end, (Failure(LARGE, 3), Failure(LARGE, None), Failure(LARGE, 4),
                     Failure(SMALL, 0))),
    mistakes=(
        Slip("sbatch accepts only a script whose very first characters are #!, without a blank or "
             "a line before them.", (f'f"""{OPEN}', f'f"""\n{OPEN}')),
        Slip("Give options before the first command: sbatch reads no further.",
             (OPEN, f"{OPEN}set -u\n"), (OPEN, f"{OPEN}{{exports}}\n", "{exports}\nhead", "head")),
        Slip("Each task is one torchrun, which starts all ranks of its node.",
             (TASKS, TASKS.replace("=1", "={job.gpus}"))),
        Slip("--gpus-per-node is for one node: job.gpus.",
             (TASKS, TASKS.replace("job.gpus", "job.nodes * job.gpus"))),
        Slip("A node's one task includes all of its ranks, so it needs job.cpus for each GPU.",
             (CPUS, "--cpus-per-task={job.cpus}\n#")),
        Slip("--time takes a bare number as minutes, and job.minutes is in minutes.",
             ("--time={job.minutes}", "--time={60 * job.minutes}"),
             ("--time={job.minutes}", "--time={job.minutes // 60}")),
        Slip("Without --requeue Slurm may refuse to start the job again.",
             ("append --requeue", "append")),
        Slip("Without append, a requeued job truncates the output of its previous run.",
             ("--open-mode=append ", "")),
        Slip("All processes of all tasks must get the signal. With `B:`, only the batch shell gets "
             "it.",
             ("--signal=TERM@{", "--signal=B:TERM@{")),
        Slip("Add a minute: after the longest save, srun must still end and the job be requeued.",
             ("TERM@{job.save_seconds + 60}", "TERM@{job.save_seconds}")),
        Slip("--signal takes seconds, not minutes: job.save_seconds + 60.",
             ("TERM@{job.save_seconds + 60}", "TERM@{job.save_seconds // 60 + 1}")),
        Slip("In --output, %x stands for the job's name and %j for its number.",
             ("%x-%j.log", "%x.log"), ("%x-%j.log", "{job.name}.log"), ("--output=%x-%j.log ", "")),
        Slip("Without srun, torchrun runs only on the first node, and waits for the others.",
             (f"{SRUN} {WAIT}", "torchrun")),
        Slip("Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch, so all ranks "
             "of a node would share one CPU.", (SRUN, "srun --kill-on-bad-exit=0")),
        Slip("torchrun exits with 1 after a SIGTERM. Without --kill-on-bad-exit=0, the first host "
             "to finish saving can get the others killed while they save.",
             (SRUN, SRUN.replace("exit=0", "exit=1")), (SRUN, "srun --cpus-per-task={cpus}")),
        Slip("--wait says how long the other tasks may run after one has ended: job.save_seconds + "
             "30.",
             (WAIT, "torchrun"), (WAIT, "--wait=0 torchrun"),
             (WAIT, "--wait={job.save_seconds} torchrun"),
             (WAIT, "--wait={job.save_seconds + 60} torchrun")),
        Slip("Each value of job.environment must be exported as well.",
             (" | dict(job.environment)", "")),
        Slip("Without `export`, a variable stays in the script, and no rank sees it.",
             (EXPORT, "{name}=")),
        Slip("Export each value exactly as it is in job: it may contain spaces, quotes, $ and "
             "newlines, so use shlex.quote.", (QUOTED, "={text}"), (QUOTED, '=\\"{text}\\"'),
             (QUOTED, "={text!r}")),
        Slip("The shell can't read this script: values and words may contain quotes. Use "
             "shlex.quote and shlex.join.", (QUOTED, "='{text}'")),
        Slip("torchrun kills its ranks 30 s after a SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT "
             "gives them longer.", (SHUTDOWN, "")),
        Slip("If the job has no interface, set neither variable: empty is not the same as unset.",
             (f"{NAMED} if job.interface else []", NAMED)),
        Slip("NCCL and Gloo each read their own variable: set both.",
             (NAMED, '["NCCL_SOCKET_IFNAME"]'), (NAMED, '["GLOO_SOCKET_IFNAME"]')),
        Slip("torchrun assumes one node without --nnodes, and one rank without --nproc-per-node.",
             ("--nnodes={job.nodes} ", ""), (" --nproc-per-node={job.gpus}", ""),
             ("--nnodes={job.nodes} --nproc-per-node={job.gpus} ", "")),
        Slip("--nnodes counts nodes; --nproc-per-node counts the ranks of one node.",
             ("--nnodes={job.nodes}", "--nnodes={job.nodes * job.gpus}"),
             ("--nproc-per-node={job.gpus}", "--nproc-per-node={job.nodes * job.gpus}"),
             ("--nnodes={job.nodes} --nproc-per-node={job.gpus}",
              "--nnodes={job.gpus} --nproc-per-node={job.nodes}")),
        Slip("With --rdzv-backend=c10d, hosts meet at one of them, and meet again after each "
             "restart.",
             ("--rdzv-backend=c10d -", "-"), ("--rdzv-backend=c10d -", "--rdzv-backend=static -")),
        Slip("--rdzv-id is the job's number, $SLURM_JOB_ID, which Slurm sets when the job runs.",
             ('"$SLURM_JOB_ID" \\\\\n', "{job.name} \\\\\n"),
             (' --rdzv-id="$SLURM_JOB_ID"', "")),
        Slip("job.restarts is for torchrun, which restarts the ranks; job.requeues is for the "
             "scheduler, which restarts the whole job.",
             ("--max-restarts={job.restarts}", "--max-restarts={job.requeues}"),
             (f"{LIMIT} {{job.requeues}}", f"{LIMIT} {{job.restarts}}")),
        Slip("Without --max-restarts torchrun restarts no rank.",
             (" --max-restarts={job.restarts}", "")),
        Slip("Each word of job.command must arrive unchanged, but a shell splits and expands "
             "unquoted text: use shlex.join.",
             ("{shlex.join(job.command)}", "{' '.join(job.command)}"),
             ("{shlex.join(job.command)}", '\\"{" ".join(job.command)}\\"'),
             ("{shlex.join(job.command)}", "{shlex.quote(' '.join(job.command))}")),
        Slip("The node list looks like gpu[07,12-13]: `scontrol show hostnames` expands it.",
             (HEAD, "head=${{SLURM_JOB_NODELIST%%,*}}"), (HEAD, "head=$SLURM_JOB_NODELIST")),
        Slip("Take only the first host: head -n 1.", (" | head -n 1)", ")")),
        Slip("All hosts must meet at the same one, the first: on each host, localhost means that "
             "host itself.", (HEAD, "head=localhost"), (HEAD, "head=127.0.0.1")),
        Slip("All hosts must meet at the first host of the list.",
             (" | head -n 1)", " | tail -n 1)")),
        Slip("Jobs that share a host need different ports, for example 20000 + SLURM_JOB_ID % "
             "10000.",
             (PORT, "29400"), (PORT, "{20000 + len(job.name)}")),
        Slip("Ports end at 65535, but job numbers do not: take a remainder.",
             (PORT, "$((20000 + SLURM_JOB_ID))"), (PORT, "$SLURM_JOB_ID")),
        Slip("Even with the largest remainder, the port must not be above 65535.",
             (PORT, "$((20000 + SLURM_JOB_ID % 50000))"),
             (PORT, "$((10000 + SLURM_JOB_ID % 60000))")),
        Slip("Ports below 1024 are reserved for the system.", (PORT, "$((SLURM_JOB_ID % 1000))")),
        Slip("If srun ends with 0, the job is done: don't requeue it.",
             ('[ "$code" -ne 0 ] && ', "")),
        Slip("The script ends without a requeue: after set -e it ends as soon as srun fails, and "
             "exec or exit would end it as well.", ("{exports}\n", "set -e\n{exports}\n"),
             (SRUN, f"exec {SRUN}"),
             (CODE, f'{CODE}exit "$code"\n')),
        Slip("In the first run SLURM_RESTART_COUNT is not set: use ${SLURM_RESTART_COUNT:-0}.",
             ("${{SLURM_RESTART_COUNT:-0}}", "$SLURM_RESTART_COUNT")),
        Slip("Requeue job.requeues times, and no more.",
             (LIMIT, LIMIT.replace("-lt", "-le")), (f"{LIMIT} {{job.requeues}}", "0 -lt 1")),
        Slip("Requeue one more time: SLURM_RESTART_COUNT counts as 0 in the first run, and must be "
             "below job.requeues.",
             (f"{LIMIT} {{job.requeues}}", f"{LIMIT} {{job.requeues - 1}}")),
        Slip("scontrol requeue needs the job's number.",
             ('requeue "$SLURM_JOB_ID"', "requeue")),
        Slip("$? holds srun's exit code only until the next command: save it at once.",
             (CODE, f'echo "srun has ended"\n{CODE}')),
        Slip("The script must end with srun's exit code, not with its last command's.",
             ('exit "$code"\n', ""), ('exit "$code"\n', "exit 0\n")),
        Slip("The script must end with srun's exit code, whatever it is.",
             ('exit "$code"\n', "exit $((code != 0))\n")),
    ), hints=(
        "First write it for one job by hand. What changes for another job?",
        "shlex.quote is for a value, shlex.join for a command. In an f-string, write { as {{. Only "
        "the running script knows its hosts and its job number, so let bash compute with them, not "
        "Python.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); srun .. torchrun .. '
        '--rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" {shlex.join(job.command)}; '
        "code=$?; if [ $code -ne 0 ] && [ ${SLURM_RESTART_COUNT:-0} -lt N ]; then scontrol requeue "
        "$SLURM_JOB_ID; fi; exit $code",
    ))
