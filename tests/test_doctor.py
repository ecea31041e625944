"""`ranklab doctor`: the whole report on this machine, and each way a machine can be unfit."""

from types import SimpleNamespace

import pytest

from ranklab.basics import machine
from ranklab.course import doctor
from ranklab.course.doctor import LARGE, SMALL, Advice


def advice(lines):
    """The Advice among what a part of the report yields."""
    return [line for line in lines if isinstance(line, Advice)]


def test_report_on_this_machine(capsys):
    code = doctor.doctor()
    printed = capsys.readouterr().out
    assert code == ("PROBLEM" in printed)
    for word in ("python", "torch", "cores", "memory", "gloo", "NCCL", "launch", "8 bytes in",
                 "64 MB in", "busbw", "mpi", "00_ranks"):
        assert word in printed, word


def test_exit_code_is_1_with_the_advice_repeated_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: (2e9, 1e9))
    monkeypatch.setattr(doctor, "ranks", lambda: ())
    assert doctor.doctor() == 1
    assert "2.0 GB of memory is less than the 4 GB" in capsys.readouterr().out.splitlines()[-1]


def test_old_python(monkeypatch):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (9, 0))
    assert "install a newer one" in advice(doctor.machine())[0]


@pytest.mark.parametrize("version, fits", [("2.13.0+cpu", True), ("2.13.1", True),
                                           ("2.9.0", False), ("3.0.0", False)])
def test_torch_range(monkeypatch, version, fits):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    found = advice(doctor.torch_version())
    assert not found if fits else f"torch {version} is outside" in found[0]


def test_torch_missing(monkeypatch):
    def missing(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    assert "not installed" in advice(doctor.torch_version())[0]


def test_full_disk(tmp_path):
    assert not advice(doctor.space("temporary", tmp_path, 1, "delete"))
    assert "labs need" in advice(doctor.space("temporary", tmp_path, 1e18, "delete"))[0]


def test_launch_that_fails_is_advice_not_a_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no rank answered")

    monkeypatch.setattr("ranklab.engine.launch", broken)
    assert advice(doctor.ranks()) == ["launch fails: RuntimeError: no rank answered"]


def test_judge_names_wrong_ranks_and_takes_the_slowest():
    good = {"right": True, SMALL: 1e-5, LARGE: 0.032}
    seen = [good, {**good, LARGE: 0.064}]
    lines = list(doctor.judge(seen))
    assert not advice(lines)
    assert "64.0 ms: algbw 1.00 GB/s, busbw 1.00 GB/s" in lines[-1]
    assert "wrong on ranks [1]" in advice(doctor.judge([good, {**good, "right": False}]))[0]


@pytest.mark.parametrize("version, gpus, gigabytes, line", [
    ((2, 30, 7), 1, 80, "4 ranks can share it (NCCL 2.30.7), each with 19.2 GB: RANKLAB_SHARE_GPU"),
    ((2, 32, 3), 2, 24, "4 ranks can share them (NCCL 2.32.3), each with 11.2 GB"),
    ((2, 29, 7), 1, 80, "ranks can't share a GPU: NCCL 2.29.7 is here, and 2.30.3 or newer can"),
    ((2, 30, 7), 1, 3, "4 ranks can't share a GPU of 3.0 GB")])
def test_whether_ranks_can_share_a_gpu(monkeypatch, version, gpus, gigabytes, line):
    import torch

    monkeypatch.setattr(doctor.sharing, "nccl_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda gpu: SimpleNamespace(total_memory=gigabytes * 1e9))
    assert doctor.sharing_line(gpus).startswith(line)


def test_labs_on_gpus_that_ranks_share(monkeypatch):
    monkeypatch.setattr(doctor, "gpu_count", lambda: 1)
    monkeypatch.delenv("RANKLAB_SHARE_GPU", raising=False)
    assert "4 ranks on the CPU (gloo)" in list(doctor.what_labs_run_on())[0]
    monkeypatch.setenv("RANKLAB_SHARE_GPU", "1")
    assert "4 ranks on 1 GPU, which they share (NCCL)" in list(doctor.what_labs_run_on())[0]


def test_links_are_printed_without_terminal_codes(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '\\033[4mGPU0\\033[0m X NV18\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert list(doctor.links()) == ["GPU0 X NV18"]


def test_driver_without_a_gpu_build_of_torch_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "gpu_count", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    assert any("CPU build" in line for line in doctor.gpus())


def test_missing_extra_shows_its_install_line(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: False)
    assert any("mpi4py missing: python -m pip install -c constraints.txt -e '.[mpi]'" in line
               for line in doctor.extras())


def test_mpi_is_not_here_without_its_library(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: True)
    for found, said in ((None, "MPI library missing"), ("mpirun", "here")):
        monkeypatch.setattr(doctor.shutil, "which", lambda name: found)
        line, = [line for line in doctor.extras() if "mpi" in line.lower()]
        assert line.split(maxsplit=1)[0] == "mpi" and line.split(maxsplit=1)[1].startswith(said)


@pytest.mark.parametrize("count, place", [(0, "4 ranks on the CPU (gloo)"), (1, "4 ranks on the"),
                                          (2, "4 ranks on the CPU"), (4, "4 GPUs (NCCL)")])
def test_labs_run_on_gpus_when_each_rank_has_one(monkeypatch, count, place):
    monkeypatch.setattr(doctor, "gpu_count", lambda: count)
    assert place in next(line for line in doctor.what_labs_run_on() if "00_ranks" in line)


def test_limits_of_a_container_count(monkeypatch):
    limits = {"cpu.max": ["100000", "100000"], "memory.max": ["2000000000"]}
    monkeypatch.setattr(machine, "_cgroup", limits.get)
    assert machine.cores() == 1
    assert machine.memory()[0] == 2e9
    monkeypatch.setattr(machine, "_cgroup", lambda file: None)
    assert machine.cores() >= 1 and machine.memory()[0] > 2e9
