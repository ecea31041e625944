"""Commands that stand in for Slurm's and torchrun while sbatch_script's text is run by bash.

    python -IS slurm_stub.py FOLDER NAME ARGUMENTS...       # as scontrol, srun, torchrun, ...

FOLDER/way.json says what shall happen, and FOLDER/log has a line of JSON for each thing that did.
What each does with options and signals is in the man pages, or was seen on Slurm 22.05 with two
nodes: srun ends its tasks by SIGKILL when it gets a SIGTERM, and hands SIGUSR1 on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

# srun's long options without a value, or whose value is optional and follows a "=".
FLAGS = ("contiguous disable-status exact help hold label multi-prog no-allocate overcommit "
         "overlap oversubscribe preserve-env pty quiet quit-on-interrupt reboot spread-job "
         "test-only unbuffered usage use-min-nodes verbose version bcast compress exclusive "
         "immediate kill-on-bad-exit nice no-kill propagate resv-ports send-libs x11").split()
SHORT = {"c": "cpus-per-task", "K": "kill-on-bad-exit", "W": "wait", "n": "ntasks", "N": "nodes",
         "l": "label", "u": "unbuffered", "v": "verbose", "Q": "quiet", "O": "overcommit",
         "E": "preserve-env", "s": "oversubscribe", "X": "disable-status", "k": "no-kill"}
HANGS = 20  # seconds, and then it ends by itself


def log(folder, **event):
    with open(f"{folder}/log", "ab", buffering=0) as file:  # one write: lines of many don't mix
        file.write(json.dumps(event).encode() + b"\n")


def events(folder):
    with open(f"{folder}/log", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def hosts(text):
    """ "gpu[07,12-13],login" -> [gpu07, gpu12, gpu13, login]"""
    for name, numbers in re.findall(r"([^\[,]+)(?:\[([^\]]*)\])?", text):
        for part in numbers.split(",") if numbers else [""]:
            low, _, high = part.partition("-")
            yield from [name + part] if not high else (
                f"{name}{i:0{len(low)}}" for i in range(int(low), int(high) + 1))


def options(arguments):
    """({long name: value}, the command that follows them)"""
    found, rest = {}, list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, has_value, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, has_value, value = SHORT.get(word[1], word[1]), word[2:], word[2:]
        if not has_value and name not in FLAGS:
            value = rest.pop(0) if rest else ""
        found[name] = value
    return found, rest


def scontrol(folder, way, arguments):
    words = [word for word in arguments if not word.startswith("-")]
    if words[:1] == ["show"] and words[1:] and "hostnames".startswith(words[1].lower()):
        print(*hosts((words[2:] or [os.environ["SLURM_JOB_NODELIST"]])[0]), sep="\n")
    elif words[:1] == ["requeue"]:
        if way.get("fixed"):
            sys.exit("scontrol: error: Requested operation is presently disabled")
        log(folder, what="requeue", job="".join(words[1:]))
        os.killpg(os.getpgrp(), signal.SIGKILL)  # Slurm ends the script, and us


def scancel(folder, way, arguments):
    """Its signal goes to the steps; with --batch to the script alone. Without one, all is over."""
    text = " ".join(arguments)
    name = re.search(r"(?:--signal[= ]|-s ?)(?:SIG)?(\w+)", text)
    log(folder, what="scancel", signal=name[1] if name else "")
    if name and not re.search(r"--batch|(^| )-b\b", text):
        send(folder, name[1])


def send(folder, name):
    """The signal to all processes of all tasks."""
    number = int(name) if name.isdigit() else getattr(signal, f"SIG{name}")
    for task in [event for event in events(folder) if event["what"] == "task"]:
        try:
            os.killpg(task["group"], number)
        except ProcessLookupError:
            pass


def srun(folder, way, arguments):
    found, command = options(arguments)
    log(folder, what="srun", options=found, environment=dict(os.environ))
    names = list(hosts(os.environ["SLURM_JOB_NODELIST"]))
    number = found.get("ntasks") or os.environ["SLURM_NTASKS"]
    tasks, codes = [], {}
    for task in range(int(number)):
        node = task % len(names)
        mine = dict(os.environ, SLURM_NODEID=str(node), SLURM_PROCID=str(task), SLURM_LOCALID="0",
                    SLURM_STEP_ID="0", SLURMD_NODENAME=names[node])
        tasks.append(subprocess.Popen(command, env=mine, start_new_session=True))
        log(folder, what="task", group=tasks[-1].pid, node=node)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: (log(folder, what="srun ends all"), send(folder, "KILL")))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda got, _: send(folder, str(int(got))))
    end = time.monotonic() + HANGS
    while len(codes) < len(tasks) and time.monotonic() < end:
        codes |= {task.pid: task.poll() for task in tasks if task.poll() is not None}
        time.sleep(0.01)
    send(folder, "KILL")
    sys.exit(max(128 - code if code < 0 else code for code in codes.values()) if codes else 1)


def torchrun(folder, way, arguments):
    """An agent, which does what way["agent"] says; its ranks save when it gets a SIGTERM."""
    node = int(os.environ["SLURM_NODEID"]) if "SLURM_STEP_ID" in os.environ else -1
    saved = []

    def save(*_):
        if not saved:  # a second signal changes nothing
            saved.append(True)
            log(folder, what="saves", node=node)
            time.sleep(0.15 + 0.25 * (node == 0))
            log(folder, what="saved", node=node)
            os._exit(1)

    signal.signal(signal.SIGTERM, save)
    log(folder, what="torchrun", node=node, arguments=arguments, environment=dict(os.environ))
    if way.get("waits"):
        time.sleep(HANGS)
    sys.exit(way.get("code", 0))


def main():
    folder, name, *arguments = sys.argv[1:]
    with open(f"{folder}/way.json", encoding="utf-8") as file:
        way = json.load(file)
    if name in ("python", "python3"):
        if arguments[:1] == ["-c"]:
            os.execv(sys.executable, [sys.executable, "-IS", *arguments])
        module = arguments[1] if arguments[:1] == ["-m"] else ""
        if module not in ("torch.distributed.run", "torch.distributed.launch"):
            log(folder, what="python", arguments=arguments)
            return
        name, arguments = "torchrun", arguments[2:]
    if name == "sleep":
        time.sleep(0.05)
    elif name == "hostname":
        print(os.environ["SLURMD_NODENAME"])
    else:
        {"scontrol": scontrol, "scancel": scancel, "srun": srun, "torchrun": torchrun}[name](
            folder, way, arguments)


if __name__ == "__main__":
    main()
