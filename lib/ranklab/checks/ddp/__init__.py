"""The exercises and predictions of lab 04, in the order of the lab.

    scaling_efficiency.py     scaling_efficiency
    exposed_communication.py  exposed_communication
    jobs.py                   timelines whose causes are known
    diagnose.py               diagnose, on these
    hooks.py                  a hook in torch's DDP, and what it did
    compress_fp16_hook.py     compress_fp16_hook, registered there
    top_k_compress.py         top_k_compress
    compress_to_budget.py     compress_to_budget, registered there
    power_sgd.py              power_sgd
"""

from ranklab import ddp
from ranklab.checks.ddp.compress_fp16_hook import FP16
from ranklab.checks.ddp.compress_to_budget import check_compress_to_budget
from ranklab.checks.ddp.diagnose import DIAGNOSE
from ranklab.checks.ddp.exposed_communication import EXPOSED
from ranklab.checks.ddp.power_sgd import POWER_SGD
from ranklab.checks.ddp.predictions import PREDICTIONS
from ranklab.checks.ddp.scaling_efficiency import EFFICIENCY
from ranklab.checks.ddp.top_k_compress import TOP_K
from ranklab.checks.exercise import Exercise

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    EFFICIENCY,
    EXPOSED,
    DIAGNOSE,
    FP16,
    TOP_K,
    Exercise(ddp.compress_to_budget, check_compress_to_budget, hints=(
        "An entry of top-k has 8 bytes: 4 for its value, 4 for its place. How few bytes can each "
        "do with?",
        "A value in bfloat16 has 2 bytes. A place needs 2 bytes if it counts inside a row of "
        "32,768 numbers, and 1 byte as the distance from the place before it. Take the largest of "
        "the whole bucket, not some of each parameter. What rounding loses belongs in the error, "
        "too.",
        "target = buffer + errors; places = target.abs().topk(k).indices, k = top_k_bytes("
        "bucket.parameters(), 0.001) // 4; values = target[places].bfloat16(); their bytes and "
        "those of places.short() in one uint8 tensor; all_gather_single; add up rank by rank, "
        "divide by R. The error is target, less values.float() at these places; cut it by "
        "parameter. A bucket of more than 32,768 numbers: rows of so many, topk in each.",
    )),
    POWER_SGD,
)
