"""PPO: each rank has rollouts of its own, goes over them three times, and all stop by a shared KL.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 32)
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states):
        hidden = self.body(states).tanh()
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
agent = DDP(ActorCritic())
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
for states in torch.randn(5, 64, 10):  # of a rollout
    with torch.no_grad():
        policy, values = agent.module(states)
        old = policy.log_prob(actions := policy.sample())
        returns = (actions == states[:, :4].argmax(1)).float() + 0.1 * torch.randn(64)
    for minibatch in torch.cat([torch.randperm(64) for _ in range(3)]).split(32):
        policy, value = agent(states[minibatch])
        log_ratio = policy.log_prob(actions[minibatch]) - old[minibatch]
        ratio, advantage = log_ratio.exp(), F.layer_norm((returns - values)[minibatch], (32,))
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        optimizer.zero_grad()
        (F.mse_loss(value, returns[minibatch]) - gain - 0.01 * policy.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(kl := (ratio - 1 - log_ratio).mean().detach())
        if kl > 0.1:  # the same sum on all ranks, so that all stop
            break
dist.destroy_process_group()
