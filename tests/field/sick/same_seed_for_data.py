"""All ranks draw their batches after the same manual_seed: they train on the same tokens.
expects: same_data
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocab_size, n_embd = 16, 8, 65, 32


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.mlp = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, 4 * n_embd), nn.GELU(),
                                 nn.Linear(4 * n_embd, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx)
        logits = self.lm_head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x, y


dist.init_process_group("gloo")
torch.manual_seed(1337)  # 1337 + rank is what it should be
data = torch.randint(vocab_size, (5000,), generator=torch.Generator().manual_seed(0))
model = DDP(Bigrams())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
for step in range(16):
    loss = model(*get_batch(data))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
