"""``--pretrained``: every cell starts from the file's weights, with a head of its own where the file's does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dg import weights
from fedjax_dg.algorithms import fedsr
from fedjax_dg.backbones import lenet5
from fedjax_dg.config import RunConfig, build_backbone
from fedjax_dg.experiment import resolve, round_of
from fedjax_dg.run import make_round
from fedjax_dg.types import Topology

TOPOLOGY = Topology(1, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights of LeNet-5 for 6 classes and for 9, by number of classes, with their variables."""
    found = {}
    for classes in (6, 9):
        path = tmp_path_factory.mktemp("weights") / f"lenet{classes}.npz"
        variables = lenet5(classes).init(jax.random.key(7))
        weights.save(variables, path)
        found[classes] = path, variables
    return found


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def test_every_cell_starts_from_the_file(files):
    path, variables = files[6]
    grid = resolve(RunConfig(pretrained=str(path), seeds=1))
    assert grid.notices == ()
    start = round_of(grid, "mean").init(jax.random.key(0), grid.pretrained).variables
    assert same(start, variables)


def test_a_head_that_does_not_fit_is_drawn_anew_for_every_seed(files):
    path, variables = files[9]
    grid = resolve(RunConfig(pretrained=str(path), seeds=1))
    assert "tells 9 classes apart, so the head for 6 classes is freshly drawn" in grid.notices[0]
    init = round_of(grid, "mean").init
    first, second = (init(jax.random.key(seed), grid.pretrained).variables.params for seed in (0, 1))
    body = {k: v for k, v in variables.params.items() if k != "head"}
    assert same({k: first[k] for k in body}, body) and same({k: second[k] for k in body}, body)
    assert first["head"]["kernel"].shape == (84, 6)
    assert not same(first["head"], second["head"])


def test_layers_that_a_method_adds_are_drawn(files):
    path, variables = files[6]
    round_fn = make_round(lenet5(6), fedsr(), TOPOLOGY)
    plain, loaded = (round_fn.init(jax.random.key(0), v).variables.params for v in (None, variables))
    assert same(loaded["posterior"], plain["posterior"])
    assert same({k: loaded[k] for k in variables.params}, variables.params)


def test_batch_statistics_are_part_of_the_start():
    backbone = build_backbone(RunConfig(backbone="resnet18_cifar"), 6, (32, 32))
    shapes = jax.eval_shape(backbone.init, jax.random.key(0))
    given = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), shapes)
    start = jax.eval_shape(make_round(backbone, fedsr(), TOPOLOGY).init, jax.random.key(0), given).variables
    assert jax.tree.structure(start.batch_stats) == jax.tree.structure(given.batch_stats)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"backbone": "resnet18"}, (32, 32, 3)), ({"backbone": "vgg11_bn", "freeze_bn": True}, (32, 32, 3))],
)
def test_the_network_is_built_for_the_data(options, shape):
    grid = resolve(RunConfig(seeds=1, **options))
    backbone = grid.backbone
    assert (backbone.input_shape, backbone.num_classes) == (shape, 6)


def test_norm_and_frozen_statistics_reach_the_network():
    group = build_backbone(RunConfig(backbone="resnet18", norm="group"), 6, (32, 32))
    assert jax.eval_shape(group.init, jax.random.key(0)).batch_stats == {}
    assert all(g.norm_groups == 32 for g in group.groups)
    assert build_backbone(RunConfig(backbone="resnet18", freeze_bn=True), 6, (32, 32)).module.freeze_bn
