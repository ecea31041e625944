"""Mesh: who is where, groups made in one order, what stays inside a node, the table, the figure."""

import pickle

import pytest
import torch
import torch.distributed as dist

from ranklab import collectives, device, launch
from ranklab.engine import RankError
from ranklab.mesh import Mesh, build_mesh
from ranklab.plots import mesh as plots
from ranklab.plots import style

CUBE = {"pipeline": 2, "data": 2, "tensor": 2}


# --- without ranks --------------------------------------------------------------------------------


def test_the_last_axis_varies_fastest():
    mesh = Mesh({"pipeline": 2, "data": 3, "tensor": 4})
    assert mesh.size == 24
    assert mesh.coordinates(0) == {"pipeline": 0, "data": 0, "tensor": 0}
    assert mesh.coordinates(17) == {"pipeline": 1, "data": 1, "tensor": 1}
    assert list(mesh.coordinates(17)) == ["pipeline", "data", "tensor"]
    assert all(mesh.rank_at(**mesh.coordinates(rank)) == rank for rank in range(24))
    assert mesh.ranks_along("tensor", 17) == (16, 17, 18, 19)
    assert mesh.ranks_along("data", 17) == (13, 17, 21)
    assert mesh.ranks_along("pipeline", 17) == (5, 17)
    assert mesh.ranks_along(("tensor", "pipeline"), 5) == (4, 5, 6, 7, 16, 17, 18, 19)


@pytest.mark.parametrize("axes", ["pipeline", "data", "tensor", ("data", "tensor"), ()])
def test_the_groups_of_an_axis_hold_every_rank_once(axes):
    groups = Mesh({"pipeline": 2, "data": 3, "tensor": 4}).all_along(axes)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(24))


def test_axes_are_found_from_ranks():
    mesh = Mesh(CUBE | {"alone": 1})
    assert mesh.axes_of((2, 3)) == ("tensor",)
    assert mesh.axes_of((6, 2)) == ("pipeline",)
    assert mesh.axes_of(range(4)) == ("data", "tensor")
    assert mesh.axes_of((0, 3)) == mesh.axes_of((0, 1, 2)) == mesh.axes_of((5,)) == ()


def test_axes_that_stay_inside_a_node():
    mesh = Mesh({"pipeline": 2, "data": 3, "tensor": 4})
    assert mesh.axes_inside(24) == ("pipeline", "data", "tensor")
    assert mesh.axes_inside(12) == ("data", "tensor")
    assert mesh.axes_inside(4) == mesh.axes_inside(8) == ("tensor",)
    assert mesh.axes_inside(6) == mesh.axes_inside(2) == ()  # 6: ranks 4 to 7 are on two nodes


def test_a_mesh_is_frozen_keeps_its_own_axes_and_travels_without_groups():
    given = dict(CUBE)
    mesh = Mesh(given)
    given["data"] = 5
    assert mesh.axes == CUBE and mesh == Mesh(CUBE) != Mesh({"data": 8})
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    with pytest.raises(AttributeError):
        mesh.axes = {}


def test_the_table():
    assert str(Mesh(CUBE)).splitlines() == [
        "8 ranks: pipeline 2 x data 2 x tensor 2",
        "axis      groups",
        "pipeline  0 4 | 1 5 | 2 6 | 3 7",
        "data      0 2 | 1 3 | 4 6 | 5 7",
        "tensor    0 1 | 2 3 | 4 5 | 6 7",
    ]
    assert str(Mesh({"data": 32, "tensor": 4})).splitlines()[2:] == [
        "data    0 4 8 ... 124 | 1 5 9 ... 125 | 2 6 10 ... 126 | and 1 more",
        "tensor  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | and 27 more",
    ]


@pytest.mark.parametrize("call, sentence", [
    (lambda: Mesh({"tensor": 0}), "axis tensor=0 must be a whole number, 1 or more"),
    (lambda: Mesh({"tensor": 2.0}), "axis tensor=2.0 must be a whole number, 1 or more"),
    (lambda: Mesh(CUBE).coordinates(8), "rank=8 must be between 0 and 7"),
    (lambda: Mesh(CUBE).rank_at(pipeline=0, data=2, tensor=0), "data=2 must be between 0 and 1"),
    (lambda: Mesh(CUBE).rank_at(data=1), "a place on each axis: pipeline, data, tensor"),
    (lambda: Mesh(CUBE).ranks_along("tensr", 0), "no axis 'tensr', only pipeline, data, tensor"),
    (lambda: Mesh(CUBE).group("data"), "no group along data: build_mesh makes one for each axis"),
    (lambda: Mesh(CUBE).axes_inside(0), "per_node=0 must be 1 or more"),
])
def test_bad_input_is_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("axes", [CUBE, {"data": 1}, {"p": 2, "d": 2, "c": 2, "t": 2}])
def test_the_figure_has_a_panel_for_each_axis(axes, tmp_path):
    fig = plots.who_talks_to_whom(Mesh(axes), per_node=2)
    assert [ax.get_title().split(":")[0] for ax in fig.axes] == list(axes)
    assert style.save(fig, tmp_path / "mesh.png").stat().st_size > 1000


# --- ranks ----------------------------------------------------------------------------------------


def sums_along_axes(axes, joined=()):
    mesh, rank = build_mesh(axes, joined), dist.get_rank()
    seen = {}
    for names in (*axes, *joined):
        x = torch.tensor([2**rank], device=device())
        dist.all_reduce(x, group=mesh.group(names))
        seen[names] = x.item() == sum(2**other for other in mesh.ranks_along(names))
    return mesh, mesh.coordinates(), seen


def test_each_axis_has_a_group_of_its_own():
    joined = [("data", "tensor"), ("pipeline", "tensor")]
    made = launch(sums_along_axes, CUBE, joined, ranks=8, nodes=2)
    for rank, (mesh, coordinates, seen) in enumerate(made):
        assert mesh == Mesh(CUBE) and coordinates == Mesh(CUBE).coordinates(rank)
        assert seen == dict.fromkeys([*CUBE, *joined], True)


def same_groups():
    mesh = build_mesh({"data": 2, "expert": 1, "tensor": 1}, joined=[("tensor", "data")])
    data, expert, tensor, both = map(mesh.group, ("data", "expert", "tensor", ("data", "tensor")))
    return expert is tensor, data is tensor, data is both, len(set(mesh.groups.values()))


def test_the_same_ranks_share_one_group():
    assert launch(same_groups, ranks=2) == [(True, False, True, 2)] * 2


def test_sizes_must_multiply_to_the_number_of_ranks():
    with pytest.raises(RankError, match="2 x 2 x 3 = 12 ranks, but the job has 2"):
        launch(build_mesh, {"pipeline": 2, "data": 2, "tensor": 3}, ranks=2)


# --- node_groups in parts of the job --------------------------------------------------------------


def sums_in_parts(parts, per_node):
    rank = dist.get_rank()
    made = [dist.new_group(part) for part in parts]
    mine = next((i for i, part in enumerate(parts) if rank in part), 0)
    inside, across = collectives.node_groups(per_node[mine], made[mine])
    if rank not in parts[mine]:
        return inside, across
    x = torch.full((7,), 2.0**rank, device=device())
    return collectives.hierarchical_all_reduce(x, inside, across).tolist()


def test_parts_of_the_job_make_node_groups_of_their_own():
    """Both would number their groups alike: two ranks of one part met two of the other, and hung.

    Rank 7 is in no part.
    """
    parts = [[1, 3, 4, 5], [0, 2, 6]]
    sums = launch(sums_in_parts, parts, (2, 3), ranks=8, nodes=2, timeout=60)
    for part in parts:
        for rank in part:
            assert sums[rank] == [float(sum(2**other for other in part))] * 7
    assert sums[7] == (None, None)
