"""launch in scripts: by python, by torchrun on one and on two "nodes", and by srun."""

import json
import os
import subprocess
import sys

import pytest
from engine_tools import write

from ranklab import launch
from ranklab.engine.launcher import reserved_port

pytestmark = pytest.mark.timeout(120)

RANKS = 2
JOB = """
    import os, sys
    import torch, torch.distributed as dist
    from ranklab import device, launch
    import beside                                # next to the script, wherever one starts it

    class Outcome:                               # of __main__, which no rank can import
        def __init__(self, **what):
            self.what = what

    def train(steps):
        total = torch.tensor(0.0)
        for _ in range(steps):
            x = torch.tensor(float(dist.get_rank() + beside.ONE))
            dist.all_reduce(x)
            total += x
        return Outcome(rank=dist.get_rank(), total=total.item(), device=str(device()),
                       node=int(os.environ["GROUP_RANK"]), local=int(os.environ["LOCAL_RANK"]))

    print("once", file=sys.stderr)               # there is no main guard
    first = launch(train, 1)
    second = launch(train, 2, ranks=2)           # the same number again is fine
    try:
        launch(train, 1, ranks=8, nodes=8 if "RANK" in os.environ else 3)
    except ValueError as error:
        refused = str(error)
    import json
    with open(os.environ["ANSWERS"] + "." + os.environ.get("RANK", "all"), "w") as file:
        json.dump({"first": [o.what for o in first], "second": [o.what["total"] for o in second],
                   "refused": refused}, file)
"""
FAKE_SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames localhost,faraway[1-3]" ] || exit 1
echo localhost
echo faraway1
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "folder of the script"
    folder.mkdir()
    (folder / "beside.py").write_text("ONE = 1\n")
    return write(folder / "job.py", JOB)


def expected(rank, node=0, local=None):
    local = rank if local is None else local
    return {"rank": rank, "total": 3.0, "device": "cpu", "node": node, "local": local}


def answers(tmp_path, name):
    with open(tmp_path / f"answers.{name}") as file:
        return json.load(file)


def environment(tmp_path, **more):
    return {**os.environ, "ANSWERS": str(tmp_path / "answers"), "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1", **more}


def run_all(commands, folder):
    """All run at the same time, and end well; their errors, as text."""
    running = [subprocess.Popen(command, cwd=folder, env=environ, text=True,
                                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
               for command, environ in commands]
    try:
        errors = [process.communicate(timeout=110)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), errors
    return errors


def torchrun(script, *options):
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


def check_all_ranks(tmp_path, expectation):
    for rank in range(RANKS):
        answer = answers(tmp_path, rank)  # every rank gets the values of all
        assert answer["first"] == expectation and answer["second"] == [6.0, 6.0]
        assert answer["refused"] == ("launch: ranks=8, but this job was started with 2 ranks; "
                                     "leave ranks= out, or start the job with as many")


def test_by_python_from_another_directory_without_a_main_guard(script, tmp_path):
    errors = run_all([([sys.executable, str(script)], environment(tmp_path))], tmp_path)
    assert errors == ["once\n"]
    answer = answers(tmp_path, "all")
    assert [one["rank"] for one in answer["first"]] == [0, 1, 2, 3]
    assert {one["total"] for one in answer["first"]} == {10.0}
    assert answer["second"] == [6.0, 6.0]
    assert answer["refused"] == "launch: nodes=3 must divide ranks=8"


@pytest.mark.sweep
def test_by_torchrun_on_one_node(script, tmp_path):
    run_all([(torchrun(script, "--standalone", f"--nproc-per-node={RANKS}"),
              environment(tmp_path))], tmp_path)
    check_all_ranks(tmp_path, [expected(0), expected(1)])


@pytest.mark.slow
def test_by_torchrun_on_two_nodes(script, tmp_path):
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=ranklab-test",
               "--local-addr=127.0.0.1"]
    environ = environment(tmp_path, GLOO_SOCKET_IFNAME="lo",
                          TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with reserved_port() as port:
        command = torchrun(script, *options, f"--rdzv-endpoint=127.0.0.1:{port}")
        run_all([(command, environ)] * 2, tmp_path)
    check_all_ranks(tmp_path, [expected(0, node=0, local=0), expected(1, node=1, local=0)])


def test_by_srun(script, tmp_path):
    (tmp_path / "bin").mkdir()
    scontrol = write(tmp_path / "bin" / "scontrol", FAKE_SCONTROL)
    scontrol.chmod(0o755)
    job = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()),
           "SLURM_NTASKS": str(RANKS), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(RANKS),
           "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "0",
           "SLURM_JOB_NODELIST": "localhost,faraway[1-3]"}
    run_all([([sys.executable, str(script)],
              environment(tmp_path, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), **job))
             for r in range(RANKS)], tmp_path)
    check_all_ranks(tmp_path, [expected(0), expected(1)])


def test_the_script_of_sbatch_itself_is_not_a_rank(monkeypatch):
    from ranklab.engine import in_place

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")  # both set by sbatch for the script, which runs once
    assert not in_place.is_started_by_another()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # salloc's interactive shell, or srun -n 1
    assert not in_place.is_started_by_another()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert in_place.is_started_by_another()


def test_the_number_of_ranks_on_a_node_is_that_nodes_own():
    from ranklab.engine import in_place

    assert in_place._counts("8(x3),4") == [8, 8, 8, 4] and in_place._counts("2") == [2]
    job = {"SLURM_PROCID": "27", "SLURM_STEP_NUM_TASKS": "28", "SLURM_LOCALID": "3",
           "SLURM_STEP_TASKS_PER_NODE": "8(x3),4", "SLURM_NODEID": "3", "SLURM_JOB_ID": "7",
           "MASTER_ADDR": "here"}
    assert in_place._from_slurm(job)["LOCAL_WORLD_SIZE"] == "4"


def test_two_steps_of_a_job_and_the_next_job_meet_at_ports_of_their_own():
    from ranklab.engine import in_place

    def port(job, step, node="0"):
        return in_place._from_slurm({
            "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": node, "MASTER_ADDR": "here",
            "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})["MASTER_PORT"]

    assert port("7", "1", node="0") == port("7", "1", node="1")
    assert len({port(job, step) for job in ("7", "8") for step in ("0", "1", "2")}) == 6
    assert 15000 <= int(port("99999999", "4294967290")) < 35000


IN_PLACE = """
    import os, torch, torch.distributed as dist
    from ranklab import launch

    def limit():
        group = dist.distributed_c10d._get_default_group()
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    print(launch(limit, timeout=10), launch(limit, timeout=100, stream=True))
    for wanted in ({"nodes": 2}, {"ranks": 3}, {"nodes": 1, "ranks": 1}):
        try:
            print(launch(limit, timeout=20, **wanted))
        except ValueError as error:
            print(error)
    """
# Else a thread may abort the interpreter that ends. transformers imports what this imports.
AT_THE_END = """
    import contextlib, os, time
    from ranklab import launch
    from ranklab.engine.rank import _leave_group

    def work():
        import torch.distributed.nn.functional

    def of_gloo():
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has just ended
                names.append(open(f"/proc/self/task/{task}/comm").read())
        return [name for name in names if "gloo" in name]

    launch(work)
    assert of_gloo(), "nothing to look for"
    _leave_group()
    end = time.monotonic() + 10
    while of_gloo() and time.monotonic() < end:
        time.sleep(0.01)
    assert not of_gloo()
    """
OF_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def in_place(tmp_path, text):
    """What a script prints that torchrun has started as its only rank."""
    script = write(tmp_path / "in_place.py", text)
    with reserved_port() as port:
        environ = environment(tmp_path, **OF_ONE_RANK, MASTER_PORT=str(port), LOCAL_RANK="0",
                              LOCAL_WORLD_SIZE="1")
        done = subprocess.run([sys.executable, str(script)], env=environ, text=True,
                              capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: it reads /proc")
def test_at_the_end_no_thread_of_the_group_is_left(tmp_path):
    in_place(tmp_path, AT_THE_END)


def test_in_place_each_launch_has_its_timeout_and_no_argument_is_ignored(tmp_path):
    assert in_place(tmp_path, IN_PLACE).splitlines() == [
        "[40.0] [130.0]",
        *(f"launch: {name}={n}, but this job was started with 1 {name}; leave {name}= out, or "
          "start the job with as many" for name, n in (("nodes", 2), ("ranks", 3))),
        "[50.0]"]


@pytest.mark.parametrize("more, said", [
    ({}, "LOCAL_WORLD_SIZE is not"),
    ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'")])
def test_half_of_the_variables_of_torchrun_are_a_sentence(more, said, monkeypatch):
    for name, value in {**OF_ONE_RANK, **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"^launch: RANK and WORLD_SIZE are set, as by torchrun, "
                                           f"but {said}; start the ranks with torchrun, or unset "
                                           "both$"):
        launch(print)


def test_torchrun_says_what_a_rank_raised_and_hides_a_gpu_that_two_share(tmp_path, monkeypatch):
    import torch

    from ranklab.engine import torchrun

    script = tmp_path / "sees.py"
    script.write_text("import os\nraise ValueError(os.environ['CUDA_VISIBLE_DEVICES'] + '!')")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="ValueError: !"):
        torchrun(script, ranks=2)


def test_ranks_that_fall_back_on_the_cpu_say_so(monkeypatch, capsys):
    import torch

    from ranklab.engine import in_place

    in_place._say_if_gpus_are_left("gloo", 8)
    assert capsys.readouterr().err == "" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    in_place._say_if_gpus_are_left("gloo", 8)
    assert "see 1 GPU(s) each: running on the CPU" in capsys.readouterr().err
    in_place._say_if_gpus_are_left("cpu:gloo,cuda:nccl", 8)
    assert "see 1 GPU(s) each: NCCL may not find the NVLink" in capsys.readouterr().err
    in_place._say_if_gpus_are_left("cpu:gloo,cuda:nccl", 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("job, sees_own", [
    ({"SLURM_GPUS_PER_TASK": "1"}, True), ({"SLURM_GPUS_PER_TASK": "a100:1"}, True),
    ({"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}, True), ({"SLURM_TRES_PER_TASK": "cpu:4"}, False),
    ({}, False), ({"SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "7"}, False),
    ({"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_NUM_TASKS": "1"}, False)])
def test_a_task_of_srun_may_see_a_gpu_of_its_own(job, sees_own, monkeypatch):
    from ranklab.engine import in_place

    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", **job}.items():
        monkeypatch.setenv(name, value)
    assert in_place._sees_its_own_gpus() == sees_own


def test_the_gpu_of_a_rank():
    from ranklab.engine.rank import gpu_of

    assert [gpu_of(rank, 4, 8) for rank in range(4)] == [0, 1, 2, 3]
    assert gpu_of(0, 1, 1) == 0
    assert gpu_of(1, 4, 0) is None and gpu_of(1, 4, 0, sees_own=True) is None
    assert gpu_of(1, 4, 1) is None  # all four see the same one
    assert gpu_of(1, 4, 1, sees_own=True) == 0  # --gpus-per-task=1: each calls its own 0
    assert gpu_of(1, 4, 4, sees_own=True) == 1  # and with --gpu-bind=none each sees all four


def test_srun_without_scontrol_says_what_to_set(monkeypatch, tmp_path):
    from ranklab.engine import in_place

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"first of the nodes n\[1-4\] .*; set MASTER_ADDR"):
        in_place._first_host({"SLURM_JOB_NODELIST": "n[1-4]"})
