"""A lab's lines, by part: what a new lab may have, and what an old one has and may only lose."""

import pytest
from sizes import of_checks, of_lab

from ranklab.course import labs

IN_ALL, PROJECT, TESTS = 4500, 350, 350  # with questions, figures, text, deck and answers
OF_A_FUNCTION, OF_A_CLASS = 60, 120  # the check of one exercise
LARGER = {  # in all, project, tests
    "02_collectives": (5070, 425, 350), "03_data_parallel": (6215, 505, 590),
    "04_ddp": (5290, 810, 485), "05_horovod": (5465, 350, 560), "06_zero": (5675, 500, 555),
    "07_fsdp": (5210, 735, 605), "08_tensor_parallel": (4940, 455, 355),
    "09_pipeline_parallel": (4775, 375, 350), "12_hybrid": (5360, 960, 670),
}
LARGER_CHECKS = {
    "roll_call": 158, "activation_bytes": 76, "accumulate_gradients": 75, "checkpointed": 98,
    "frugal_gradients": 111, "scale_loss": 95, "all_to_all_v": 111, "hierarchical_all_reduce": 63,
    "broadcast_parameters": 74, "assign_buckets": 75, "OverlappedDataParallel": 197,
    "plan_buckets": 101, "sync_batch_norm": 130, "join_uneven": 130, "replicas_agree": 88,
    "exposed_communication": 83, "diagnose": 140, "top_k_compress": 71, "compress_to_budget": 117,
    "power_sgd": 107, "negotiate": 75, "fuse_tensors": 87, "tune_fusion": 61,
    "distributed_optimizer": 137, "timeline": 83, "adasum": 110, "FullyShardedBlock": 185,
    "wrap_policy": 72, "masked_loss": 72, "full_state_dict": 68, "PipelineExecutor": 158,
    "parallelize": 90, "reshard_checkpoint": 63, "choose_layout": 103,
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
