"""Several ranks on one GPU, as far as it shows without one: what ranks are told, who is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranklab.engine import launcher, sharing
from ranklab.engine.rank import backend_and_device

TESTS = Path(__file__).parent
GB = 1e9


def script(*arguments, by_torchrun=False, **variables):
    """What the script printed; `variables` are GPUS, NCCL and others of the environment."""
    command = [sys.executable]
    if by_torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    environ = {name: value for name, value in os.environ.items()
               if not name.startswith(("NCCL_", "RANKLAB_", "CUDA_"))}
    return subprocess.run(
        [*command, str(TESTS / "shared_gpu_script.py"), *arguments], text=True, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}", "GPUS": "1",
             "NCCL": "2.30.7", "OMP_NUM_THREADS": "1", **variables}).stdout


def told(printed):
    assert "TOLD" in printed, printed
    return json.loads(printed.partition("TOLD ")[2].splitlines()[0])


@pytest.mark.parametrize("by_torchrun, argument, variables", [
    (False, "share", {}), (False, "plain", {"RANKLAB_SHARE_GPU": "1"}), (True, "share", {})])
def test_ranks_that_share_are_told_so_before_the_first_communicator(by_torchrun, argument,
                                                                    variables):
    assert told(script(argument, by_torchrun=by_torchrun, **variables)) == 4 * [{
        "RANKLAB_RANKS_ON_GPU": "4", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2",
        "NCCL_NVLS_ENABLE": "0",
        "PRETENDED_BACKEND": "cpu:gloo,cuda:nccl cuda:0",
        "memory": [pytest.approx(1 / 4 - 0.8 / 80)]}]


def test_ranks_take_turns_on_the_gpus_and_a_limit_of_the_user_stays():
    seen = told(script("share", GPUS="3", NCCL_MAX_CTAS="3", NCCL_NVLS_ENABLE="1"))
    assert [each["PRETENDED_BACKEND"][-1] for each in seen] == ["0", "1", "2", "0"]
    assert {(each["NCCL_MAX_CTAS"], each["NCCL_NVLS_ENABLE"]) for each in seen} == {("3", "0")}
    assert [each["memory"] for each in seen] == 4 * [[pytest.approx(1 / 2 - 0.8 / 80)]]


def test_off_by_default_and_without_use_where_each_rank_has_a_gpu():
    off = told(script("plain"))
    assert off == 4 * [{"PRETENDED_BACKEND": "gloo None", "CUDA_VISIBLE_DEVICES": "",
                        "memory": []}]
    own = told(script("share", GPUS="4"))
    assert [each["PRETENDED_BACKEND"] for each in own] == [
        f"cpu:gloo,cuda:nccl cuda:{gpu}" for gpu in range(4)]
    assert not any("NCCL_MULTI_RANK_GPU_ENABLE" in each or each["memory"] for each in own)


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["python", "torchrun"])
def test_an_old_nccl_is_one_sentence(by_torchrun):
    printed = script("share", by_torchrun=by_torchrun, NCCL="2.29.7")
    sentence = ("RuntimeError: ranks can't share a GPU: NCCL 2.29.7 is here, and 2.30.3 or newer "
                "can: pip install --no-deps nvidia-nccl-cu")
    # torchrun ends the others as soon as one rank has ended, so not all may have said it.
    assert printed.count(sentence) in (range(1, 5) if by_torchrun else [1]), printed


def test_a_hang_of_ranks_that_share_names_the_sms():
    assert sharing.CAUSE_OF_HANG in script("hang", RANKLAB_SHARE_GPU="1")
    assert "SMs" not in script("hang")


def test_without_a_gpu_ranks_run_on_the_cpu_as_ever():
    if launcher.visible_gpus():
        pytest.skip("GPUs are here")
    assert launcher.launch(_backend, ranks=2, share_gpu=True) == 2 * ["gloo"]


def _backend():
    import torch.distributed as dist

    return dist.get_backend()


def test_the_rehearsal_does_not_share(monkeypatch):
    monkeypatch.setattr(launcher, "visible_gpus", lambda: 1)
    monkeypatch.setattr(sharing, "nccl_version", lambda: (2, 29, 7))
    assert launcher.launch(_backend, ranks=2, share_gpu=True, rehearse="gpu") == 2 * ["gpu:gloo"]


@pytest.mark.parametrize("ranks, gpus, ctas", [(2, 1, 4), (4, 1, 2), (8, 1, 1), (16, 1, 1),
                                               (4, 2, 4), (3, 2, 4)])
def test_the_more_ranks_the_fewer_channels_for_each(ranks, gpus, ctas):
    assert sharing.ctas(ranks, gpus) == ctas
    assert sharing.variables(ranks, gpus, {})["NCCL_MAX_CTAS"] == str(ctas)


def test_memory_is_cut_in_equal_parts_and_what_torch_does_not_see_is_left_out():
    assert sharing.memory_fraction(16 * GB, 4, 1) * 16 * GB == pytest.approx(3.2 * GB)
    with pytest.raises(ValueError, match="8 ranks can't share a GPU of 6.0 GB: each takes 0.8 GB"):
        sharing.memory_fraction(6 * GB, 8, 1)


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(sharing.VARIABLE, "yes")
    with pytest.raises(ValueError, match="RANKLAB_SHARE_GPU must be 1 .* or 0, got 'yes'"):
        launcher.launch(_backend, ranks=1)
    assert sharing.is_wanted(environ={sharing.VARIABLE: "1"})
    assert not sharing.is_wanted(environ={sharing.VARIABLE: "0"})


@pytest.mark.parametrize("version", [(2, 29, 7), (2, 30, 0), (2, 30, 3), (2, 32, 3), (3, 0, 0)])
def test_versions_of_nccl(version):
    if version >= (2, 30, 3):
        return sharing.refuse_old_nccl(version)
    with pytest.raises(RuntimeError, match="ranks can't share a GPU: NCCL 2.(29.7|30.0) is here"):
        sharing.refuse_old_nccl(version)


def test_a_torch_without_nccl_is_a_sentence(monkeypatch):
    monkeypatch.setattr(sharing, "nccl_version", lambda: None)
    with pytest.raises(RuntimeError, match="this build of torch has no NCCL; `make lab TORCH=pip`"):
        sharing.refuse_old_nccl()


def test_a_task_with_gpus_of_its_own_does_not_share(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(sharing, "prepare", lambda *about: pytest.fail("it shares"))
    chosen = backend_and_device(3, 4, sees_own=True, share_gpu=True)
    assert chosen["device_id"] == torch.device("cuda", 0)


def test_what_counts_per_gpu_knows_that_ranks_share_it(monkeypatch):
    from ranklab.course import doctor
    from ranklab.projects.planner import measure

    assert sharing.share_of_gpu() == 1
    monkeypatch.setenv(sharing.RANKS_HERE, "4")
    assert sharing.share_of_gpu() == 1 / 4
    with pytest.raises(ValueError, match="ranks share a GPU here, so no time of theirs is a GPU's"):
        measure._measured()
    rank = {"right": True, doctor.SMALL: 1e-5, doctor.LARGE: 0.03, "share": sharing.share_of_gpu()}
    assert "these ranks share a GPU" in next(doctor.judge([rank] * 4))
