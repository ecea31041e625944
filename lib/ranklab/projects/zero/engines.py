"""Ours and DeepSpeed's ZeRO as the one training loop sees them."""

import contextlib
from dataclasses import replace

from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.text_trainer import TextTrainer
from ranklab.zero.deepspeed_engine import deepspeed_engine
from ranklab.zero.training import Zero


def new_trainer(model, text, config, stage, stages, progress):
    """The trainer of `model` by config.engine, in this stage of ZeRO."""
    kind = TextTrainer
    if config.engine == "deepspeed":
        kind, parallel = DeepSpeedTrainer, DeepSpeed(stage, config)
        config = replace(config, clip=0.0)  # DeepSpeed does it
    elif stage == 0:
        parallel = DataParallel(equal_parts=True)
    else:
        parallel = Zero(stage, equal_parts=True, offload=config.offload, stages=stages)
    if config.precision == "bf16" and has_master_weights(config, stage):
        model.bfloat16()
        in_16_bits = model.loss  # too few for a sum over many targets
        model.loss = lambda head, *rest: in_16_bits(lambda x: head(x).float(), *rest)
        config = replace(config, precision="fp32")  # all is computed as it is held: no autocast
    trainer = kind(model, text, config, device(), parallel=parallel, progress=progress)
    trainer.title = f"{config.engine}, stage {stage}"
    return trainer


def has_master_weights(config, stage):
    """True where a model of 16-bit parameters is stepped in float32: plain data parallelism has
    none, so there the weights stay in float32, and products are taken in bf16.
    """
    return stage > 0 or config.engine == "deepspeed"


class DeepSpeed(DataParallel):
    """DeepSpeed's ZeRO: it averages gradients, clips and steps."""

    def __init__(self, stage, config):
        super().__init__(equal_parts=True)
        self.stage, self.config = stage, config

    def apply(self, model):
        self.model = model
        return lambda *inputs: self.engine(*inputs)

    def make_optimizer(self, new_optimizer, groups):
        named = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        chosen = {name: getattr(self.config, name)
                  for name in ("offload", "offload_parameters", "clip", "compiled")}
        self.engine = deepspeed_engine(self.model, new_optimizer, self.stage, groups=named,
                                       **chosen)
        return EngineStep(self.engine)

    def backward(self, loss):
        self.engine.backward(loss)

    def communication(self, is_last):
        """DeepSpeed decides by itself what to send; it has to know which piece ends the step."""
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


class DeepSpeedTrainer(TextTrainer):
    """The loop, with checkpoints in DeepSpeed's format: for as many ranks and the same stage."""

    def save(self):
        if self.loop.checkpoint:
            self.parallel.engine.save_checkpoint(self.loop.checkpoint, f"step-{self.steps_done}",
                                                 {"trained_steps": self.steps_done})

    def resume(self):
        path, state = self.parallel.engine.load_checkpoint(self.loop.checkpoint)
        if path is None:
            raise FileNotFoundError(f"{self.loop.checkpoint} holds no checkpoint of DeepSpeed")
        self.steps_done = state["trained_steps"]
