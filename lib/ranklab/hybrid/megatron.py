"""megatron_command: the same model and layout, as options of Megatron-LM."""

from ranklab.expert_parallel import MoEConfig
from ranklab.hybrid.memory import layout_memory
from ranklab.hybrid.planned import model_of, plan_of
from ranklab.planner.export.megatron import megatron_arguments
from ranklab.planner.memory import memory_per_gpu


def megatron_command(layout, job, per_node=8):
    """A piece of bash. Its user chooses data, learning rate and number of steps.

        bash train.sh --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10

    Comments above the options say what Megatron-LM lacks or does in another way.
    """
    config, model, plan = job.config, model_of(job.config), plan_of(job, layout, "megatron")
    its, ours = memory_per_gpu(model, plan, None).total, layout_memory(job, layout).total
    differs = [
        f"Its fullest GPU holds about {its / 1e9:.1f} GB, that of the course's trainer "
        f"{ours / 1e9:.1f} GB.",
        *["It counts an expert's places over a rank's tokens, not in each sequence."]
        * (getattr(config, "factor", 0) > 0),
        *["Its bias is added to sigmoids; here it is added to a softmax."]
        * (getattr(config, "balance", "") == "bias")]
    more = expert_options(config, layout) if isinstance(config, MoEConfig) else ()
    return megatron_arguments(model, plan, per_node, config.rotary_base, config.dropout, more,
                              differs)


def expert_options(config, layout):
    """Options that a planner's Model lacks: [(option, what it is for, whether it is given)]."""
    return [
        (f"--expert-tensor-parallel-size {layout.tp}", "here tensor ranks share each expert",
         layout.tp > 1),
        ("--moe-router-pre-softmax", "weights are not made to add up to 1",
         not config.renormalize),
        ("--moe-router-load-balancing-type seq_aux_loss", "counted in each sequence",
         config.balance == "loss"),
        ("--moe-router-load-balancing-type none", "by no loss", config.balance != "loss"),
        (f"--moe-aux-loss-coeff {config.coefficient:g}", "of that loss", config.balance == "loss"),
        (f"--moe-z-loss-coeff {config.z:g}", "small logits", config.z > 0),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", "balance by a bias",
         config.balance == "bias"),
        (f"--moe-router-bias-update-rate {config.rate:g}", "its step", config.balance == "bias"),
        (f"--moe-expert-capacity-factor {config.factor:g}", "else no token is dropped",
         config.factor > 0),
    ]  # fmt: skip
