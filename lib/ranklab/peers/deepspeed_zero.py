"""DeepSpeed's ZeRO with our model, optimizer and data, on its own and in the training loop.

DeepSpeed compiles C++ when it first runs, which takes minutes. None of it is needed here: a torch
optimizer replaces DeepSpeed's own (cpu_adam, fused_adam), and its messages through shared memory
(shm_comm) are for inference only.
"""

import contextlib
import logging
import os
import warnings

import torch

from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.peers.deepspeed_ops import compiled_adam

OLD_NAMES = "all_gather_into_tensor|reduce_scatter_tensor"  # DeepSpeed's; torch warns each time

# By default DeepSpeed departs from the paper to gain time: it reduces with whole all-reduces, keeps
# parameters of less than 100,000 numbers whole, and frees no parameter that it will use again
# within 10^9 numbers. So with a small model stage 3 would shard and free nothing.
PAPERS = {"use_multi_rank_bucket_allreduce": False, "stage3_param_persistence_threshold": 0,
          "stage3_max_reuse_distance": 0}


def train_with_deepspeed(module, new_optimizer, batches, stage, offload=None):
    """Train `module` with DeepSpeed; return this rank's loss at each step.

        def losses(stage):
            batches = [(tokens, tokens) for tokens in local_tokens]  # on the rank's device
            return train_with_deepspeed(new_model(), partial(torch.optim.AdamW, lr=0.01),
                                        batches, stage)

        launch(losses, 2, ranks=2)

    Call it on every rank, inside launch. module(*batch) returns the mean loss over the batch.
    """
    engine = deepspeed_engine(module, new_optimizer, stage, offload)
    losses = []
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def deepspeed_engine(module, new_optimizer, stage, offload=None, offload_parameters=False,
                     groups=None, clip=0.0, compiled=False):  # fmt: skip
    """Return the DeepSpeed engine for `module` on the ranks of this job.

        engine = deepspeed_engine(module, partial(torch.optim.AdamW, lr=0.01), stage=2)
        loss = engine(x); engine.backward(loss); engine.step()

    stage: 0 to 3
    offload: "cpu": the optimizer's state and its step, for stages 1 to 3
    groups: parameter groups, as an optimizer takes them; by default all trained parameters
    clip: the largest norm of all gradients; 0: no clipping
    compiled: DeepSpeed's own Adam in place of new_optimizer; its C++ is compiled the first time
    Raises: ModuleNotFoundError without DeepSpeed; ValueError as in settings().
    """
    config = settings(module, stage, offload, offload_parameters, clip)
    deepspeed = quiet_deepspeed()
    groups = groups or [{"params": [p for p in module.parameters() if p.requires_grad]}]
    new_optimizer = compiled_adam(new_optimizer, offload) if compiled else new_optimizer
    module = module.to(device())
    engine, *_ = deepspeed.initialize(model=module, optimizer=new_optimizer(groups), config=config)
    return engine


def quiet_deepspeed():
    """Import deepspeed for this rank's device; it builds nothing and only warns."""
    os.environ["DS_ACCELERATOR"] = device().type  # else it takes any GPU that it finds
    import deepspeed  # here: takes two seconds

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", OLD_NAMES.join(("(?s).*(", ")")), FutureWarning)
    deepspeed.ops.__compatible_ops__ = {}  # else its first message compiles shm_comm
    return deepspeed


def settings(module, stage, offload=None, offload_parameters=False, clip=0.0):
    """Return the config for deepspeed.initialize.

    A model of 16-bit parameters gets master weights in float32.
    Raises: ValueError for an unknown stage or offload, or if the stage has nothing to offload.
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage} must be 0, 1, 2 or 3")
    if offload not in (None, "cpu"):
        raise ValueError(f"offload={offload!r} must be None or 'cpu'")
    if offload and not stage:
        raise ValueError("offload needs stage 1, 2 or 3: DeepSpeed's stage 0 steps on the device")
    if offload_parameters and stage != 3:
        raise ValueError("offload_parameters needs stage 3: before it all ranks have all of them")
    n = sum(p.numel() for p in module.parameters())
    bucket = min(50_000_000, n)
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
            # prefetched parameters are not freed, and with a small model that would be all of them
            "stage3_prefetch_bucket_size": bucket if n > 10**8 else 0, **PAPERS}
    to_cpu = {"device": "cpu", "pin_memory": device().type == "cuda"}
    zero |= {"offload_optimizer": to_cpu} if offload else {}
    zero |= {"offload_param": to_cpu} if offload_parameters else {}
    return {"train_micro_batch_size_per_gpu": 1,  # DeepSpeed asks; only its speed report uses it
            "gradient_clipping": clip, "zero_optimization": zero,
            "bf16": {"enabled": next(module.parameters()).dtype == torch.bfloat16},
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def read_by_deepspeed(config, ranks):
    """Return the DeepSpeedConfig that DeepSpeed makes from `config` in a job of `ranks` ranks.

    It also works outside a launch.
    Raises: AssertionError or ValueError if DeepSpeed refuses `config`, with the reason.
    """
    quiet_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    class ForSomeRanks(DeepSpeedConfig):
        # it asks its process group, and assumes 1 if there is none
        world_size = property(lambda self: ranks, lambda self, value: None)

    return ForSomeRanks(config)


# --- in the training loop -------------------------------------------------------------------------

class DeepSpeed(DataParallel):
    """DeepSpeed's ZeRO: it averages gradients, clips and steps.

    options: of deepspeed_engine: offload, clip, compiled
    """

    def __init__(self, stage, **options):
        super().__init__(equal_parts=True)
        self.stage, self.options = stage, options

    def apply(self, model):
        self.model = model
        return lambda *inputs: self.engine(*inputs)

    def make_optimizer(self, new_optimizer, groups):
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        self.engine = deepspeed_engine(self.model, new_optimizer, self.stage, groups=groups,
                                       **self.options)
        return EngineStep(self.engine)

    def shards(self):
        """Return this rank's part of each parameter, in stage 3."""
        return [p.ds_tensor for p in self.model.parameters() if hasattr(p, "ds_tensor")]

    def backward(self, loss):
        self.engine.backward(loss)

    def communication(self, is_last):
        """Tell DeepSpeed which piece ends the step; it decides itself when to send."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        return contextlib.nullcontext()


class EngineStep:
    """The optimizer's interface to the loop, on top of a DeepSpeed engine."""

    def __init__(self, engine):
        self.engine, self.step = engine, engine.step

    @property
    def param_groups(self):
        return self.engine.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        """Do nothing: the engine's step ends with zero_grad."""
