"""Train the Llama of our FSDP with Accelerate's FSDP, and with transformers' Trainer.

Both may silently do something else: where FSDP can't run, such as on a CPU, they train with DDP
without a warning. The losses are the same as with FSDP, so only assert_sharded can tell. Under
Trainer, DeepSpeed does the sharding, as in zero (lab 06).
"""

import tempfile
import warnings
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader

from ranklab.engine import device, launch
from ranklab.fsdp.block import FullyShardedBlock
from ranklab.fsdp.masked import masked_loss
from ranklab.fsdp.shards import sharded_parameters
from ranklab.peers.deepspeed_zero import PAPERS, quiet_deepspeed

NOT_HERE = ("transformers and accelerate are not here: pip install -c constraints.txt -e '.[hf]' "
            "brings them")
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "initializer_range": 0.1, "use_cache": False}
RANKS, BATCH, T, LR = 2, 4, 16, 0.5  # a batch of BATCH texts on each rank
# Clipping is set here, because otherwise Accelerate uses 1.0, whatever Trainer is given.
ZERO_3 = {"zero_optimization": {"stage": 3, **PAPERS}, "train_micro_batch_size_per_gpu": BATCH,
          "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}


def are_here():
    """Return True if transformers and accelerate are installed; import nothing."""
    return all(map(find_spec, ("transformers", "accelerate")))


def losses_on_ranks(train, steps):
    """Return rank 0's train(steps), or [] if transformers or accelerate is missing.

    train: train_with_ours, train_with_accelerate or train_with_trainer
    """
    if not are_here():
        return []
    return launch(train, steps, ranks=RANKS, timeout=120, preload=("transformers.trainer",))[0]


def samples_of_resumed_ranks(samples, before, after, steps, batches):
    """List the samples of an epoch that `before` ranks begin and `after` ranks finish.

    Accelerate deals them out in order, and skips as Trainer does when it resumes.
    steps: steps before the resume. batches: samples per rank and step, before and after it.
    Returns: sample numbers; [] if transformers or accelerate is missing.
    """
    if not are_here():
        return []
    with warnings.catch_warnings(action="ignore"):  # tqdm's, in a notebook without widgets
        from accelerate.data_loader import BatchSamplerShard, skip_first_batches  # seconds

    def loader(rank, ranks, size):
        whole = BatchSampler(range(samples), size, drop_last=False)
        return DataLoader(range(samples), batch_sampler=BatchSamplerShard(whole, ranks, rank))

    first = [batch for rank in range(before)
             for batch in [*loader(rank, before, batches[0])][:steps]]
    rest = [batch for rank in range(after)
            for batch in skip_first_batches(loader(rank, after, batches[1]), steps)]
    return torch.cat(first + rest).tolist()


def assert_sharded(model, ranks):
    """Check that this rank keeps 1/ranks of `model`'s numbers, or up to half more for uneven rows.

    FSDP2, DeepSpeed's ZeRO-3 or our FSDP may have sharded it.
    Raises: AssertionError if it keeps more.
    """
    shards = sharded_parameters(model)
    whole, local = map(sum, zip(*(sizes_of(p, shards) for p in model.parameters())))
    if local > 1.5 * whole / ranks:
        job = dist.get_world_size() if dist.is_initialized() else 1
        raise AssertionError(
            f"not sharded: this rank keeps {local:,} of the model's {whole:,} numbers, not "
            f"1/{ranks} of them; the model is a {type(model).__name__}, the ranks of its job: "
            f"{job}")


def sizes_of(parameter, shards):
    """Return (numbers of a parameter, numbers on this rank); `shards` are sharded_parameters."""
    if isinstance(parameter, DTensor):
        return parameter.numel(), parameter.to_local().numel()
    if hasattr(parameter, "ds_tensor"):  # DeepSpeed's
        return parameter.ds_numel, parameter.ds_tensor.numel()
    shape = shards[parameter].shape if parameter in shards else parameter.shape
    return shape.numel(), parameter.numel()


# --- the same Llama, texts and optimizer, by each -------------------------------------------------

def new_llama():
    """Make the same small Llama on every rank."""
    import transformers  # seconds, and only here

    transformers.logging.set_verbosity_error()  # Trainer passes it on to DeepSpeed
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(device())


def new_optimizer(model):
    """Make SGD: under Adam, gradients that are wrong by a factor would not show."""
    return torch.optim.SGD(model.parameters(), lr=LR)


def texts(steps):
    """Draw the tokens of all ranks, in the order in which Trainer deals them out."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(8, (steps, dist.get_world_size(), BATCH, T), generator=generator)


def _train(model, optimizer, steps, backward=torch.Tensor.backward):
    """Train; return the loss of each step, over all ranks.

    Raises: AssertionError if `model` is not sharded.
    """
    assert_sharded(model, dist.get_world_size())
    losses = []
    for tokens in texts(steps)[:, dist.get_rank()].to(device()):
        loss = masked_loss(model(input_ids=tokens).logits, tokens)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def train_with_ours(steps):
    """Train with our FSDP, on each rank, inside launch; return the losses."""
    model = new_llama()
    for module in (*model.model.layers, model):
        FullyShardedBlock(module)
    return _train(model, new_optimizer(model), steps)


def train_with_accelerate(steps):
    """Train with Accelerate and its plugin for FSDP2; return the losses.

    If Accelerate does not shard, as on a CPU, return the message of assert_sharded.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # seconds, and only here

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    with warnings.catch_warnings(action="ignore"):
        accelerator = Accelerator(cpu=device().type != "cuda", fsdp_plugin=plugin)
        model = new_llama()
        model, optimizer = accelerator.prepare(model, new_optimizer(model))
    try:
        return _train(model, optimizer, steps, accelerator.backward)
    except AssertionError as error:
        return str(error)


def train_with_trainer(steps):
    """Train with transformers' Trainer and DeepSpeed's ZeRO-3; return the losses."""
    import transformers

    quiet_deepspeed()
    examples = [{"input_ids": tokens, "labels": tokens} for tokens in texts(steps).flatten(0, 2)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        trainer = transformers.Trainer(
            model=new_llama(), train_dataset=examples, args=transformers.TrainingArguments(
                folder, use_cpu=device().type != "cuda", deepspeed=ZERO_3, max_steps=steps,
                per_device_train_batch_size=BATCH, train_sampling_strategy="sequential",
                optim="sgd", learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=0.0,
                logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    assert_sharded(trainer.model_wrapped, dist.get_world_size())
    trainer.model_wrapped.destroy()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
