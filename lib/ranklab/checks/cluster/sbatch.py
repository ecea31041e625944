"""The check of sbatch_script: its options are read, and its text is run by a real bash."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ranklab.checks.beside import expect
from ranklab.checks.cluster.batch_run import HEAD, header, minutes, run, torchrun_options
from ranklab.checks.exercise import Mistake
from ranklab.cluster.job import Job

ENVIRONMENT = (("DATA", "/data/my text.bin"), ("NOTE", "it's $HOME, \"so\" `x`; \\ #1"),
               ("LINES", "one\ntwo"), ("EMPTY", ""))
LARGE = Job("gpt-70b", 4, 8, ("-m", "train", "--size", "70b"), 7, minutes=1530, save_seconds=240,
            restarts=2, requeues=4, environment=ENVIRONMENT)
SMALL = Job("digits", 1, 2, ("train.py", "--note", "two words; it's $5"), minutes=20,
            save_seconds=45, restarts=0, requeues=0, interface="ib0", image="nvcr.io#nvidia/x:26.1")
AGAIN = ("code=$? after srun; if it is not 0, and ${SLURM_RESTART_COUNT:-0} is below job.requeues: "
         'scontrol requeue "$SLURM_JOB_ID". At first the variable is not set. After set -e a '
         "script ends where srun fails.")
KILLWAIT = "Slurm gives it KillWait (30 s by default) from its SIGTERM to its SIGKILL"


def gpus(options, nodes):
    """GPUs of a node, by whichever option."""
    tres = re.fullmatch(r"gpu(?::[^:,]+)?:(\d+)", options.get("gres", ""))
    number = options.get("gpus-per-node") or options.get("gpus-per-task") or (tres and tres[1])
    number = number or options.get("gpus", "0")
    whole = int(str(number).rpartition(":")[2])
    return whole / nodes if "gpus" in options and number == options["gpus"] else whole


def check_options(options, job):
    nodes = set(options.get("nodes", "").split("-"))
    cpus, per_gpu = options.get("cpus-per-task"), options.get("cpus-per-gpu")
    tasks = options.get("ntasks-per-node"), options.get("ntasks")
    expect(nodes == {str(job.nodes)}, f"--nodes is {options.get('nodes')}, not {job.nodes}", "")
    expect(options.get("job-name") == job.name, f"--job-name is {options.get('job-name')!r}", "")
    expect(tasks != (str(job.gpus), None), f"{job.gpus} tasks a node", "A task is a torchrun, "
           "which starts a node's ranks itself: with --ntasks-per-node=gpus there are gpus x gpus.")
    expect(tasks in (("1", None), (None, str(job.nodes)), ("1", str(job.nodes))), "tasks of a node "
           f"and of all: {tasks}", "--ntasks-per-node=1: one torchrun on each.")
    expect(gpus(options, job.nodes) == job.gpus, f"{gpus(options, job.nodes):g} GPUs a node, not "
           f"{job.gpus}", "--gpus-per-node counts one node's; --gpus all of the job.")
    expect(cpus == str(job.cpus * job.gpus) or per_gpu == str(job.cpus), f"--cpus-per-task is "
           f"{cpus}, not {job.cpus * job.gpus}", "The one task of a node is all of its ranks: "
           "job.cpus for each of job.gpus.")
    try:
        time = minutes(options.get("time", ""))
    except ValueError:
        time = 0
    expect(time == job.minutes, f"--time is {time:g} minutes, not {job.minutes}", "A number alone "
           "is minutes; 25:30:00 is hours, minutes, seconds, and 25:30 minutes and seconds.")
    expect("requeue" in options and "no-requeue" not in options, "no --requeue", "Then Slurm takes "
           "the job of a dead node back into the queue.")
    expect(options.get("open-mode", "")[:1] == "a", "a requeue truncates the output",
           "--open-mode=append.")
    expect("%j" in options.get("output", "slurm-%j.out"), f"--output={options.get('output')}",
           "With %j in it: jobs of one name write into one file otherwise.")
    when = re.fullmatch(r"(?:[RB]+:)?\w+(?:@(\d+))?", options.get("signal", ""), re.I)
    expect(when, "no --signal", "Without it ranks learn nothing of the end, and nothing is saved.")
    expect(job.save_seconds <= int(when[1] or 60) <= job.save_seconds + 120, f"--signal="
           f"{options['signal']} comes {when[1] or 60} s before the end; to save takes "
           f"{job.save_seconds}", "@job.save_seconds.")


def agents(ran, job, where):
    """The options of each host's torchrun; all is as the job says."""
    found = sorted(ran.of("torchrun"), key=lambda event: event["node"])
    if not found:
        raise Mistake(f"{where}: no torchrun ran" + ", but python did" * bool(ran.of("python")),
                      " ".join(ran.said.split())[-300:])
    nodes = [event["node"] for event in found]
    expect(nodes[0] >= 0, f"{where}: torchrun runs without srun", "The script itself runs on the "
           "first host alone: srun starts a task on each.")
    expect(nodes == list(range(job.nodes)), f"{where}: agents on hosts {nodes} of {job.nodes}",
           "One task a host.")
    parsed = [torchrun_options(event) for event in found]
    for event, options in zip(found, parsed):
        check_torchrun(options, event["environment"], job, where)
    expect(len({(each.rdzv_id, each.rdzv_endpoint) for each in parsed}) == 1, f"{where}: hosts "
           f"meet at {', '.join(each.rdzv_endpoint for each in parsed)}", "All of them at the "
           "first host, with one id: ask scontrol before srun, in the batch script.")
    return parsed[0]


def check_torchrun(options, environment, job, where):
    host, _, port = options.rdzv_endpoint.rpartition(":")
    got = ["-m"] * options.module + [options.training_script, *options.training_script_args]
    if options.no_python and "python" in got[0]:
        got = got[2:] if got[1] == "-u" else got[1:]
    told = {"--nnodes": (options.nnodes.removeprefix(f"{job.nodes}:"), str(job.nodes)),
            "--nproc-per-node": (options.nproc_per_node, str(job.gpus)),
            "--max-restarts": (options.max_restarts, job.restarts)}
    for name, (number, right) in told.items():
        expect(number == right, f"{where}: {name} is {number}, not {right}", {
            "--nproc-per-node": "A rank for each GPU of the node.",
            "--max-restarts": "job.restarts of all ranks by torchrun; job.requeues are Slurm's.",
        }.get(name, "All hosts of the job, also for its ranks to begin together."))
    expect(got == list(job.command), f"{where}: ranks run {got}, not {list(job.command)}",
           "shlex.join(job.command) quotes what a shell would split or expand.")
    if not (options.standalone and job.nodes == 1):
        expect(options.rdzv_backend == "c10d", f"{where}: --rdzv-backend={options.rdzv_backend!r}",
               "c10d: the hosts meet at one of them, and again after a restart.")
        expect(host == HEAD, f"{where}: they meet at {host!r}, not at {HEAD}, the first of "
               "gpu[07,12-13]", 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1')
        expect(port.isdigit() and 1024 <= int(port) < 65536, f"{where}: port {port!r}", "From 1024 "
               "to 65535: job numbers grow beyond, so take a remainder.")
    seconds = getattr(options, "shutdown_timeout", None)
    seconds = float(seconds or environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
    expect(seconds >= job.save_seconds, f"{where}: torchrun kills its ranks {seconds:g} s after a "
           f"SIGTERM; to save takes {job.save_seconds}", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT.")
    for name, text in job.environment:
        expect(environment.get(name) == text, f"{where}: {name} is {environment.get(name)!r}, not "
               f"{text!r}", "export, in the script, with shlex.quote: nothing is expanded in "
               "'...'. #SBATCH --export cuts at commas.")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        got = environment.get(name)
        expect(got in ((job.interface, f"={job.interface}") if job.interface else (None,)),
               f"{where}: {name} is {got!r}; the job's interface is {job.interface!r}", "Set both "
               "where an interface is given. An empty one is not the same as none.")


def check_srun(ran, options, job, where):
    step = ran.of("srun")[-1]  # there may be others before, to ask a host for its address
    cpus = step["options"].get("cpus-per-task") or step["environment"].get("SRUN_CPUS_PER_TASK")
    expect(cpus == str(job.cpus * job.gpus) or "cpus-per-gpu" in options, f"{where}: srun is given "
           f"{cpus or 1} CPUs", "Since Slurm 22.05 it does not take --cpus-per-task over from "
           "sbatch: all ranks of a node would share one CPU. Say it to srun again.")
    kills, least = step["environment"].get("SLURM_KILL_BAD_EXIT", "0"), max(30, job.save_seconds)
    expect(step["options"].get("kill-on-bad-exit", kills) == "0", f"{where}: srun's "
           "--kill-on-bad-exit: the first host that has saved ends the others while they save",
           f"An agent ends with 1 after a SIGTERM. {KILLWAIT}. --wait leaves the others time.")
    waits = step["options"].get("wait") or step["environment"].get("SLURM_WAIT") or "0"
    expect(waits.isdigit() and least <= int(waits) <= least + 3600, f"{where}: srun's --wait is "
           f"{waits}", f"When an agent has died, the others wait for it: srun ends them so many "
           f"seconds later, and never with 0, the default. {least}: as a save, at least 30.")
    image = step["options"].get("container-image", "")
    expect(image == job.image, f"{where}: srun's --container-image is {image!r}, not {job.image!r}",
           "Where the job has an image, and nowhere else.")
    expect((ran.code, ran.of("requeue")) == (0, []), f"{where}: the training ended well, the "
           f"script with {ran.code}" + " after a requeue" * bool(ran.of("requeue")), "Then 0.")


def check_end(ran, where, requeues):
    asked = [event["job"] for event in ran.of("requeue")]
    if requeues:
        expect(asked, f"{where}: srun fails, and the job is not requeued", AGAIN)
        expect(asked == ["4711"], f"{where}: it requeues {asked}", "$SLURM_JOB_ID, once.")
        return
    expect(not asked, f"{where}: it is requeued", AGAIN)
    expect(ran.code == 7, f"{where}: srun ends with 7, the script with {ran.code}", "exit with "
           "srun's code, taken in the next line: every command changes $?.")


def check_signal(ran, signalled, job):
    where = f"--signal={signalled}, {job.save_seconds} s before the end"
    saves, saved, asked = ran.of("saves"), ran.of("saved"), ran.of("requeue")
    expect(not ran.of("srun ends all"), f"{where}: the script sends it to srun: that kills ranks",
           "At a SIGTERM srun ends its tasks by SIGKILL. scancel --signal=TERM $SLURM_JOB_ID sends "
           "it to them; so does #SBATCH --signal=TERM@..., without B: and without a trap.")
    is_of_all = "B" not in signalled.rpartition(":")[0].upper()
    expect(saves or not is_of_all, f"{where}: no rank gets a SIGTERM", "Without B: all processes "
           "of all tasks get it. torchrun ends at a SIGUSR1, and its ranks, too: send TERM.")
    expect(saves or asked, f"{where}: no rank gets a SIGTERM", "With B: the batch script alone "
           "gets it, and bash runs a trap when srun has ended, unless it is srun ... & and wait.")
    expect(len(saved) == job.nodes, f"{where}: {len(saved)} of {job.nodes} hosts have saved when "
           "the script " + ("requeues the job" if asked else "ends"), "A trap ends `wait`: wait "
           f"again, until srun has ended. At a requeue {KILLWAIT}.")
    expect(asked, f"{where}: all is saved, and the job is not requeued", AGAIN)


def check_sbatch_script(sbatch_script):
    scripts = {job: sbatch_script(job) for job in (LARGE, SMALL)}
    options = {job: header(script) for job, script in scripts.items()}
    for job in scripts:
        check_options(options[job], job)
    yield "#SBATCH lines ask for nodes, one task on each, GPUs, CPUs, time, signal, requeue, output"
    large, small = partial(run, scripts[LARGE], LARGE), partial(run, scripts[SMALL], SMALL)
    ran = at_once(large=large, small=small, other=partial(large, number=67108863))
    found = {}
    for name, job in (("large", LARGE), ("small", SMALL), ("other", LARGE)):
        where = f"{job.nodes} host{'s' * (job.nodes > 1)} of {job.gpus} GPUs"
        found[name] = agents(ran[name], job, where)
        check_srun(ran[name], options[job], job, where)
    first, other = found["large"], found["other"]
    expect(first.rdzv_endpoint != other.rdzv_endpoint, "jobs 4711 and 67108863 meet at one port: "
           f"{other.rdzv_endpoint}", "They may share a host: 20000 + SLURM_JOB_ID % 10000, say.")
    expect(first.rdzv_id != other.rdzv_id, f"jobs 4711 and 67108863 have one id, {other.rdzv_id}",
           "")
    yield "run by bash: one torchrun on each host; ranks, command, environment are the job's"
    signalled = options[LARGE]["signal"]
    ran = at_once(first=partial(large, code=7), last=partial(large, code=7, restarts=3),
                  over=partial(large, code=7, restarts=4), never=partial(small, code=7),
                  held=partial(large, code=7, fixed=True),
                  signal=partial(large, signalled=signalled, waits=True))
    check_end(ran["first"], "in its first life", requeues=True)
    check_end(ran["last"], "after 3 restarts of 4", requeues=True)
    check_end(ran["over"], "after 4 restarts of 4", requeues=False)
    check_end(ran["never"], "requeues=0", requeues=False)
    check_end(ran["held"], "a job that scontrol can't requeue", requeues=False)
    yield "srun fails: requeued, 4 times of 4 and no more; then with srun's exit code"
    check_signal(ran["signal"], signalled, LARGE)
    yield "before the end each rank gets a SIGTERM, all hosts save, then it is requeued"


def at_once(**calls):
    """{name: its value}; each call mostly waits for bash."""
    with ThreadPoolExecutor(3) as pool:
        found = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in found.items()}
