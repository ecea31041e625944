"""A lab's lines, by part: what a new lab may have, and what an old one has and may only lose."""

import pytest
from sizes import of_checks, of_lab

from ranklab.course import labs

IN_ALL, PROJECT, TESTS = 4500, 350, 350  # with questions, figures, text, deck and answers
OF_A_FUNCTION, OF_A_CLASS = 60, 120  # the check of one exercise
LARGER = {  # in all, project, tests
    "02_collectives": (5430, 430, 430), "03_data_parallel": (7090, 515, 905),
    "04_ddp": (6190, 870, 900), "05_horovod": (7480, 855, 1485), "06_zero": (5675, 500, 560),
    "07_fsdp": (5770, 1075, 900), "08_tensor_parallel": (5340, 510, 620),
    "09_pipeline_parallel": (4970, 385, 450), "12_hybrid": (5700, 975, 950),
}
LARGER_CHECKS = {
    "pass_the_token": 66, "ring_shift": 69, "all_ranks_finite": 67, "roll_call": 208,
    "activation_bytes": 76, "accumulate_gradients": 131, "checkpointed": 125,
    "frugal_gradients": 156, "scale_loss": 112, "all_to_all_v": 118,
    "hierarchical_all_reduce": 76, "broadcast_parameters": 101,
    "shard_sampler": 67, "average_gradients": 73, "assign_buckets": 89,
    "OverlappedDataParallel": 364, "plan_buckets": 110, "no_sync": 76, "sync_batch_norm": 223,
    "join_uneven": 175, "replicas_agree": 126, "scaling_efficiency": 87,
    "exposed_communication": 111, "diagnose": 205, "compress_fp16_hook": 168,
    "top_k_compress": 117, "compress_to_budget": 178, "power_sgd": 219, "negotiate": 133,
    "fuse_tensors": 126, "tune_fusion": 77, "distributed_optimizer": 254, "compress_fp16": 88,
    "timeline": 128, "adasum": 186, "FullyShardedBlock": 187,
    "clip_grad_norm_sharded": 68, "wrap_policy": 81, "masked_loss": 85, "full_state_dict": 78,
    "vocab_parallel_cross_entropy": 76, "PipelineExecutor": 177, "build_mesh": 76,
    "parallelize": 90, "tied_embedding_sync": 60, "mesh_grad_norm": 63,
    "reshard_checkpoint": 75, "choose_layout": 116,
}


@pytest.mark.parametrize("stem", labs.written())
def test_a_lab_is_small(stem):
    sizes = of_lab(stem)
    found = sum(sizes.values()), sizes["project"], sizes["tests"]
    most = LARGER.get(stem, (IN_ALL, PROJECT, TESTS))
    assert all(n <= limit for n, limit in zip(found, most)), (
        f"in all, project, tests: {found}; at most {most}")


@pytest.mark.parametrize("stem", labs.written())
def test_a_check_is_small(stem):
    answers = {item.name: item.answer for item in labs.checks_of(stem).EXERCISES}
    for name, lines in of_checks(stem).items():
        most = OF_A_CLASS if isinstance(answers[name], type) else OF_A_FUNCTION
        assert lines <= LARGER_CHECKS.get(name, most), f"the check of {name} has {lines} lines"
