"""Lab 11: once to a node, and in 8 bits: equal to dispatch_tokens, bytes equal to the formulas."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab import expert_parallel as ep
from ranklab.collectives import node_groups
from ranklab.meter import Traffic

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

N, C, E, K = 20, 32, 16, 4


def tokens(rank):
    random = torch.Generator().manual_seed(rank)
    chosen = torch.rand(N, E, generator=random).argsort(dim=1)[:, :K]
    chosen[::7, 1] = -1
    return torch.randn(N, C, generator=random), chosen


def sorted_rows(rows, counts):
    """Sort the rows of each expert, which may have any order."""
    return [sorted(part.tolist()) for part in rows.detach().split(counts.tolist())]


def _both_ways(per_node):
    x, chosen = (each.to(device()) for each in tokens(dist.get_rank()))
    inside, across = node_groups(per_node)
    results = []
    for dispatch in (lambda x: ep.dispatch_once(x, chosen, E, inside, across),
                     lambda x: ep.dispatch_tokens(x, chosen, E)):
        y = x.clone().requires_grad_()
        with Traffic() as traffic:
            rows, sent = dispatch(y)
        counts = sent if torch.is_tensor(sent) else sent.counts
        with Traffic() as backward:
            rows.square().sum().backward()
        node = dist.get_rank() // per_node
        slow = [sum(n for peer, n in each.bytes_to.items() if peer // per_node != node)
                for each in (traffic, backward)]
        results.append((sorted_rows(rows, counts), y.grad, slow))
    return results


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_once_to_a_node_brings_the_same_rows_for_fewer_bytes(per_node):
    nodes, R = 4 // per_node, 4
    of_rank = launch(_both_ways, per_node, ranks=R)
    crossed = [ep.crossings(tokens(rank)[1], E, nodes, rank // per_node) for rank in range(R)]
    for rank, ((rows, grad, slow), (flat_rows, flat_grad, flat_slow)) in enumerate(of_rank):
        assert rows == flat_rows
        torch.testing.assert_close(grad, flat_grad)
        once, each = crossed[rank]
        assert slow[0] == ep.once_bytes(once, C, K, 4) + 8 * (nodes - 1)
        assert flat_slow[0] == each * 4 * C + 8 * (R - per_node) * E // R
    for way, rows in ((0, 0), (1, 1)):  # what came goes back, as gradients
        assert sum(results[way][2][1] for results in of_rank) == 4 * C * sum(
            each[rows] for each in crossed)


def test_experts_that_nodes_do_not_divide_are_a_sentence():
    text = launch(_six_experts, ranks=4)[0]
    assert text == "2 nodes of 2 ranks must divide the 6 experts"


def _six_experts():
    try:
        ep.dispatch_once(torch.zeros(1, 1), torch.zeros(1, 1).long(), 6, *node_groups(2))
    except ValueError as error:
        return str(error)


def test_the_mean_of_crossings_is_that_of_many_tokens():
    chosen = torch.rand(20_000, 64, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    counted = ep.crossings(chosen, 64, 8, 3)
    for number, mean in zip(counted, ep.even_crossings(6, 64, 8)):
        assert number / len(chosen) == pytest.approx(mean, rel=0.01)


# --- in 8 bits ------------------------------------------------------------------------------------

def numbers(rank, dtype):
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 96, generator=random) * 10.0 ** torch.randint(-6, 7, (6, 1),
                                                                     generator=random)
    x[0, 5] *= 1000
    x[1, :32] = 0
    x[2, 40] = 448 * 2.0**-3
    return x.to(dtype)


def _in_eight_bits(dtype):
    x = numbers(dist.get_rank(), dtype).to(device())
    to, came = ([1, 5], [1, 2]) if dist.get_rank() == 0 else ([2, 4], [5, 4])
    exact = ep.AllToAll.apply(x, to, came, None)
    with Traffic() as traffic:
        rows = ep.mxfp8_all_to_all(x, to, came)
    assert rows.dtype == dtype
    return exact.float(), rows.float(), (traffic.sent_bytes, to[1 - dist.get_rank()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_within_half_a_step_of_the_grid(dtype):
    for exact, rows, (nbytes, sent) in launch(_in_eight_bits, dtype, ranks=2):
        assert nbytes == ep.mxfp8_bytes(sent * 96)
        blocks = exact.unflatten(1, (-1, 32))
        scale = torch.exp2((blocks.abs().amax(2, keepdim=True) / 448).log2().ceil())
        scale = scale.clamp(min=2.0**-126)
        # 3 bits after the leading one: a step is 1/8 of a number's power of two, 2**-9 near 0.
        half = torch.maximum(blocks.abs() / 16, scale * 2.0**-10)
        assert ((rows.unflatten(1, (-1, 32)) - blocks).abs() <= half * 1.0001).all()


def test_a_scale_is_the_byte_that_torch_calls_e8m0():
    exponents = torch.tensor([-126, -3, 0, 5, 120])
    assert ((exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu).float()
            == torch.exp2(exponents.float())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_rounds_to_the_same_bits(dtype):
    if not importlib.util.find_spec("torchao"):
        pytest.skip("needs torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    for rank, (x, rows) in enumerate(launch(_to_itself, dtype, ranks=2)):
        scale, data = to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
        theirs = data.float().unflatten(1, (-1, 32)) * scale.float()[..., None]
        assert torch.equal(theirs.flatten(1).to(dtype), rows), rank


def _to_itself(dtype):
    x = numbers(dist.get_rank(), dtype).to(device())
    sizes = [len(x) * (rank == dist.get_rank()) for rank in range(2)]
    return x.cpu(), ep.mxfp8_all_to_all(x, sizes, sizes).cpu()


def test_rows_that_blocks_do_not_divide_are_a_sentence():
    with pytest.raises(ValueError, match="blocks of 32 must divide rows of 40 numbers"):
        ep.mxfp8_all_to_all(torch.zeros(1, 40), [1], [1])
