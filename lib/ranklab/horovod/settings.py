"""The knobs, from init()'s arguments or from Horovod's own environment variables."""

import os
from dataclasses import dataclass, fields

VARIABLES = {
    "fusion_threshold": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "stall_check": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}


@dataclass(frozen=True)
class Settings:
    """How the background thread works; init() gives every rank those of rank 0.

    fusion_threshold  bytes in one fusion buffer; 0 turns fusion off
    cycle_time_ms     pause between two negotiations, in which tensors gather
    stall_check       seconds until a tensor that some ranks lack is reported
    stall_shutdown    seconds until it is an error on every rank. (Horovod's own default is never.)
    """

    fusion_threshold: int = 128 * 2**20
    cycle_time_ms: float = 1.0
    stall_check: float = 10.0
    stall_shutdown: float = 300.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")

    @classmethod
    def from_environment(cls, **given):
        """What is given counts first, then the environment, then the defaults.

        error  a variable that holds no number
        """
        chosen = {}
        for field in fields(cls):
            variable = VARIABLES[field.name]
            if text := os.environ.get(variable):
                try:
                    chosen[field.name] = field.type(text)
                except ValueError:
                    raise ValueError(f"{variable}={text} is no number") from None
        return cls(**chosen | {name: value for name, value in given.items() if value is not None})
