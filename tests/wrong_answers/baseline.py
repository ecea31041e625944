"""Lab 01, the formulas: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

from ranklab.baseline import ends_bytes, transformer_flops
from ranklab.models.gpt import count_parameters


def _flops(config, batch, seq, backward, weights=12.0, attention=2.0, head=1.0, factor=2):
    C, tokens = config.n_embd, batch * seq
    layer = weights * C * C + attention * seq * C
    forward = factor * tokens * (config.n_layer * layer + head * C * config.vocab_size)
    return int(3 * forward if backward else forward)


def transformer_flops__counts_multiply_adds(config, batch, seq, backward=True):
    """multiply and an add are two"""
    return _flops(config, batch, seq, backward, factor=1)


def transformer_flops__six_n(config, batch, seq, backward=True):
    """product by product"""
    return (6 if backward else 2) * count_parameters(config) * batch * seq


def transformer_flops__no_attention(config, batch, seq, backward=True):
    """grow with the square"""
    return _flops(config, batch, seq, backward, attention=0)


def transformer_flops__causal_half(config, batch, seq, backward=True):
    """half of attention"""
    return _flops(config, batch, seq, backward, attention=1)


def transformer_flops__no_head(config, batch, seq, backward=True):
    """head is missing"""
    return _flops(config, batch, seq, backward, head=0)


def transformer_flops__counts_the_embedding(config, batch, seq, backward=True):
    """looking up an embedding"""
    return _flops(config, batch, seq, backward, head=2)


def transformer_flops__one_sequence(config, batch, seq, backward=True):
    """multiply by the batch"""
    return _flops(config, 1, seq, backward)


def transformer_flops__longest_sequence(config, batch, seq, backward=True):
    """not as config.n_ctx"""
    attention = 2.0 * config.n_ctx / seq
    return round(_flops(config, batch, seq, backward, attention=attention))


def transformer_flops__attention_per_head(config, batch, seq, backward=True):
    """heads share C"""
    return _flops(config, batch, seq, backward, attention=2 * config.n_head)


def transformer_flops__backward_costs_one_forward(config, batch, seq, backward=True):
    """twice the forward"""
    return _flops(config, batch, seq, False) * (2 if backward else 1)


def transformer_flops__forward_only(config, batch, seq, backward=True):
    """forward alone"""
    return _flops(config, batch, seq, False)


def mfu__per_cent(config, tokens_per_second, peak_flops, devices=1):
    """not per cent"""
    flops = transformer_flops(config, 1, config.n_ctx) / config.n_ctx
    return 100 * flops * tokens_per_second / (peak_flops * devices)


def mfu__one_device(config, tokens_per_second, peak_flops, devices=1):
    """all devices together"""
    flops = transformer_flops(config, 1, config.n_ctx) / config.n_ctx
    return flops * tokens_per_second / peak_flops


def mfu__forward_only(config, tokens_per_second, peak_flops, devices=1):
    """three forwards"""
    flops = transformer_flops(config, 1, config.n_ctx, backward=False) / config.n_ctx
    return flops * tokens_per_second / (peak_flops * devices)


def mfu__per_sequence(config, tokens_per_second, peak_flops, devices=1):
    """per token, not per sequence"""
    flops = transformer_flops(config, 1, config.n_ctx)
    return flops * tokens_per_second / (peak_flops * devices)


def mfu__six_n(config, tokens_per_second, peak_flops, devices=1):
    """leaves attention out"""
    return 6 * count_parameters(config) * tokens_per_second / (peak_flops * devices)


def _state(n, parameters, gradients, optimizer):
    return {"parameters": parameters * n, "gradients": gradients * n, "optimizer": optimizer * n}


def model_state_bytes__no_master_weights(n, recipe="mixed"):
    """master weights"""
    return _state(n, *{"fp32": (4, 4, 8), "mixed": (2, 2, 8), "bf16": (2, 2, 4)}[recipe])


def model_state_bytes__one_moment(n, recipe="mixed"):
    """two numbers for each parameter"""
    return _state(n, *{"fp32": (4, 4, 4), "mixed": (2, 2, 8), "bf16": (2, 2, 2)}[recipe])


def model_state_bytes__always_sixteen(n, recipe="mixed"):
    """4 bytes in float32 and 2 in bf16"""
    return _state(n, 2, 2, 12)


def model_state_bytes__wide_gradients(n, recipe="mixed"):
    """as wide as its weight"""
    return _state(n, *{"fp32": (4, 4, 8), "mixed": (2, 4, 12), "bf16": (2, 4, 4)}[recipe])


def model_state_bytes__bits(n, recipe="mixed"):
    """a byte has 8"""
    return _state(n, *{"fp32": (32, 32, 64), "mixed": (16, 16, 96), "bf16": (16, 16, 32)}[recipe])


def model_state_bytes__a_single_number(n, recipe="mixed"):
    """return a dict"""
    return 16 * n


def _activations(config, batch, seq, element, recompute, wide=16, stats=4, attention=None):
    if attention is None:
        attention = 4 * config.n_head if config.flash else config.n_head * seq * element
    block = (wide * config.n_embd + stats) * element + attention
    block = config.n_embd * element if recompute else block
    return batch * seq * config.n_layer * block + ends_bytes(config, batch, seq, element)


def activation_bytes__attention_output_twice(config, batch, seq, element=4, recompute=False):
    """attention output is one tensor"""
    return _activations(config, batch, seq, element, recompute, wide=17)


def activation_bytes__three_inputs(config, batch, seq, element=4, recompute=False):
    """read the same input"""
    return _activations(config, batch, seq, element, recompute, wide=18)


def activation_bytes__no_gelu(config, batch, seq, element=4, recompute=False):
    """GELU keeps its input"""
    return _activations(config, batch, seq, element, recompute, wide=12)


def activation_bytes__no_norm_inputs(config, batch, seq, element=4, recompute=False):
    """norms keeps its own input"""
    return _activations(config, batch, seq, element, recompute, wide=14)


def activation_bytes__no_statistics(config, batch, seq, element=4, recompute=False):
    """mean and a deviation"""
    return _activations(config, batch, seq, element, recompute, stats=0)


def activation_bytes__matrix_in_flash(config, batch, seq, element=4, recompute=False):
    """never stores its \\(T, T\\) matrix"""
    matrix = config.n_head * seq * element
    both = matrix + (4 * config.n_head if config.flash else 0)
    return _activations(config, batch, seq, element, recompute, attention=both)


def activation_bytes__no_log_sum(config, batch, seq, element=4, recompute=False):
    """one float32 log-sum"""
    attention = 0 if config.flash else config.n_head * seq * element
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__always_flash(config, batch, seq, element=4, recompute=False):
    """plain attention keeps its"""
    attention = 4 * config.n_head
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__scores_too(config, batch, seq, element=4, recompute=False):
    """softmax needs its output only"""
    attention = 4 * config.n_head if config.flash else 2 * config.n_head * seq * element
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__longest_sequence(config, batch, seq, element=4, recompute=False):
    """as long as this batch"""
    matrix = config.n_head * config.n_ctx * element
    attention = 4 * config.n_head if config.flash else matrix
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__no_ends(config, batch, seq, element=4, recompute=False):
    """add ends_bytes"""
    whole = _activations(config, batch, seq, element, recompute)
    return whole - ends_bytes(config, batch, seq, element)


def activation_bytes__recompute_ignored(config, batch, seq, element=4, recompute=False):
    """keeps one tensor, its input"""
    return _activations(config, batch, seq, element, False)


def transformer_flops__one_layer(config, batch, seq, backward=True):
    """multiply by config.n_layer"""
    one = vars(config) | {"n_layer": 1}
    return _flops(type(config)(**one), batch, seq, backward)


def transformer_flops__head_in_each_layer(config, batch, seq, backward=True):
    """not in each layer"""
    return _flops(config, batch, seq, backward, head=config.n_layer)


def transformer_flops__returns_nothing(config, batch, seq, backward=True):
    """it returned None"""
    _flops(config, batch, seq, backward)


def mfu__times_devices(config, tokens_per_second, peak_flops, devices=1):
    """multiplies by devices"""
    flops = transformer_flops(config, 1, config.n_ctx) / config.n_ctx
    return flops * tokens_per_second / peak_flops * devices


def model_state_bytes__master_weights_with_the_weights(n, recipe="mixed"):
    """master weights belong to the optimizer"""
    return _state(n, *{"fp32": (4, 4, 8), "mixed": (6, 2, 8), "bf16": (2, 2, 4)}[recipe])


def activation_bytes__one_layer(config, batch, seq, element=4, recompute=False):
    """multiply by config.n_layer"""
    one = type(config)(**(vars(config) | {"n_layer": 1}))
    return _activations(one, batch, seq, element, recompute)


def activation_bytes__one_token(config, batch, seq, element=4, recompute=False):
    """multiply by batch \\* seq"""
    ends = ends_bytes(config, batch, seq, element)
    return (_activations(config, batch, seq, element, recompute) - ends) / (batch * seq) + ends


def activation_bytes__one_norm(config, batch, seq, element=4, recompute=False):
    """a block has two norms"""
    return _activations(config, batch, seq, element, recompute, wide=15, stats=2)


def activation_bytes__narrow_log_sums(config, batch, seq, element=4, recompute=False):
    """log-sums are float32"""
    attention = element * config.n_head if config.flash else None
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__flash_and_plain_swapped(config, batch, seq, element=4, recompute=False):
    """branches swapped"""
    matrix = config.n_head * seq * element
    attention = matrix if config.flash else 4 * config.n_head
    return _activations(config, batch, seq, element, recompute, attention=attention)


def activation_bytes__wide_ends(config, batch, seq, element=4, recompute=False):
    """give ends_bytes your `element`"""
    ends = [ends_bytes(config, batch, seq, e) for e in (element, 4)]
    return _activations(config, batch, seq, element, recompute) - ends[0] + ends[1]


def activation_bytes__ends_in_each_layer(config, batch, seq, element=4, recompute=False):
    """after multiplying by the layers"""
    more = (config.n_layer - 1) * ends_bytes(config, batch, seq, element)
    return _activations(config, batch, seq, element, recompute) + more
