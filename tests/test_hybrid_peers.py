"""Lab 12 beside torch's own composition and DeepSpeed: the same losses as one process."""

import pytest

from ranklab import launch
from ranklab.data import python_text
from ranklab.hybrid import Layout
from ranklab.projects.hybrid import peers

pytestmark = pytest.mark.timeout(180)

LAYOUTS = [Layout(2, 2, 2, sequence_parallel=True), Layout(2, 2, 2, zero=3, outer="data"),
           Layout(1, 2, 4), Layout(4, 1, 2, virtual=2, recompute=True)]  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return python_text()


@pytest.fixture(scope="module")
def alone(text):
    return peers.our_losses(text, Layout())


def _all(text):
    return [peers.train(text, peers.TorchHybrid, layout, 3) for layout in LAYOUTS]


def test_torch_has_the_losses_of_one_process(text, alone):
    for of_rank in launch(_all, text, ranks=8, timeout=170):
        for losses in of_rank:
            assert losses == pytest.approx(alone, abs=1e-5)


def test_deepspeed_has_the_losses_of_one_process(text, alone):
    found = peers.deepspeed_losses(text, Layout(2, 1, 2, zero=1))
    assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("way, layout, said", [
    (peers.torch_losses, Layout(1, 1, 2, schedule="zb-v"), "zero-bubble schedules do not go with"),
    (peers.torch_losses, Layout(2, virtual=2), "a tied matrix that two stages of one rank share"),
    (peers.deepspeed_losses, Layout(2, 1, 2), "dp 2 x tp 1 x pp 2: .* is compared with zero=1"),
    (peers.deepspeed_losses, Layout(2, 2, 2, zero=1), "over data and pipeline ranks"),
])
def test_what_they_do_not_do_is_a_sentence(way, layout, said):
    with pytest.raises(ValueError, match=said):
        way(None, layout)
