"""DeepSpeed: its ZeRO as the training loop sees it, a DataParallel (data_parallel) like Zero."""

import contextlib

from ranklab.data_parallel.training import DataParallel
from ranklab.zero.deepspeed_engine import deepspeed_engine


class DeepSpeed(DataParallel):
    """DeepSpeed's ZeRO: it averages gradients, clips and steps.

    options  of deepspeed_engine: offload, clip, compiled
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
        """In stage 3, this rank's part of each parameter."""
        return [p.ds_tensor for p in self.model.parameters() if hasattr(p, "ds_tensor")]

    def backward(self, loss):
        self.engine.backward(loss)

    def communication(self, is_last):
        """DeepSpeed itself decides when to send; it only has to know which piece ends the step."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        return contextlib.nullcontext()


class EngineStep:
    """What the loop asks of an optimizer, done by a DeepSpeed engine."""

    def __init__(self, engine):
        self.engine, self.step = engine, engine.step

    @property
    def param_groups(self):
        return self.engine.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        """Nothing: the engine's step ends with it."""
