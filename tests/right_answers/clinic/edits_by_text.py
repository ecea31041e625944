"""Lab 16 and the bugs of the labs: mends that were written from the text alone, as edits."""

from ranklab.checks.prover.slips import edited
from ranklab.clinic.hangs import train_on_a_grid
from ranklab.clinic.run_state import resumed_digits, split_digits
from ranklab.clinic.sharding import flat_model, gathered_model, staged_gpt, wide_layer
from ranklab.clinic.slowdowns import train_large_batch
from ranklab.clinic.trainings import long_steps, moving_curve, no_faster, worse_together

RIGHT = {
    # All ranks take the norm before the columns are summed.
    "before": edited(train_on_a_grid, (
        "        for part in parts:\n"
        "            dist.all_reduce(part.grad, group=columns)\n",
        "",
        "            log.append(size)\n"
        "        for part in parts:\n",
        "            log.append(size)\n"
        "        for part in parts:\n"
        "            dist.all_reduce(part.grad, group=columns)\n"
        "        for part in parts:\n",
    )),
    # The squares travel with the logits, in the row's one all-reduce.
    "fused": edited(train_on_a_grid, (
        "    def norm():\n"
        "        squares = sum(part.detach().square().sum() for part in parts)\n"
        "        dist.all_reduce(squares, group=rows)\n"
        "        return squares.sqrt().item()\n"
        "\n",
        "",
        "        whole = part.detach().clone()\n"
        "        dist.all_reduce(whole, group=rows)\n",
        "        squares = sum(each.detach().square().sum() for each in parts)\n"
        "        row_sums = torch.cat([part.detach().flatten(), squares[None]])\n"
        "        dist.all_reduce(row_sums, group=rows)\n"
        "        whole, size = row_sums[:-1].view_as(part), row_sums[-1].sqrt().item()\n",
        "        F.cross_entropy(logits, y[start:start + 16]).backward()\n",
        "        F.cross_entropy(logits, y[start:start + 16]).backward()\n"
        "        if writes:\n"
        "            log.append(size)\n",
        "        size = norm()\n"
        "        if writes:\n"
        "            log.append(size)\n",
        "",
    )),
    # Each rank knows all lines, so it counts the tokens itself.
    "known_total": edited(moving_curve, (
        "        mine = sorted(text[lines * step:][:lines], key=len)[lines // R * "
        "rank:][:lines // R]\n"
        "        count = torch.tensor(sum(len(line) - 1 for line in mine), device=device())\n"
        "        dist.all_reduce(count, group=group)\n",
        "        step_lines = sorted(text[lines * step:][:lines], key=len)[:lines // R * R]\n"
        "        total = sum(len(line) - 1 for line in step_lines)\n"
        "        mine = step_lines[lines // R * rank:][:lines // R]\n",
        '            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:], "sum") / count\n',
        '            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:], "sum") / total\n',
    )),
    # Means stay, each weighted by its piece's share of tokens.
    "weighted_means": edited(moving_curve, (
        "        count = torch.tensor(sum(len(line) - 1 for line in mine), device=device())\n"
        "        dist.all_reduce(count, group=group)\n",
        "        total = torch.tensor(sum(len(line) - 1 for line in mine), device=device())\n"
        "        dist.all_reduce(total, group=group)\n",
        '            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:], "sum") / count\n',
        "            share = (rows[:, 1:] >= 0).sum() * R / total\n"
        "            loss = model(rows[:, :-1].clamp(min=0), rows[:, 1:]) * share\n",
        "            dist.all_reduce(tensor, group=group)\n",
        "            dist.all_reduce(tensor, group=group)\n"
        "            tensor /= R\n",
    )),
    # Gradients and loss in one flat bucket, once in a step.
    "one_bucket": edited(train_large_batch, (
        "            loss += part.detach() / ranks\n"
        "        for parameter in model.parameters():\n"
        "            dist.all_reduce(parameter.grad, group=group)\n"
        "            parameter.grad /= ranks\n"
        "        dist.all_reduce(loss, group=group)\n",
        "            loss += part.detach()\n"
        "        gradients = [parameter.grad for parameter in model.parameters()]\n"
        "        bucket = torch.cat([loss[None], *(gradient.flatten() for gradient in "
        "gradients)])\n"
        "        dist.all_reduce(bucket, group=group)\n"
        "        bucket /= ranks\n"
        "        loss, *parts = bucket.split([1, *(gradient.numel() for gradient in "
        "gradients)])\n"
        "        for gradient, part in zip(gradients, parts):\n"
        "            gradient.copy_(part.view_as(gradient))\n",
    )),
    # Hooks send each gradient during the last backward of a step.
    "hooks": edited(train_large_batch, (
        "    losses = []\n",
        "    losses, works, sends = [], [], False\n"
        "\n"
        "    def send(parameter):\n"
        "        if sends:\n"
        "            works.append(dist.all_reduce(parameter.grad, group=group, "
        "async_op=True))\n"
        "\n"
        "    for parameter in model.parameters():\n"
        "        parameter.register_post_accumulate_grad_hook(send)\n",
        "            part = model(x, y) / len(numbers)\n",
        "            part = model(x, y) / len(numbers)\n"
        "            sends = number == numbers[-1]\n",
        "            loss += part.detach() / ranks\n",
        "            loss += part.detach()\n"
        "        for work in works:\n"
        "            work.wait()\n"
        "        works.clear()\n",
        "            dist.all_reduce(parameter.grad, group=group)\n",
        "",
        "        dist.all_reduce(loss, group=group)\n",
        "        dist.all_reduce(loss, group=group)\n"
        "        loss /= ranks\n",
    )),
    # A batch sampler lists this rank's part of each shuffled batch.
    "batch_sampler": edited(no_faster, (
        "    sampler = DistributedSampler(data, R, rank, seed=seed)\n"
        "    loader = DataLoader(data, batch // R, sampler=sampler)\n",
        "",
        "        sampler.set_epoch(epoch)\n",
        "",
        "        for images, labels, at in loader:\n",
        "        order = torch.randperm(len(x), "
        "generator=torch.Generator().manual_seed(seed + epoch))\n"
        "        totals = [len(each) for each in order.split(batch)]\n"
        "        mine = [each.tensor_split(R)[rank].tolist() for each in order.split(batch)]\n"
        "        loader = DataLoader(data, batch_sampler=mine)\n"
        "        for total, (images, labels, at) in zip(totals, loader):\n",
        "            F.cross_entropy(model(images.to(device())), "
        "labels.to(device())).backward()\n",
        "            loss = F.cross_entropy(model(images.to(device())), labels.to(device()),\n"
        '                                   reduction="sum") / total\n'
        "            loss.backward()\n",
        "                p.grad /= R\n",
        "",
    )),
    # Before each dropout a seed of its own, by step and place.
    "reseeded": edited(wide_layer, (
        "    shared, own = dropout_seeds(seed, row, column, tensor)\n"
        "    torch.manual_seed(shared)\n",
        "",
        "        with own_random(own):\n"
        '            h = F.dropout(F.relu(model["up"](x)), p)\n',
        "        mask_seed = 2 * len(ranks) * (seed * steps + step)\n"
        "        torch.manual_seed(mask_seed + rank)\n"
        '        h = F.dropout(F.relu(model["up"](x)), p)\n'
        "        torch.manual_seed(mask_seed + len(ranks) + row)\n",
    )),
    # Two states of the generator take turns: a rank's and a pair's.
    "two_states": edited(wide_layer, (
        "    shared, own = dropout_seeds(seed, row, column, tensor)\n"
        "    torch.manual_seed(shared)\n",
        "    shared_seed, own_seed = dropout_seeds(seed, row, column, tensor)\n"
        "    generator = torch.cuda.default_generators[device().index or 0] if (\n"
        '        device().type == "cuda") else torch.default_generator\n'
        "    generator.manual_seed(own_seed)\n"
        "    own_state = generator.get_state()\n"
        "    generator.manual_seed(shared_seed)\n",
        "        with own_random(own):\n"
        '            h = F.dropout(F.relu(model["up"](x)), p)\n',
        "        shared_state = generator.get_state()\n"
        "        generator.set_state(own_state)\n"
        '        h = F.dropout(F.relu(model["up"](x)), p)\n'
        "        own_state = generator.get_state()\n"
        "        generator.set_state(shared_state)\n",
    )),
    # The two ends are a group, and add up the matrix's gradients.
    "pair_group": edited(staged_gpt, (
        "    torch.manual_seed(seed)\n",
        "    torch.manual_seed(seed)\n"
        "    ends = dist.new_group([ranks[0], ranks[-1]], "
        "use_local_synchronization=True) if (\n"
        "        R > 1 and (first or last)) else None\n",
        "    ends = None\n"
        "    if R > 1 and (first or last):\n"
        "        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)\n",
        "",
        "        if ends:\n"
        "            end = model.token if first else model.head\n"
        "            dist.all_reduce(end.weight.grad, group=ends)\n",
        "        if ends is not None:\n"
        "            shared = model.token.weight if first else model.head.weight\n"
        "            dist.all_reduce(shared.grad, group=ends)\n",
    )),
    # The first stage alone updates the matrix, and sends it to the last.
    "owner": edited(staged_gpt, (
        "    optimizer = torch.optim.AdamW(model.parameters(), lr)\n"
        "    ends = None\n"
        "    if R > 1 and (first or last):\n"
        "        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)\n",
        "    copied = model.head.weight if last and not first else None\n"
        "    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not "
        "copied], lr)\n",
        "        optimizer.zero_grad()\n",
        "        model.zero_grad()\n",
        "        if ends:\n"
        "            end = model.token if first else model.head\n"
        "            dist.all_reduce(end.weight.grad, group=ends)\n",
        "        if copied is not None:\n"
        "            dist.send(copied.grad, group=group, group_dst=0)\n"
        "        elif first and not last:\n"
        "            of_head = torch.empty_like(model.token.weight)\n"
        "            dist.recv(of_head, group=group, group_src=R - 1)\n"
        "            model.token.weight.grad += of_head\n",
        "        optimizer.step()\n",
        "        optimizer.step()\n"
        "        if copied is not None:\n"
        "            dist.recv(copied.data, group=group, group_src=0)\n"
        "        elif first and not last:\n"
        "            dist.send(model.token.weight.detach(), group=group, group_dst=R - 1)\n",
    )),
    # The updated shards are gathered at once, without async_op.
    "blocking": edited(gathered_model, (
        "    shard, ahead = nn.Parameter(flat.chunk(R)[rank].clone()), torch.empty_like(flat)\n",
        "    shard = nn.Parameter(flat.chunk(R)[rank].clone())\n",
        "        coming = dist.all_gather_single(ahead, shard.detach(), group=group, "
        "async_op=True)\n",
        "        dist.all_gather_single(flat, shard.detach(), group=group)\n",
        "        coming.wait()\n"
        "        flat.copy_(ahead)\n",
        "",
    )),
    # Each rank broadcasts its updated shard, in turn.
    "broadcasts": edited(gathered_model, (
        "    shard, ahead = nn.Parameter(flat.chunk(R)[rank].clone()), torch.empty_like(flat)\n",
        "    shard = nn.Parameter(flat.chunk(R)[rank].clone())\n",
        "        coming = dist.all_gather_single(ahead, shard.detach(), group=group, "
        "async_op=True)\n",
        "        flat.chunk(R)[rank].copy_(shard.detach())\n"
        "        coming = [dist.broadcast(part, group=group, group_src=owner, async_op=True)\n"
        "                  for owner, part in enumerate(flat.chunk(R))]\n",
        "        coming.wait()\n"
        "        flat.copy_(ahead)\n",
        "        for work in coming:\n"
        "            work.wait()\n",
    )),
    # Norms of shards are gathered: their norm is the whole one.
    "gathered_norms": edited(flat_model, (
        "        square = shard.grad.square().sum()\n"
        "        dist.all_reduce(square, group=group)\n"
        "        norm = square.sqrt()\n"
        "        shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)\n",
        "        norms_of = torch.empty(R, device=device())\n"
        "        dist.all_gather_single(norms_of, shard.grad.norm()[None], group=group)\n"
        "        norm = norms_of.norm()\n"
        "        nn.utils.clip_grads_with_norm_([shard], max_norm, norm)\n",
    )),
    # The whole gradient is summed on each rank, and clipped there.
    "whole_gradient": edited(flat_model, (
        "        dist.reduce_scatter_single(shard.grad, gradient, group=group)\n"
        "        square = shard.grad.square().sum()\n"
        "        dist.all_reduce(square, group=group)\n"
        "        norm = square.sqrt()\n",
        "        dist.all_reduce(gradient, group=group)\n"
        "        norm = gradient.norm()\n"
        "        shard.grad.copy_(gradient.chunk(R)[rank])\n",
    )),
    # The loss is a share of the mean; squares of norms are added up.
    "sum_of_loss": edited(long_steps, (
        "        F.cross_entropy(x[at] @ w[:640].view(64, 10), y[at]).backward()\n",
        "        F.cross_entropy(x[at] @ w[:640].view(64, 10), y[at], "
        'reduction="sum").div(240).backward()\n',
        "        part.grad /= R\n",
        "",
    )),
    # Parts are divided by R; the norm is that of all parts' norms.
    "gathered_norms_long_steps": edited(long_steps, (
        "        norm = part.grad.square().sum()\n"
        "        dist.all_reduce(norm, group=group)\n"
        "        norm = norm.sqrt()\n",
        "        norms = torch.empty(R, device=device())\n"
        "        dist.all_gather_single(norms, part.grad.norm()[None], group=group)\n"
        "        norm = norms.norm()\n",
    )),
    # The steps of an epoch are counted on the rank's own batches.
    "counted": edited(worse_together, (
        "    times = R * batch / 32\n"
        "    each = 1152 // (R * batch)\n",
        "    times = batch * R / 32\n"
        "    each = len(x.split(batch))\n",
    )),
    # No scheduler: the rate is computed from the images seen so far.
    "by_hand": edited(worse_together, (
        "    times = R * batch / 32\n"
        "    each = 1152 // (R * batch)\n"
        "    scheduler = LambdaLR(optimizer, lambda step: (1 + (times - 1) * min(1, step "
        "/ each))\n"
        "                         * max(0, 1 - step / (epochs * each)))\n",
        "",
        "                p.grad /= R\n",
        "                p.grad /= R\n"
        "            epochs_done = len(rates) * batch * R / 1152\n"
        "            rate = lr * (1 + (batch * R / 32 - 1) * min(1, epochs_done))\n"
        '            optimizer.param_groups[0]["lr"] = rate * (1 - epochs_done / epochs)\n',
        "            scheduler.step()\n",
        "",
    )),
    # A step's batch follows from its number, without an inner loop.
    "by_number": edited(resumed_digits, (
        "            for at in order.split(batch)[step % in_epoch:]:\n"
        "                mine = at.tensor_split(ranks)[rank]\n"
        "                optimizer.zero_grad()\n"
        "                loss = F.cross_entropy(model(x[mine]), y[mine], "
        'reduction="sum") / len(at)\n'
        "                loss.backward()\n"
        "                for each in [total := loss.detach(), *(p.grad for p in "
        "model.parameters())]:\n"
        "                    dist.all_reduce(each, group=group)\n"
        "                optimizer.step()\n"
        "                losses.append(total.item())\n"
        "                seen += mine.tolist()\n"
        "                if (step := step + 1) == last:\n"
        "                    break\n",
        "            at = order[step % in_epoch * batch:][:batch]\n"
        "            mine = at.tensor_split(ranks)[rank]\n"
        "            optimizer.zero_grad()\n"
        '            loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum") / '
        "len(at)\n"
        "            loss.backward()\n"
        "            for each in [total := loss.detach(), *(p.grad for p in "
        "model.parameters())]:\n"
        "                dist.all_reduce(each, group=group)\n"
        "            optimizer.step()\n"
        "            losses.append(total.item())\n"
        "            seen += mine.tolist()\n"
        "            step += 1\n",
    )),
    # What is left of the epoch's order is saved with the weights.
    "saved_order": edited(resumed_digits, (
        "        model, step = nn.Linear(64, 10).to(device()), 0\n",
        "        model, step = nn.Linear(64, 10).to(device()), 0\n"
        "        left = torch.empty(0, dtype=torch.long)\n",
        '            step = state["step"]\n',
        '            step, left = state["step"], state["left"].cpu()\n',
        "            shuffle = torch.Generator().manual_seed(step // in_epoch)\n"
        "            order = torch.randperm(len(x), generator=shuffle)\n"
        "            for at in order.split(batch)[step % in_epoch:]:\n",
        "            if not len(left):\n"
        "                shuffle = torch.Generator().manual_seed(step // in_epoch)\n"
        "                left = torch.randperm(len(x), generator=shuffle)\n"
        "            for at in left.split(batch):\n"
        "                left = left[batch:]\n",
        '                    "step": step}, file)\n',
        '                    "step": step, "left": left.clone()}, file)\n',
    )),
    # Two files take turns; all load the newest that everyone has.
    "two_files": edited(split_digits, (
        "            newest = max([int(path.name) for path in Path(disk).iterdir()], "
        "default=0)\n",
        "            saved = [torch.load(path, map_location=device()) for path in "
        "Path(disk).iterdir()]\n"
        '            newest = max([state, *saved], key=lambda each: each["step"])["step"]\n',
        "            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)  # what all have\n"
        "            if start > 0:\n"
        "                state = torch.load(Path(disk, str(start.item())), "
        "map_location=device())\n",
        "            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)\n"
        '            [state] = [each for each in [state, *saved] if each["step"] == start]\n',
        "                               Path(disk, str(done)))\n",
        '                               Path(disk, f"state{done // every % 2}"))\n',
    )),
    # A file for each save; ranks gather who has which, and intersect.
    "every_file": edited(split_digits, (
        "            newest = max([int(path.name) for path in Path(disk).iterdir()], "
        "default=0)\n"
        "            start = torch.tensor(newest, device=device())\n"
        "            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)  # what all have\n",
        "            steps_here = torch.zeros(steps + 1, dtype=torch.int64, device=device())\n"
        '            for path in Path(disk).glob("state-*"):\n'
        '                steps_here[int(path.name.partition("-")[2])] = 1\n'
        "            steps_here[0] = 1\n"
        "            everywhere = torch.empty(ranks, steps + 1, dtype=torch.int64, "
        "device=device())\n"
        "            dist.all_gather(list(everywhere), steps_here, group=group)\n"
        "            start = everywhere.all(dim=0).nonzero().max()\n",
        "                state = torch.load(Path(disk, str(start.item())), "
        "map_location=device())\n",
        '                state = torch.load(Path(disk, f"state-{int(start)}"), '
        "map_location=device())\n",
        "                               Path(disk, str(done)))\n",
        '                               Path(disk, f"state-{done}"))\n',
    )),
}
