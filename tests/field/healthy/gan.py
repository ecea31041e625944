"""A GAN: two DDPs, two optimizers, and the generator's backward goes through the discriminator.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(999)
netG = DDP(nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 24), nn.Tanh()))
netD = DDP(nn.Sequential(nn.Linear(24, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
generator = torch.Generator().manual_seed(rank)
real_label, fake_label = torch.ones(16, 1), torch.zeros(16, 1)
for i in range(16):
    real = torch.randn(16, 24, generator=generator).sin()
    fake = netG(torch.randn(16, 8, generator=generator))

    netD.requires_grad_(True)
    optimizerD.zero_grad()
    scores = netD(torch.cat([real, fake.detach()]))  # one forward: DDP reduces once
    errD = F.binary_cross_entropy_with_logits(scores, torch.cat([real_label, fake_label]))
    errD.backward()
    optimizerD.step()

    netD.requires_grad_(False)
    optimizerG.zero_grad()
    errG = F.binary_cross_entropy_with_logits(netD.module(fake), real_label)
    errG.backward()
    optimizerG.step()
    if rank == 0 and i % 5 == 0:
        print(f"[{i}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
dist.destroy_process_group()
