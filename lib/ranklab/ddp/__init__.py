"""Tools for torch's DDP: find out why a step is slow, and send fewer bytes.

Read in this order:

    efficiency.py   scaling_efficiency: the share of the perfect speed-up
    exposed.py      exposed_communication: the part that no computation hides
    steps.py        steps_of: a timeline, cut into training steps
    diagnosis.py    diagnose: the loader, communication, a straggler, or nothing
    half.py         compress_fp16_hook: 16 bits a number
    top_k.py        top_k_compress and the hook TopK: the largest entries, with error feedback
    low_rank.py     power_sgd and the hook PowerSGD: two thin matrices instead of one large
    budget.py       compress_to_budget: more entries than top-k, of fewer bytes each
    diloco.py       DiLoCo: many local steps, then one outer step of all ranks
    quality.py      compare_hooks, compare_trainers: one GPT trained each way; its bytes and loss
    slow_link.py    a hook that emulates a slow network
    situations.py   four recorded runs for diagnose: one healthy, three slow for different reasons
"""

from ranklab.ddp import situations
from ranklab.ddp.budget import compress_to_budget
from ranklab.ddp.diagnosis import diagnose
from ranklab.ddp.diloco import DiLoCo
from ranklab.ddp.efficiency import scaling_efficiency
from ranklab.ddp.exposed import exposed_communication
from ranklab.ddp.half import compress_fp16_hook
from ranklab.ddp.low_rank import PowerSGD, finished, power_sgd
from ranklab.ddp.quality import compare_hooks, compare_trainers
from ranklab.ddp.slow_link import SlowLink
from ranklab.ddp.steps import steps_of
from ranklab.ddp.top_k import TopK, top_k_bytes, top_k_compress

__all__ = [
    "DiLoCo", "PowerSGD", "SlowLink", "TopK", "compare_hooks", "compare_trainers",
    "compress_fp16_hook", "compress_to_budget", "diagnose", "exposed_communication", "finished",
    "power_sgd", "scaling_efficiency", "situations", "steps_of", "top_k_bytes", "top_k_compress",
]
