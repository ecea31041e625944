"""The exercises and predictions of lab 04, in the order of the lab.

    scaling_efficiency.py     scaling_efficiency
    exposed_communication.py  exposed_communication
    jobs.py                   timelines whose causes are known
    diagnose.py               diagnose, on these
    hooks.py                  a hook in torch's DDP, and its actions
    compress_fp16_hook.py     compress_fp16_hook, registered there
    top_k_compress.py         top_k_compress
    compress_to_budget.py     compress_to_budget, registered there
    power_sgd.py              power_sgd
    diloco.py                 DiLoCo
"""

from ranklab.checks.clinic import bugs
from ranklab.checks.ddp.compress_fp16_hook import FP16
from ranklab.checks.ddp.compress_to_budget import BUDGET
from ranklab.checks.ddp.diagnose import DIAGNOSE
from ranklab.checks.ddp.diloco import DILOCO
from ranklab.checks.ddp.exposed_communication import EXPOSED
from ranklab.checks.ddp.power_sgd import POWER_SGD
from ranklab.checks.ddp.predictions import PREDICTIONS as NUMBERS
from ranklab.checks.ddp.scaling_efficiency import EFFICIENCY
from ranklab.checks.ddp.top_k_compress import TOP_K

__all__ = ["EXERCISES", "PREDICTIONS"]

BUGS = "train_on_functions",
EXERCISES = (
    EFFICIENCY,
    EXPOSED,
    DIAGNOSE,
    FP16,
    TOP_K,
    BUDGET,
    POWER_SGD,
    DILOCO,
    *bugs.exercises(*BUGS),
)
PREDICTIONS = (*NUMBERS, *bugs.predictions(*BUGS))
