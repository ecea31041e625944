"""ZeRO's stages on models of transformers: the losses and weights are those of torch's DDP."""

import copy
import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab import device, launch
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers")]

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WAYS = (ZeroStage1, False), (ZeroStage2, True), (ZeroStage3, False), (ZeroStage3, True)
V, C = 50, 16  # words, width
# Of the config: its class, and what is smaller than usual. T5's blocks share a position bias; some
# of Mixtral's experts get no token.
SMALL = {
    "GPT2LMHeadModel": {"n_positions": 16, "n_embd": C, "n_layer": 3, "n_head": 2,
                        "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "T5ForConditionalGeneration": {"d_model": C, "d_kv": 8, "d_ff": 24, "num_layers": 2,
                                   "num_heads": 2, "dropout_rate": 0, "decoder_start_token_id": 0},
    "MixtralForCausalLM": {"hidden_size": C, "intermediate_size": 24, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 1,
                           "num_local_experts": 6, "num_experts_per_tok": 1},
}


def trained(model, optimizer):
    """The losses of three steps, then all weights in one row."""
    made, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(3):
        x = torch.randint(1, V, (2, 8), generator=made).to(device())
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = [each.flatten() for each in model.state_dict().values()]
    return torch.cat([torch.stack(losses), *weights])


def differences():
    """{(model, stage, whether it recomputes): the largest difference from DDP, on this rank}."""
    import transformers

    found = {}
    for name, sizes in SMALL.items():
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        whole = kind(kind.config_class(vocab_size=V, use_cache=False, **sizes)).to(device())
        options = {"find_unused_parameters": "Mixtral" in name}
        ddp = TorchDDP(copy.deepcopy(whole), **options)
        wanted = trained(ddp, SGD(ddp.parameters()))
        for stage, recomputes in WAYS:
            module = copy.deepcopy(whole)
            if recomputes:
                module.gradient_checkpointing_enable({"use_reentrant": False})
            model = stage(module, **options)
            seen = trained(model, model.make_optimizer(SGD))
            found[name, stage.__name__, recomputes] = (seen - wanted).abs().max().item()
    return found


def test_models_of_another_library_train_as_with_ddp():
    for of_rank in launch(differences, ranks=3, preload=["transformers"]):
        assert len(of_rank) == len(WAYS) * len(SMALL)
        assert max(of_rank.values()) < 1e-5, of_rank
