"""A lab's lines, by part: what a new lab may have, and what an old one has and may only lose."""

import collections

import pytest
from sizes import of_checks, of_lab
from test_wrong_answers import WRONG

from ranklab.course import labs

IN_ALL, PROJECT, TESTS = 4500, 350, 350  # with questions, figures, text, deck and answers
# The check of one exercise; more where it names many mistakes: so many lines for each wrong answer.
OF_A_FUNCTION, OF_A_CLASS, OF_A_WRONG_ANSWER = 60, 120, 7
LARGER = {  # in all, project, tests
    "02_collectives": (5055, 350, 350), "03_data_parallel": (5811, 365, 437),
    "04_ddp": (4600, 350, 350), "05_horovod": (5500, 350, 560), "06_zero": (5617, 392, 436),
    "08_tensor_parallel": (4935, 350, 360),
    "07_fsdp": (4975, 375, 550),
    "09_pipeline_parallel": (4785, 350, 350), "12_hybrid": (5180, 400, 585),
    # the lab of a tool: its command, its page, its exports, its scores and published runs
    "13_planner": (8120, 965, 995),
    "14_resilience": (5645, 500, 450),
    # a cluster inside this machine, an evaluator of PromQL, what eight systems are told
    "15_cluster": (6735, 480, 610),
    # twenty-one programs, each with a check, and what finds their diseases in any program
    "16_clinic": (8865, 350, 882),
}
LARGER_CHECKS = {
    "checkpointed": 94, "all_to_all_v": 94,
    "read_nccl_log": 159, "nccl_environment": 114,  # much is said in a log, and in a topology
    "atomic_save": 153,  # it kills processes in many places, and looks at the order of calls
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
    wrong = collections.Counter(name for name, _ in WRONG.values())
    for name, lines in of_checks(stem).items():
        most = OF_A_CLASS if isinstance(answers[name], type) else OF_A_FUNCTION
        most = LARGER_CHECKS.get(name, max(most, OF_A_WRONG_ANSWER * wrong[name]))
        assert lines <= most, f"the check of {name} has {lines} lines, at most {most}"
