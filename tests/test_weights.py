"""Pretrained weights: files written here byte by byte, without PyTorch, and a network computed in PyTorch's own layouts."""

import functools
import hashlib
import io
import json
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from pytorch_files import Parameter, Storage, Tensor, dense, legacy_of, pickled, whole, written, zip_of
from tiny import tiny_backbone

from fedjax_dg import backbones
from fedjax_dg.alignment import Axis, Group
from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.backbones import Backbone, lenet5
from fedjax_dg.weights import load, read, save


@functools.cache
def sample():
    """Tensors of every sort that a state dict may hold."""
    rng = np.random.default_rng(0)
    shared = Storage("Float", rng.normal(size=60).astype(np.float32))
    half = Storage("Half", rng.normal(size=12).astype(np.float16))
    return OrderedDict(
        plain=whole(rng.normal(size=(3, 4)).astype(np.float32)),
        transposed=Tensor(shared, 0, (5, 4, 3), (1, 5, 20)),
        offset=Tensor(shared, 7, (2, 5), (30, 3)),
        tied=Tensor(shared, 0, (5, 4, 3), (1, 5, 20)),
        parameter=Parameter(whole(np.array([1.5, -2.0], np.float32))),
        expanded=Tensor(shared, 4, (2, 3), (0, 1)),
        half=Tensor(half, 1, (5, 2), (1, 5)),
        half_tied=Tensor(half, 0, (12,), (1,)),
        double=whole(rng.normal(size=(2, 2)), "Double"),
        bfloat=whole(np.array([1.0, -3.140625, 2.0**-100], jnp.bfloat16), "BFloat16"),
        counts=whole(np.array([2**40, -3]), "Long"),
        scalar=whole(np.array(7), "Long"),
        truth=whole(np.array([True, False]), "Bool"),
        empty=whole(np.zeros((0, 3), np.float32)),
    )


FILES = ("zip", "legacy", "safetensors", "npz")
every_file = pytest.mark.parametrize("kind", FILES)
every_pickle = pytest.mark.parametrize("kind", ["zip", "legacy"])


@pytest.fixture
def put(tmp_path):
    """Writes bytes into a file and says where."""

    def put(content, name="weights.bin"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return put


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


# --- reading --------------------------------------------------------------------------------------------------------


@every_file
def test_every_kind_of_file_gives_the_same_arrays(kind, put):
    expected = {name: dense(tensor) for name, tensor in sample().items()}
    assert {str(x.dtype) for x in expected.values()} == {"float32", "int64", "bool"}
    assert_same_state(read(put(written(kind, sample()))), expected)
    # the content decides, not the suffix
    assert_same_state(read(put(written(kind, sample()), "weights.safetensors")), expected)


@every_pickle
@pytest.mark.parametrize("protocol", [3, 5])
def test_every_pickle_protocol_is_read(kind, protocol, put):
    expected = {name: dense(tensor) for name, tensor in sample().items()}
    assert_same_state(read(put(written(kind, sample(), protocol))), expected)


def test_a_big_endian_zip_is_swapped_and_one_without_the_flag_is_little_endian(put):
    expected = {name: dense(tensor) for name, tensor in sample().items()}
    for byteorder in ("big", None):
        assert_same_state(read(put(zip_of(*pickled(sample()), byteorder=byteorder))), expected)


@every_pickle
def test_tied_tensors_share_their_memory(kind, put):
    found = read(put(written(kind, sample())))
    assert np.shares_memory(found["tied"], found["transposed"])
    assert np.shares_memory(found["offset"], found["transposed"])
    assert np.shares_memory(found["half"], found["half_tied"])  # float32 by now, but once
    assert not np.shares_memory(found["plain"], found["transposed"])


def test_files_of_the_first_versions_are_read(put):
    """A rebuild function of four arguments, and storages that are parts of others."""
    root = Storage("Float", np.arange(10, dtype=np.float32))
    part = Storage("Float", root.values[4:8], part_of=(root, 4))
    tensors = {
        "old": Tensor(root, 1, (2, 2), (2, 1), "_rebuild_tensor"),
        "part": Tensor(part, 1, (3,), (1,), "_rebuild_tensor"),
    }
    found = read(put(written("legacy", tensors)))
    assert_same_state(found, {"old": np.float32([[1, 2], [3, 4]]), "part": np.float32([5, 6, 7])})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"epoch": 3, "state_dict": state, "lr": 0.1},
        lambda state: {"model": state, "optimizer": {"state": {0: {"step": 1}}}},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {"state_dict": {"model": state}},
        lambda state: OrderedDict((f"module.{name}", x) for name, x in state.items()),
        lambda state: {"state_dict": {f"module.{name}": x for name, x in state.items()}},
    ],
)
def test_wrappers_and_the_prefix_of_data_parallel_are_taken_off(wrap, put):
    state = {"a.weight": whole(np.float32([1, 2])), "b.module.weight": whole(np.float32([3]))}
    expected = {name: dense(tensor) for name, tensor in state.items()}
    assert_same_state(read(put(written("zip", wrap(state)))), expected)


def test_a_prefix_of_some_names_only_stays(put):
    state = {"module.a": whole(np.float32([1])), "b": whole(np.float32([2]))}
    assert read(put(written("safetensors", state))).keys() == {"module.a", "b"}


def test_a_model_named_model_is_no_wrapper(put):
    state = {"model": whole(np.float32([1])), "state_dict": whole(np.float32([2]))}
    assert read(put(written("zip", state))).keys() == {"model", "state_dict"}


def test_attributes_of_the_state_dict_are_ignored(put):
    state = OrderedDict(a=whole(np.float32([1])))
    state._metadata = OrderedDict({"": {"version": 1}})  # as every state_dict() of PyTorch has it
    content, storages = pickled(state)
    assert b"_metadata" in content
    assert_same_state(read(put(zip_of(content, storages))), {"a": np.float32([1])})


# --- refusing -------------------------------------------------------------------------------------------------------


def calling(module, name, argument):
    """A pickle that calls a function: protocol 2, GLOBAL, BINUNICODE, TUPLE1, REDUCE."""
    text = argument.encode()
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (module.encode(), name.encode(), len(text).to_bytes(4, "little"), text)


@every_pickle
@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("torch.nn", "Module"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "defaultdict"),
        ("collections", "OrderedDict.fromkeys"),
        ("numpy", "FloatStorage"),
    ],
)
def test_nothing_but_tensors_may_be_asked_for(kind, module, name, put, tmp_path):
    trace = tmp_path / "run"
    argument = f"open({str(trace)!r}, 'w')" if name == "eval" else f"touch {trace}"
    content = calling(module, name, argument)
    path = put(zip_of(content) if kind == "zip" else legacy_of(content))
    with pytest.raises(ValueError, match=f"asks for {module}.{name}, which no tensor needs"):
        read(path)
    assert not trace.exists()


def test_the_payloads_of_the_refusals_would_have_run(tmp_path):
    trace = tmp_path / "run"
    for content in (
        calling("builtins", "eval", f"open({str(trace)!r}, 'w').close()"),
        calling("os", "system", f"touch {trace}"),
    ):
        pickle.loads(content)
        assert trace.exists()
        trace.unlink()


@every_pickle
@pytest.mark.parametrize(
    "pid", [("module", "FloatStorage", "0", "cpu", 1), "0", ("storage",), ("storage", "FloatStorage", [], "cpu", 1)]
)
def test_persistent_ids_that_are_no_storages_are_errors(kind, pid, put):
    class Surprise(pickle.Pickler):
        def persistent_id(self, obj):
            return pid if obj == "here" else None

    file = io.BytesIO()
    Surprise(file, 2).dump({"a": "here"})
    content, storages = file.getvalue(), [Storage("Float", np.float32([1]))]
    path = put(zip_of(content, storages) if kind == "zip" else legacy_of(content, storages))
    with pytest.raises(ValueError, match=r"weights.bin cannot be read"):
        read(path)


@every_pickle
@pytest.mark.parametrize(
    "offset, shape, strides",
    [(1, (6,), (1,)), (0, (2, 3), (4, 1)), (-1, (2,), (1,)), (2, (3,), (-2,)), (7, (1,), (1,)), (0, (7,), (1,))],
)
def test_a_tensor_may_not_reach_outside_its_storage(kind, offset, shape, strides, put):
    inside = Tensor(Storage("Float", np.arange(6, dtype=np.float32)), 0, (6,), (1,))
    assert read(put(written(kind, {"a": inside})))["a"].tolist() == [0, 1, 2, 3, 4, 5]
    outside = Tensor(inside.storage, offset, shape, strides)
    with pytest.raises(ValueError, match=r"cannot be read"):
        read(put(written(kind, {"a": outside})))


@every_pickle
@pytest.mark.parametrize("size", [0, 2, 4, -1, 10**15])
def test_a_storage_of_another_size_than_its_values_is_an_error(kind, size, put):
    content, storages = pickled(
        {"a": Tensor(Storage("Float", np.float32([1, 2, 3])), 0, (), ())}, legacy=kind == "legacy"
    )
    assert content.count(b"K\x03") == 1  # the size, 3, as pickles write it
    content = content.replace(b"K\x03", pickle.dumps(size, 2)[2:-1])
    path = put(zip_of(content, storages) if kind == "zip" else legacy_of(content, storages))
    words = (
        "larger than the file" if kind == "legacy" and size == 10**15 else "cannot be read"
    )  # before it is allocated
    with pytest.raises(ValueError, match=words):
        read(path)


def test_legacy_storages_that_no_tensor_names_or_that_are_missing_are_errors(put):
    content, storages = pickled({"a": whole(np.float32([1, 2]))}, legacy=True)
    assert read(put(legacy_of(content, storages)))["a"].tolist() == [1, 2]
    for others in ([], [*storages, *storages]):
        with pytest.raises(ValueError, match="storages are not those"):
            read(put(legacy_of(content, others)))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "begins with b''"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "begins with b'<!DOCTYPE html"),
        (b"version https://git-lfs.github.com/spec/v1\n", "like none of the kinds"),
        (b"PK\x03\x04" + bytes(60), "BadZipFile"),
        (pickle.dumps([1, 2]), "none of PyTorch's"),
        (zip_of(pickle.dumps([1, 2])), "holds a list"),
        (zip_of(pickle.dumps({"a": 1})), "'a' is a int"),
        (zip_of(pickle.dumps({1: 1})), "entry 1 is a int"),
    ],
)
def test_other_files_are_told_in_words(content, words, put):
    path = put(content)
    with pytest.raises(ValueError, match=words) as told:
        read(path)
    assert str(path) in str(told.value)
    assert "give a PyTorch state dict" in str(told.value)


def test_a_dict_within_itself_ends(put):
    looped = {}
    looped["model"] = looped
    with pytest.raises(ValueError, match="'model' is a dict"):
        read(put(zip_of(pickle.dumps(looped, 2))))


def test_missing_files_and_folders_are_told_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"nothing.pth cannot be read \(No such file"):
        read(tmp_path / "nothing.pth")
    with pytest.raises(
        ValueError, match=r"cannot be read \(it is a folder without model.safetensors and pytorch_model.bin"
    ):
        read(tmp_path)


def test_a_zip_of_something_else_is_an_error(put):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(ValueError, match=r"'notes.txt' is a bytes"):
        read(put(file.getvalue()))


@every_file
def test_a_truncated_file_is_an_error_wherever_it_ends(kind, put):
    content = written(kind, sample())
    for end in {*range(0, len(content), max(1, len(content) // 80)), *range(len(content) - 60, len(content))}:
        with pytest.raises(ValueError, match=r"weights.bin cannot be read"):
            read(put(content[:end]))


@every_file
def test_a_damaged_file_is_read_or_is_a_value_error(kind, put):
    content = written(kind, sample())
    rng = np.random.default_rng(1)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged number may overflow
        for _ in range(150):
            damaged = bytearray(content)
            damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
            try:
                found = read(put(bytes(damaged)))
            except ValueError as error:
                refused += 1
                assert "cannot be read" in str(error)
            else:
                assert all(isinstance(x, np.ndarray) for x in found.values())
    assert refused > 0


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
def test_a_hash_in_the_name_is_checked(suffix, put):
    content = written("zip", sample())
    digest = hashlib.sha256(content).hexdigest()
    assert read(put(content, f"net-{digest[:8]}{suffix}")).keys() == sample().keys()
    damaged = bytearray(content)
    damaged[-1] ^= 1
    wrong = f"{int(digest[:8], 16) ^ 1:08x}"
    for path in (put(content, f"net-{wrong}{suffix}"), put(bytes(damaged), f"net-{digest[:8]}{suffix}")):
        with pytest.raises(ValueError, match="SHA-256 begins with .*damaged or another file"):
            read(path)


@pytest.mark.parametrize("name", ["net-0123456.pth", "net-012345678.pth", "net-01234567.bin", "net01234567.pth"])
def test_other_names_promise_no_hash(name, put):
    assert read(put(written("zip", sample()), name)).keys() == sample().keys()


# --- converting -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(5, (3, 1), padding="VALID", use_bias=False, name="conv")(x)
        return nn.relu(nn.BatchNorm(name="norm")(y, use_running_average=not train))


class Net(nn.Module):
    """Kernels of which no two axes are equal, a layer within a block, a flatten of 2 x 3 positions."""

    classes: int

    def setup(self):
        self.stem, self.block = nn.Conv(4, (1, 2), padding="VALID"), Block()
        self.dense, self.head = nn.Dense(7), nn.Dense(self.classes)

    def features(self, x, train, mask=None):
        x = self.block(nn.relu(self.stem(x)), train)
        return nn.relu(self.dense(x.reshape(x.shape[0], -1)))

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def net(classes=3, **changes):
    return Backbone(
        Net(classes),
        input_shape=(4, 4, 2),
        num_features=7,
        num_classes=classes,
        groups=(Group("block", 5, (), (), (Axis("params/head/kernel", 1), Axis("params/dense/kernel", 0, 6))),),
        **{
            "weight_names": {
                "stem": ("features.0",),
                "block/conv": ("layer1.0.conv1",),
                "block/norm": ("layer1.0.bn1",),
                "dense": ("classifier.1", "pre_logits.fc1"),
                "head": ("fc", "head.fc"),
            },
            **changes,
        },
    )


@functools.cache
def pytorch_state(classes=3):
    """A state dict in PyTorch's layouts, every leaf random."""
    shapes = {
        "features.0.weight": (4, 2, 1, 2),
        "features.0.bias": (4,),
        "layer1.0.conv1.weight": (5, 4, 3, 1),
        "layer1.0.bn1.weight": (5,),
        "layer1.0.bn1.bias": (5,),
        "layer1.0.bn1.running_mean": (5,),
        "layer1.0.bn1.running_var": (5,),
        "classifier.1.weight": (7, 30),
        "classifier.1.bias": (7,),
        "fc.weight": (classes, 7),
        "fc.bias": (classes,),
    }
    rng = np.random.default_rng(5)
    state = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    state["layer1.0.bn1.running_var"] = np.abs(state["layer1.0.bn1.running_var"]) + 0.5
    return state | {"layer1.0.bn1.num_batches_tracked": np.array(12)}


def pytorch_logits(state, images):
    """The network as PyTorch computes it: [B, C, H, W] images, [O, I, h, w] filters, a flatten of (C, H, W)."""

    def conv(x, weight):
        height, width = x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1
        y = np.zeros((len(x), len(weight), height, width))
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                y += np.einsum("bchw,oc->bohw", x[:, :, i : i + height, j : j + width], weight[:, :, i, j])
        return y

    def channels(name):
        return state[name].astype(np.float64)[None, :, None, None]

    x = np.maximum(conv(images, state["features.0.weight"]) + channels("features.0.bias"), 0)
    x = conv(x, state["layer1.0.conv1.weight"])
    x = (x - channels("layer1.0.bn1.running_mean")) / np.sqrt(channels("layer1.0.bn1.running_var") + 1e-5)
    x = np.maximum(x * channels("layer1.0.bn1.weight") + channels("layer1.0.bn1.bias"), 0)
    x = np.maximum(x.reshape(len(x), -1) @ state["classifier.1.weight"].T + state["classifier.1.bias"], 0)
    return x @ state["fc.weight"].T + state["fc.bias"]


@pytest.fixture
def put_state(put):
    """Writes a state dict of arrays as safetensors."""

    def put_state(state, name="net.safetensors"):
        return put(safetensors.numpy.save({name: np.array(x, order="C") for name, x in state.items()}), name)

    return put_state


def assert_equal_leaves(one, other):
    one, other = leaves_of(one), leaves_of(other)
    assert one.keys() == other.keys()
    for leaf in one:
        np.testing.assert_array_equal(one[leaf], other[leaf], err_msg=leaf, strict=True)


def random_variables(backbone, seed=0):
    """Every leaf random, in the form of fresh ones; nothing is compiled."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(backbone.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def test_the_network_computes_what_pytorch_does(put_state):
    images = np.random.default_rng(2).normal(size=(6, 2, 4, 4)).astype(np.float32)
    variables = load(net(), put_state(pytorch_state()))
    logits = net().apply(variables, jnp.asarray(images.transpose(0, 2, 3, 1)))
    expected = pytorch_logits(pytorch_state(), images)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def test_loaded_variables_have_the_form_of_fresh_ones(put_state):
    variables, fresh = load(net(), put_state(pytorch_state())), random_variables(net())
    assert jax.tree.structure(variables) == jax.tree.structure(fresh)
    for one, other in zip(jax.tree.leaves(variables), jax.tree.leaves(fresh)):
        assert isinstance(one, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_every_leaf_is_the_transposed_array(put_state):
    state, leaves = pytorch_state(), leaves_of(load(net(), put_state(pytorch_state())))
    for name, leaf in (("features.0", "params/stem"), ("layer1.0.conv1", "params/block/conv")):
        for o, i, h, w in np.ndindex(state[f"{name}.weight"].shape):
            assert leaves[f"{leaf}/kernel"][h, w, i, o] == state[f"{name}.weight"][o, i, h, w]
    for c, h, w in np.ndindex(5, 2, 3):
        ours, theirs = (h * 3 + w) * 5 + c, (c * 2 + h) * 3 + w
        np.testing.assert_array_equal(
            leaves["params/dense/kernel"][ours], state["classifier.1.weight"][:, theirs], strict=True
        )
    for leaf, name in (
        ("params/stem/bias", "features.0.bias"),
        ("params/block/norm/scale", "layer1.0.bn1.weight"),
        ("params/block/norm/bias", "layer1.0.bn1.bias"),
        ("batch_stats/block/norm/mean", "layer1.0.bn1.running_mean"),
        ("batch_stats/block/norm/var", "layer1.0.bn1.running_var"),
        ("params/dense/bias", "classifier.1.bias"),
        ("params/head/bias", "fc.bias"),
    ):
        np.testing.assert_array_equal(leaves[leaf], state[name], strict=True)


def test_other_published_names_and_dense_layers_stored_as_convolutions_give_the_same(put_state):
    state = pytorch_state()
    expected = load(net(), put_state(state))
    timm = {name.replace("fc.", "head.fc.").replace("classifier.1", "pre_logits.fc1"): x for name, x in state.items()}
    timm["pre_logits.fc1.weight"] = timm["pre_logits.fc1.weight"].reshape(7, 5, 2, 3)
    assert_equal_leaves(load(net(), put_state(timm)), expected)


def test_a_dense_layer_without_a_flatten_may_be_a_convolution_too(put_state):
    state = pytorch_state()
    assert_equal_leaves(
        load(net(), put_state(state | {"fc.weight": state["fc.weight"].reshape(3, 7, 1, 1)})),
        load(net(), put_state(state)),
    )


def test_half_and_double_weights_arrive_as_float32(put_state):
    for kind in (np.float16, np.float64):
        variables = load(net(), put_state({name: x.astype(kind) for name, x in pytorch_state().items()}))
        assert {str(x.dtype) for x in jax.tree.leaves(variables)} == {"float32"}


# --- heads ----------------------------------------------------------------------------------------------------------


def without_head(state):
    return {name: x for name, x in state.items() if not name.startswith("fc.")}


@pytest.mark.parametrize(
    "state, words",
    [
        (pytorch_state(10), "tells 10 classes apart, so the head for 3 classes is freshly drawn"),
        (without_head(pytorch_state()), "has no head, so the head for 3 classes is freshly drawn"),
    ],
)
def test_a_head_of_other_classes_or_none_is_drawn_afresh(state, words, put_state):
    path = put_state(state)
    fresh_head = jax.jit(lambda key: net().init(key).params["head"])
    with pytest.warns(UserWarning, match=words):
        default = load(net(), path)
    with pytest.warns(UserWarning, match=words):
        drawn = load(net(), path, jax.random.key(4))
    for variables, seed in ((default, 0), (drawn, 4)):
        expected = load(net(), put_state(pytorch_state(), "right.safetensors"))
        expected.params["head"] = fresh_head(jax.random.key(seed))
        assert_equal_leaves(variables, expected)
    assert not np.array_equal(default.params["head"]["kernel"], drawn.params["head"]["kernel"])


def test_a_head_of_the_same_classes_is_kept_without_a_word(put_state):
    variables = load(net(), put_state(pytorch_state()))  # a warning would be an error
    np.testing.assert_array_equal(variables.params["head"]["kernel"], pytorch_state()["fc.weight"].T)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fc.weight": np.zeros((3, 8))}, r"other shape: params/head/kernel \[8, 3\] instead of \[7, 3\]"),
        ({"fc.weight": np.zeros((10, 8)), "fc.bias": np.zeros(10)}, r"other shape: .*params/head/kernel \[8, 10\]"),
        ({"fc.bias": np.zeros(())}, r"other shape: params/head/bias \[\] instead of \[3\]"),
        ({"fc.bias": None}, r"missing: fc\.bias\)"),
    ],
)
def test_a_head_that_differs_otherwise_is_an_error(change, words, put_state):
    state = {name: x for name, x in (pytorch_state() | change).items() if x is not None}
    with pytest.raises(ValueError, match=words):
        load(net(), put_state(state))


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"features.0.bias": None}, r"missing: features\.0\.bias\)"),
        ({"classifier.1.weight": None}, r"missing: classifier\.1\.weight\)"),  # the first of its names
        ({"extra.weight": np.zeros(2)}, r"left over: extra\.weight\)"),
        ({"head.fc.weight": np.zeros((3, 7))}, r"left over: head\.fc\.weight\)"),  # a second head
        (
            {"features.0.weight": np.zeros((4, 2, 2, 1))},
            r"other shape: params/stem/kernel \[2, 1, 2, 4\] instead of \[1, 2",
        ),
        ({"features.0.weight": np.zeros((4, 2))}, r"other shape: params/stem/kernel"),
        ({"features.0.bias": np.zeros(5)}, r"other shape: params/stem/bias \[5\] instead of \[4\]"),
        (
            {"classifier.1.weight": np.zeros((7, 24))},
            r"other shape: params/dense/kernel \[24, 7\] instead of \[30, 7\]",
        ),
        ({"classifier.1.weight": np.zeros((7, 29))}, r"other shape: params/dense/kernel"),
        ({"classifier.1.weight": np.zeros((7, 5, 6))}, r"other shape: params/dense/kernel"),
        ({"classifier.1.weight": np.zeros((0, 30))}, r"other shape: params/dense/kernel"),
        (
            {"features.0.bias": None, "x": np.zeros(1), "fc.weight": np.zeros((3, 8))},
            r"missing: .*left over: .*other shape: ",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, words, put_state):
    state = {name: x for name, x in (pytorch_state() | change).items() if x is not None}
    with pytest.raises(ValueError, match=words) as told:
        load(net(), put_state(state))
    assert "net.safetensors does not fit this backbone" in str(told.value)


def test_only_the_first_few_names_are_shown(put_state):
    with pytest.raises(ValueError, match=r"missing: \S+, \S+, \S+ and 6 more; left over: a0, a1, a2 and 6 more\)"):
        load(net(), put_state({f"a{i}": np.zeros(1) for i in range(9)}))


def test_a_layer_without_a_published_name_is_missing(put_state):
    backbone = net(weight_names={name: x for name, x in net().weight_names.items() if name != "stem"})
    with pytest.raises(ValueError, match=r"missing: params/stem/\w+, params/stem/\w+; left over: features"):
        load(backbone, put_state(pytorch_state()))


def test_a_backbone_without_published_weights_says_what_to_give(put_state):
    with pytest.raises(ValueError, match=r"no weight_names.*give a file that fedjax_dg\.weights\.save wrote"):
        load(lenet5(3), put_state(pytorch_state()))


# --- files of our own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lenet5, net, lambda classes: tiny_backbone()], ids=["lenet5", "net", "tiny"])
def test_what_was_saved_is_loaded(build, tmp_path):
    backbone = build(3)
    variables = random_variables(backbone)
    save(variables, tmp_path / "model.npz")
    assert_equal_leaves(load(backbone, tmp_path / "model.npz"), variables)
    assert "params/head/kernel" in np.load(tmp_path / "model.npz")


def test_our_files_may_have_another_head_and_nothing_else(tmp_path):
    variables = random_variables(net(10))
    save(variables, tmp_path / "model.npz")
    with pytest.warns(UserWarning, match="tells 10 classes apart, so the head for 3 classes"):
        loaded = load(net(3), tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.params["dense"]["kernel"], variables.params["dense"]["kernel"])
    assert loaded.params["head"]["kernel"].shape == (7, 3)
    with pytest.raises(ValueError, match="missing: params/conv"):
        load(tiny_backbone(), tmp_path / "model.npz")


def test_saving_writes_float32_and_replaces_the_file_whole(tmp_path):
    variables = random_variables(net())
    path = tmp_path / "model"  # no suffix is added
    save(jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables), path)
    assert {str(x.dtype) for x in read(path).values()} == {"float32"}
    save(variables, str(path))
    assert_equal_leaves(load(net(), path), variables)
    with mock.patch("numpy.savez", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        save(random_variables(net(), seed=1), path)
    assert_equal_leaves(load(net(), path), variables)
    assert os.listdir(tmp_path) == ["model"]


# --- the backbones that have published weights ----------------------------------------------------------------------

PUBLISHED = json.loads((Path(__file__).parent / "golden" / "torchvision_state_dicts.json").read_text())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name.startswith("resnet") else pytest.mark.slow) for name in PUBLISHED],
)
def test_torchvisions_state_dict_fills_every_leaf_once(name, put):
    """Tensor number i is filled with i, from a single stored number, so that the file of half a gigabyte has a few KB."""
    names = list(PUBLISHED[name])
    state = {
        key: Tensor(Storage("Float", np.float32([i])), 0, tuple(shape), (0,) * len(shape))
        for i, (key, shape) in enumerate(PUBLISHED[name].items())
    }
    leaves = leaves_of(load(backbones.BACKBONES[name](num_classes=1000), put(written("zip", state))))
    used = {leaf: names[int(x.reshape(-1)[0])] for leaf, x in leaves.items()}
    assert all(float(x.min()) == float(x.max()) for x in leaves.values())
    assert sorted(used.values()) == sorted(key for key in names if not key.endswith("num_batches_tracked"))
    ends = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    assert all(key.endswith(f".{ends[leaf.rsplit('/')[-1]]}") for leaf, key in used.items())
