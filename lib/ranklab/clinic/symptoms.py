"""SYMPTOMS: what each disease shows of itself, before anybody looks for it.

A sign is a comparison of the program as it was found with the mended one, on four ranks; the
mended one equals one process. tests/test_clinic_symptoms.py runs both and measures all symptoms.
"""

HANGS = "hangs"
SLOW = "slow"  # half as much work again on the busiest rank, or as many bytes
RANKS = "ranks differ"  # in what is the same on all ranks of the mended one
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
