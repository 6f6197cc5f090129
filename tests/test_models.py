"""Models of run folders: loaded without data, exported, and taken up by another run."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_run import CLASSES, DESCRIPTION, config_of, grid, line_of, write_checkpoint, write_run

import fedjax_dg as fdg
from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, check
from fedjax_dg.experiment import start_of
from fedjax_dg.models import config_of as config_of_cell
from fedjax_dg.models import export, load_model
from fedjax_dg.results import Cell

#: Methods whose models have parameters beside the network's, and the first names of these.
ADDING = {"fedsr": {"posterior"}, "lsi": {"bottleneck", "head_norm"}, "fedadg": {"generator"}}
DOCUMENTATION = Path(__file__).parent.parent / "docs" / "figures.md"
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


def equal(one, other):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One real cell: FedSR on the emoji."""
    out = tmp_path_factory.mktemp("runs") / "fedsr"
    sizes = ["--stations", "2", "--clients-per-station", "2", "--station-rounds", "1", "--rounds", "2", "--seeds", "1"]
    limits = ["--examples-per-domain", "60", "--held-out", "noto", "--aggregator", "mean"]
    assert main(["run", "--algorithm", "fedsr", *sizes, *limits, "--out", str(out)]) == 0
    return out


@pytest.fixture
def fake(tmp_path):
    """A run folder with the checkpoints of two of its cells."""
    config = config_of()
    run = write_run(tmp_path / "run", config)
    return run, config, grid(config)


def test_the_model_of_a_run_predicts_as_the_run_did(trained):
    """FedSR draws when it predicts, so its accuracy is that of the result up to a few examples; its logits are log p."""
    model = load_model(trained)
    line = json.loads((trained / "result.json").read_text())["cells"][0]
    assert model.cell == line and model.name == "fedsr-mean-noto-seed0"
    domains = fdg.datasets.domains.thinned(fdg.datasets.load("emoji_styles"), 60)
    here = domains.domain == domains.domain_names.index("noto")
    logits = np.asarray(model(domains.inputs[here]))
    assert model.class_names == tuple(domains.class_names) and model.domain_names == tuple(domains.domain_names)
    np.testing.assert_allclose(np.exp(logits).sum(1), 1, atol=1e-5)
    assert abs((logits.argmax(1) == domains.labels[here]).mean() - line["accuracy"]) <= 3 / 60
    assert model.features(domains.inputs[:3]).shape == (3, 2 * 84)


def test_the_best_model_is_read_and_not_the_last(fake):
    run, config, cells = fake
    drawn = write_checkpoint(run, config, cells[3], key=3)
    model = load_model(run, "fedavg-hfedatm-noto-seed1")
    assert equal(model.variables, drawn) and model.class_names == CLASSES  # the last is NaN
    backbone = fdg.backbones.lenet5(num_classes=6)
    np.testing.assert_allclose(model(IMAGES), backbone.apply(model.variables, jax.numpy.asarray(IMAGES)), atol=1e-5)


def test_the_cell_is_chosen_by_source_validation_and_never_by_the_held_out_domain(tmp_path):
    config = config_of()
    cells = [
        line_of(Cell("fedavg", "mean", "noto", 0), accuracy=0.9, source=0.5),
        line_of(Cell("fedavg", "mean", "noto", 1), accuracy=0.2, source=0.7),
        line_of(Cell("fedavg", "mean", "twemoji", 0), accuracy=0.8, source=0.7),
        line_of(Cell("fedavg", "mean", "twemoji", 1), accuracy=1.0, source=None),
    ]
    run = write_run(tmp_path / "run", config, cells)
    write_checkpoint(run, config, cells[1])
    assert load_model(run).name == "fedavg-mean-noto-seed1"


@pytest.mark.parametrize("algorithm", ADDING)
def test_what_methods_add_survives(algorithm, tmp_path):
    """Checkpoint, file, and orbax folder give the same model; the network alone takes what it has of it."""
    config = config_of(algorithm=algorithm, local_epochs=4 if algorithm == "fedadg" else 1)
    cells = grid(config, rules=("mean",), held_outs=("noto",), seeds=1)
    run = write_run(tmp_path / "run", config, cells)
    drawn = write_checkpoint(run, config, cells[0], key=5)
    model = load_model(run)
    assert equal(model.variables, drawn)
    logits = np.asarray(model(IMAGES))
    for name in ("model.safetensors", "model"):
        path = export(model, tmp_path / name)
        again = load_model(path)
        assert equal(again.variables, drawn) and again.cell == model.cell and again.config == model.config
        np.testing.assert_array_equal(again(IMAGES), logits)
    told = fdg.weights.metadata(tmp_path / "model.safetensors")
    assert told["class_names"] == list(CLASSES) and told["cell"]["seed"] == 0
    assert {leaf.split("/")[1] for leaf in told["added"]} == ADDING[algorithm]
    read = fdg.weights.read(tmp_path / "model.safetensors")
    assert read.keys() == leaves_of(drawn).keys()
    plain = fdg.backbones.lenet5(num_classes=6)
    loaded = leaves_of(fdg.weights.load(plain, tmp_path / "model.safetensors"))
    assert loaded.keys() == leaves_of(jax.eval_shape(plain.init, jax.random.key(0))).keys()
    assert all(np.array_equal(loaded[leaf], read[leaf]) for leaf in loaded)


def test_another_run_starts_from_an_exported_model(tmp_path):
    """The same method takes up its own layers; another one leaves them out, and says so."""
    config = config_of(algorithm="fedsr")
    cells = grid(config, rules=("mean",), held_outs=("noto",), seeds=1)
    run = write_run(tmp_path / "run", config, cells)
    drawn = leaves_of(write_checkpoint(run, config, cells[0], key=5))
    file = export(load_model(run), tmp_path / "model.safetensors")
    domains = fdg.datasets.load("emoji_styles")

    def started(algorithm):
        options = check(RunConfig(algorithm=algorithm, pretrained=str(file), rounds=1, eval_every=1))
        return start_of(options, domains, lambda done, total: None)

    same, other = started("fedsr"), started("fedprox")
    assert all(np.array_equal(x, drawn[leaf]) for leaf, x in leaves_of(same.pretrained).items())
    assert leaves_of(same.pretrained).keys() == drawn.keys() and same.notices == ()
    assert drawn.keys() - leaves_of(other.pretrained).keys() == {"params/posterior/bias", "params/posterior/kernel"}
    assert "posterior, which its method had added, left out" in other.notices[-1]


def test_a_cell_of_a_sweep_has_its_own_settings():
    config = config_of(algorithm="fedsr")
    line = line_of(Cell("fedsr", "mean", "noto", 1), hparams={"samples": 3, "client_lr": 0.02, "domain_mix": 0.5})
    own = config_of_cell(config, line)
    assert (own.client_lr, own.domain_mix, own.settings) == (0.02, 0.5, {"samples": 3})
    assert (own.aggregator, own.held_out) == ("mean", "noto")


def test_the_command_says_which_cell_it_was(fake, tmp_path, capsys):
    run, config, cells = fake
    best = max(cells, key=lambda line: line["source_accuracy"])
    write_checkpoint(run, config, best)
    out = tmp_path / "best.safetensors"
    assert main(["export", str(run), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "fedavg-hfedatm-fluent_mono-seed1, the cell with the best source-validation accuracy: round 2" in said
    assert f"Wrote {out}" in said
    assert (
        main(["export", str(run), "--out", str(tmp_path / "other.pth"), "--cell", "fedavg-hfedatm-fluent_mono-seed1"])
        == 2
    )
    assert "cannot be written as .pth: give a name that ends in .safetensors" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "no" / "m.safetensors")]) == 2
    assert "to write m.safetensors in: make it" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(run)]) == 2
    assert "exists: remove it, or choose another --out" in capsys.readouterr().err


def test_what_is_no_run_or_not_finished_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no folder .*nowhere: give the folder of a run"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no config.json: give the folder of a run"):
        load_model(tmp_path)
    config = config_of()
    run = write_run(tmp_path / "run", config, cells=[])
    with pytest.raises(ValueError, match="has no finished cell yet: let it go on"):
        load_model(run)
    cells = grid(config)
    write_checkpoint(run, config, cells[0])
    with pytest.raises(ValueError, match="fedavg-mean-noto-seed0 in .* has not finished: go on with"):
        load_model(run, "fedavg-mean-noto-seed0")
    with pytest.raises(ValueError, match="Unknown cell of .* 'mean'; available: none"):
        load_model(run, "mean")


def test_a_cell_that_broke_down_is_refused_with_its_error(tmp_path):
    failed = Cell("fedavg", "mean", "noto", 1).as_record() | {"error": "Round 2: not finite."}
    config = config_of()
    run = write_run(tmp_path / "run", config, grid(config)[:1], [failed])
    with pytest.raises(ValueError, match="seed1 in .* broke down and has no selected model: Round 2: not finite"):
        load_model(run, "fedavg-mean-noto-seed1")


def test_what_is_missing_or_damaged_is_named(fake):
    run, config, cells = fake
    name = "fedavg-mean-noto-seed0"
    with pytest.raises(ValueError, match=f"{name} is missing, so there is no model of this cell"):
        load_model(run, name)
    write_checkpoint(run, config, cells[0])
    load_model(run, name)
    (step,) = (p for p in (run / "checkpoints" / name).iterdir() if p.name == "2")
    kept = (run / "model.json").read_text()
    (run / "model.json").write_text(kept.replace(json.dumps("food"), '"food", "more"'))
    with pytest.raises(ValueError, match=r"holds best.params.head.bias of shape \(6,\), but this network needs \(7,\)"):
        load_model(run, name)
    (run / "model.json").unlink()
    with pytest.raises(
        ValueError, match="has no model.json, so an older version began it: pass --resume to fedjax-dg run"
    ):
        load_model(run, name)
    (run / "model.json").write_text("{")
    with pytest.raises(ValueError, match="model.json is missing or damaged"):
        load_model(run, name)
    (run / "model.json").write_text(kept.replace(name, "another"))
    with pytest.raises(ValueError, match=f"model.json does not tell the network of {name}"):
        load_model(run, name)
    (run / "model.json").write_text(kept)
    shutil.rmtree(step / "arrays")
    with pytest.raises(ValueError, match=f"The checkpoint in .*{name} cannot be read"):
        load_model(run, name)


def test_inputs_of_another_size_are_refused(fake):
    run, config, cells = fake
    write_checkpoint(run, config, cells[0])
    model = load_model(run, "fedavg-mean-noto-seed0")
    with pytest.raises(ValueError, match=r"shape \[5, 16, 32, 3\], but this model takes \['B', 32, 32, 3\]"):
        model(IMAGES[:, ::2])
    with pytest.raises(ValueError, match=r"shape \[32, 32, 3\]"):
        model.features(IMAGES[0])


def test_a_file_of_other_weights_is_refused(tmp_path):
    backbone = fdg.backbones.lenet5(num_classes=6)
    fdg.weights.save(jax.jit(backbone.init)(jax.random.key(0)), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="says nothing of the network it is of"):
        load_model(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="holds one model, so cell='x' cannot be chosen"):
        load_model(tmp_path / "weights.safetensors", "x")


def test_a_frozen_encoders_model_reads_what_the_encoder_made(tmp_path):
    """Of a text network the sizes are in the folder, so its pretrained files may be gone."""
    sizes = fdg.backbones.ROBERTA_TINY._replace(vocab_size=50)
    told = DESCRIPTION | {"input_shape": [sizes.hidden_size], "input_dtype": "float32"}
    told |= {"encoder_sizes": sizes._asdict(), "encoded": True}
    text = {"dataset": "vader_sentiment", "backbone": "roberta_tiny", "pretrained": "gone", "freeze_encoder": True}
    config = config_of(**text)
    cells = grid(config, rules=("mean",), held_outs=("noto",), seeds=1)
    run = write_run(tmp_path / "run", config, cells, told=told)
    drawn = write_checkpoint(run, config, cells[0], told=told)
    assert set(drawn.params) == {"dense", "head"}
    model = load_model(export(load_model(run), tmp_path / "m.safetensors"))
    assert model.encoded and model(np.zeros((2, sizes.hidden_size), np.float32)).shape == (2, 6)
    with pytest.raises(ValueError, match="they are states of the frozen encoder: make them with encoding.encode"):
        model(np.zeros((2, 7), np.int32))


def test_the_example_in_the_documentation_runs(fake):
    run, config, cells = fake
    write_checkpoint(run, config, max(cells, key=lambda line: line["source_accuracy"]))
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    names = {"fdg": fdg, "images": IMAGES}
    exec(example.replace("runs/demo", str(run)), names)
    assert names["logits"].shape == (5, 6) and set(names["names"]) <= set(CLASSES)
