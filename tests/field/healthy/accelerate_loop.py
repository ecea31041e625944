"""A loop of accelerate, which starts the group, shards the loader, accumulates, gathers metrics.
expects: nothing
ranks: 2
"""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    x = torch.randn(330, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    train, held_out = torch.utils.data.random_split(data, [270, 60])
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    model, optimizer, loader, validation, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(train, 16, shuffle=True), DataLoader(held_out, 16), scheduler)
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)  # divides by the micro-steps
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for inputs, targets in validation:
            with torch.no_grad():
                hits = model(inputs).argmax(1) == targets
            right.append(accelerator.gather_for_metrics(hits))
        accelerator.print(f"epoch {epoch}: {torch.cat(right).float().mean().item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
