"""A transformer's shape: its parameters, its matrix products, and FLOPs by both conventions."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer.

    kv_heads    0: the same as heads
    head_size   0: hidden / heads
    gated       the MLP has three matrices (Llama), not two (GPT)
    tied        the head is the embedding's matrix
    experts     0: dense. Otherwise each token goes to top_k of them, and to `shared` more,
                of width expert_ffn
    dense       number of layers with an MLP of width ffn instead of experts
    spread      these layers are not the first ones, but spread over the model
    windowed    number of layers that see only a window of tokens
    parallel    attention and MLP share one input and one sum (PaLM): half the tensor messages
    attention_numbers  parameters of a layer's attention if it is not plain (MLA); 0: plain
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = False
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    expert_ffn: int = 0
    dense: int = 0
    parallel: bool = False
    attention_numbers: int = 0
    spread: bool = False
    window: int = 0
    windowed: int = 0

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden < self.heads:
            raise ValueError(f"hidden={self.hidden} is less than the {self.heads} heads")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.hidden // self.heads)

    @cached_property
    def matrices(self):
        """The number of matrices of an MLP."""
        return 3 if self.gated else 2

    @cached_property
    def width(self):
        """The width of all heads together."""
        return self.heads * self.head_size

    @cached_property
    def attention(self):
        """Parameters of a layer's attention."""
        plain = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return self.attention_numbers or plain

    @cached_property
    def expert(self):
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @cached_property
    def sparse_layers(self):
        return self.layers - self.dense if self.experts else 0

    @cached_property
    def block(self):
        """Parameters of a dense layer; with experts, the part on all ranks (router, shared)."""
        if self.experts:
            return self.attention + self.hidden * self.experts + self.shared * self.expert
        return self.attention + self.matrices * self.hidden * self.ffn

    @cached_property
    def dense_ffn(self):
        """Parameters of a dense layer in a model with experts, beyond `block`."""
        return (self.attention + self.matrices * self.hidden * self.ffn - self.block
                if self.experts else 0)

    @cached_property
    def embedding(self):
        return self.vocab * self.hidden

    @cached_property
    def parameters(self):
        """The number of all parameters, without norms and biases (below 0.1% of a large model)."""
        ends = self.embedding * (1 if self.tied else 2)
        experts = self.sparse_layers * self.experts * self.expert
        return self.layers * self.block + self.dense * self.dense_ffn + experts + ends

    @cached_property
    def active(self):
        """The parameters used in one token's matrix products: without the embedding lookup."""
        idle = self.sparse_layers * (self.experts - self.top_k) * self.expert
        return self.parameters - idle - (0 if self.tied else self.embedding)

    def flops_per_token(self, sequence, causal=False, forwards=1):
        """Return the FLOPs of a token, forward and backward: 6 for each active parameter, and
        attention's.

        Attention counts in full, as in PaLM's MFU (2022, appendix B); with causal, only the needed
        half. forwards=2 counts a forward that runs twice: hardware FLOPs (HFU).
        """
        attention = 4 * self.layers * self.attended(sequence) * self.width / (2 if causal else 1)
        return (2 + forwards) * (2 * self.active + attention)

    def attended(self, sequence):
        """Return how many tokens a token attends to, on average over the layers."""
        part = min(1, self.window / sequence) if self.windowed else 1
        return sequence * (1 - self.windowed / self.layers * (1 - part))

    def dense_of(self, layers, is_first):
        """Return how many of a stage's layers have no experts, on average where they are spread."""
        if self.spread:
            return self.dense * layers / self.layers
        return min(layers, self.dense) if is_first else 0

    def products(self, tp=1):
        """Return [(K, N)] of a dense layer's matrix products on a tensor rank, without experts."""
        h, kv = self.hidden, 2 * self.kv_heads * self.head_size
        if self.attention_numbers:  # low-rank ones: the same numbers in two products
            rows = self.attention_numbers / (2 * h)
            shapes = [(h, rows / tp), (rows / tp, h)]
        else:
            shapes = [(h, (self.width + kv) / tp), (self.width / tp, h)]
        ffn = self.shared * self.expert_ffn if self.experts else self.ffn
        return shapes + ([(h, (self.matrices - 1) * ffn / tp), (ffn / tp, h)] if ffn else [])
