"""Lab 12 beside torch's own composition and DeepSpeed, and as others are told of it."""

import subprocess
import tomllib

import pytest

from ranklab import launch
from ranklab.data import python_text
from ranklab.hybrid import Job, Layout, parse_layout
from ranklab.models.gpt import GPTConfig
from ranklab.projects.hybrid import peers
from ranklab.projects.hybrid.other_tools import megatron_command, torchtitan_toml

pytestmark = pytest.mark.timeout(180)

LAYOUTS = [*map(parse_layout, ("1x2x4,sp", "2x2x2,full,outermost=data",
                               "4x1x2,virtual=2,recompute"))]


@pytest.fixture(scope="module")
def text():
    return python_text()


@pytest.fixture(scope="module")
def alone(text):
    return peers.our_losses(text, Layout())


def _all(text):
    return [peers.train(text, peers.TorchHybrid, layout, 2) for layout in LAYOUTS]


def test_torch_has_the_losses_of_one_process(text, alone):
    for of_rank in launch(_all, text, ranks=8, timeout=170):
        for losses in of_rank:
            assert losses == pytest.approx(alone[:2], abs=1e-5)


def test_deepspeed_has_the_losses_of_one_process(text, alone):
    found = peers.deepspeed_losses(text, Layout(2, 1, 2, zero=1))
    assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("way, layout, said", [
    (peers.torch_losses, Layout(1, 1, 2, schedule="zb-v"), "zero-bubble schedules do not go with"),
    (peers.torch_losses, Layout(2, virtual=2), "a tied matrix that two stages of one rank share"),
    (peers.deepspeed_losses, Layout(2, 1, 2), "dp 2 x tp 1 x pp 2: .* is compared with zero=1"),
    (peers.deepspeed_losses, Layout(2, 2, 2, zero=1), "over data and pipeline ranks"),
])
def test_what_they_do_not_do_is_a_sentence(way, layout, said):
    with pytest.raises(ValueError, match=said):
        way(None, layout)


# --- as others are told of it ---------------------------------------------------------------------

JOB = Job(GPTConfig(50304, 2048, 80, 80, 10240), batch=1024, micro_batch=2)


def test_megatron_is_told_of_all_that_the_layout_has():
    said = megatron_command(parse_layout("2x8x4,zero,sp,virtual=5,recompute"), JOB)
    assert subprocess.run(["bash", "-n"], input=said, text=True).returncode == 0
    for words in ("--tensor-model-parallel-size 8 ", "--sequence-parallel ", "--nnodes 8 ",
                  "--pipeline-model-parallel-size 4 ", "--num-virtual-stages-per-pipeline-rank 5 ",
                  "--use-distributed-optimizer ", "--recompute-granularity full ", "--bf16 ",
                  "--micro-batch-size 2 ", "--global-batch-size 1024 ", "--num-layers 80 ",
                  "holds about ", "that of the course's trainer "):
        assert words in said, words
    plain = megatron_command(Layout(pp=3, schedule="gpipe", zero=3, outermost="data"), JOB)
    for words in ("not gpipe", "80 do not go into 3", "FSDP says nothing of pipelines",
                  "--use-tp-pp-dp-mapping", "--use-megatron-fsdp", "torchrun --nproc-per-node 3"):
        assert words in plain, words
    assert "--sequence-parallel" not in plain and "--recompute" not in plain
    assert max(map(len, (said + "\n" + plain).splitlines())) <= 100


def test_torchtitan_is_told_of_all_that_it_has():
    said = torchtitan_toml(parse_layout("2x8x4,zero,virtual=5,recompute,outermost=data"), JOB)
    found = tomllib.loads(said)
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 8, "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_layers_per_stage": 4, "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0}  # fmt: skip
    assert found["training"]["local_batch_size"] == 512
    assert found["activation_checkpoint"] == {"mode": "full"}
    for words in ("no ZeRO-1", "sequence parallel, always", "furthest apart, always"):
        assert words in said, words
    replicas = tomllib.loads(torchtitan_toml(Layout(dp=4), JOB))
    assert replicas["parallelism"]["data_parallel_replicate_degree"] == 4
    assert replicas["training"]["local_batch_size"] == 2
