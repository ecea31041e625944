"""SYMPTOMS: the visible signs of each disease, before anybody looks for it.

A sign is a difference between the program as found and the fixed one, on four ranks; the fixed
program equals one process. tests/test_clinic_symptoms.py runs both and measures all symptoms.
"""

HANGS = "hangs"
SLOW = "slow"  # half as much work again on the busiest rank, or half as many bytes again
RANKS = "ranks differ"  # in results that are equal on all ranks of the fixed program
PROCESS = "differs from one process"
FINITE = "not finite"
MEMORY = "memory grows"
TWICE = "data seen twice"
RESTART = "only after a restart"
COLUMNS = (HANGS, SLOW, RANKS, PROCESS, FINITE, MEMORY, TWICE, RESTART)

SYMPTOMS = {
    "ranks that wait": {
        "collective_order": {HANGS},
        "communicator_order": {HANGS},
        "rank_branch": {HANGS},
        "sync_every_micro_step": {SLOW},
        "straggler": {SLOW},
    },
    "wrong to the end": {
        "wrong_reduction": {PROCESS},
        "unsynchronised_start": {RANKS, PROCESS},
        "same_data": {SLOW, PROCESS, TWICE},
        "learning_rate": {PROCESS},
        "batch_norm": {RANKS, PROCESS},
        "token_mean": {PROCESS},
    },
    "split models": {
        "dropout_seeds": {RANKS, PROCESS},
        "tied_weights": {PROCESS},
        "stale_weights": {PROCESS},
        "optimizer_before_sharding": {PROCESS},
        "shard_norm": {RANKS, PROCESS},
    },
    "well at first": {
        "fp16_nan": {RANKS, PROCESS, FINITE},
        "memory_growth": {MEMORY},
        "corrupt_shard": {PROCESS},
        "data_twice": {PROCESS, TWICE, RESTART},
        "old_shard": {PROCESS, RESTART},
    },
}
