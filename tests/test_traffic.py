"""What travels: sizes off shapes, the papers' arithmetic, what every method says it tells."""

import json

import jax
import pytest
from tiny import backbone_for, tiny_method

from fedjax_dg import make_round
from fedjax_dg.aggregators import AGGREGATORS, hfedatm, importance, mean
from fedjax_dg.algorithms import ALGORITHMS, fedavg, fediir, lsi, mcgdm, mtgc, scaffold
from fedjax_dg.backbones import alexnet, lenet5, resnet18, resnet50
from fedjax_dg.cli import main
from fedjax_dg.traffic import as_json, size_of, traffic_of
from fedjax_dg.types import Topology

FLAT = Topology(1, 3)


def floats(found):
    return {name: part.size.floats for name, part in found.parts.items()}


def ways(both):
    return both.up.floats, both.down.floats


def test_lsi_is_the_arithmetic_of_the_paper():
    """Tables V and VI for PACS and OfficeHome; the upload is twice theirs, as importances are as many as parameters."""
    found = traffic_of(resnet50(num_classes=65), lsi(num_sources=3), FLAT, 20, importance())
    sizes = floats(found)
    assert sizes["head"] == 33_345 and sizes["encoder"] == 24_557_120
    assert sizes["translator"] == 2_109_952 and sizes["discriminator"] == 1_055_236
    assert sizes["latents"] == 9_830_400
    model = sizes["encoder"] + sizes["head"] + sizes["batch_stats"]
    assert sizes["batch_stats"] == 53_120 + 1_024
    assert ways(found.before) == (33_345 + 1_024 + 3, 2_109_952)
    assert ways(found.per_round) == (model + sizes["encoder"] + sizes["head"] + 1, model)
    assert ways(found.per_run) == (33_345 + 1_024 + 3 + 20 * found.per_round.up.floats, 2_109_952 + 20 * model)
    assert round(20 * (sizes["encoder"] + sizes["head"]) / 1e6) == 492
    assert round(2 * 20 * (sizes["encoder"] + sizes["head"]) / 1e6) == 984


def test_the_networks_of_the_baselines_are_as_large_as_the_paper_says():
    def model(backbone):
        sizes = floats(traffic_of(backbone, fedavg(), FLAT, 1))
        return sizes["encoder"] + sizes["head"]

    assert round(model(resnet50(num_classes=65)) / 1e6, 1) == 23.6
    assert round(model(resnet18(num_classes=7)) / 1e6, 1) == 11.2
    assert round(model(alexnet(num_classes=7)) / 1e6) == 57


def test_plain_averaging_moves_the_model_and_nothing_else():
    found = traffic_of(lenet5(num_classes=6), fedavg(), FLAT, 5)
    assert floats(found) == {"encoder": 61_156, "head": 510}
    assert ways(found.per_round) == (61_666, 61_666) and ways(found.per_run) == (5 * 61_666, 5 * 61_666)
    assert ways(found.before) == (0, 0) and found.disclosures == ()
    assert found.per_round.up.bytes == 4 * 61_666


def test_every_station_round_moves_the_model_once():
    found = traffic_of(lenet5(num_classes=6), fedavg(), Topology(2, 3, station_rounds=4), 1, hfedatm())
    assert ways(found.per_round) == (4 * 61_666 + 182_063, 4 * 61_666)
    at_station = traffic_of(
        lenet5(num_classes=6), fedavg(), Topology(2, 3, station_rounds=4), 1, hfedatm(gram_at="station")
    )
    assert ways(at_station.per_round) == (4 * 61_666 + 182_063, 5 * 61_666)


@pytest.mark.parametrize(
    ("algorithm", "up", "down"),
    [
        (scaffold(), 2 * 61_666, 2 * 61_666),  # c_i's change up, c down
        (fediir(), 61_666 + 510 + 1, 61_666 + 510),  # the head's gradient and a count up, its mean down
        (mtgc(), 2 * 61_666, None),
        (mcgdm(), 61_666 + 510 + 1, 61_666 + 3 * 511),  # its head up, everyone's down
    ],
)
def test_what_methods_add_is_counted(algorithm, up, down):
    found = traffic_of(lenet5(num_classes=6), algorithm, FLAT, 1)
    assert found.per_round.up.floats == up
    assert down is None or found.per_round.down.floats == down


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_method_forgets_to_say_what_it_tells(name):
    """Whoever sends more than the model says what it is."""
    backbone = backbone_for(name)
    found = traffic_of(backbone, tiny_method(name), Topology(1, 3), 1)
    round_fn = make_round(backbone, tiny_method(name), FLAT._replace(local_epochs=9))
    model = size_of(jax.eval_shape(round_fn.init, jax.random.key(0)).variables)
    more = found.per_round.up.floats > model.floats or found.before.up.floats > 0
    told = [d for d in found.disclosures if "batch norm" not in d.what]
    assert more == bool(told)
    assert json.loads(json.dumps(as_json(found)))["per_round"]["up"]["floats"] == found.per_round.up.floats


@pytest.mark.parametrize("name", AGGREGATORS)
def test_no_rule_forgets_to_say_what_it_tells(name):
    found = traffic_of(backbone_for("fedavg"), fedavg(), FLAT, 1, AGGREGATORS[name]())
    assert bool(found.disclosures) == ("measured for the server" in found.parts)


def test_a_rule_at_the_stations_is_counted_in_every_station_round():
    topology = FLAT._replace(station_rounds=2)
    found = traffic_of(lenet5(num_classes=6), fedavg(), topology, 1, mean(), importance())
    assert found.per_round.up.floats == 2 * (61_666 + 61_667)


def test_the_command_prints_tables_and_json(capsys):
    command = ["traffic", "--algorithm", "lsi", "--aggregator", "importance", "--backbone", "resnet50"]
    assert main([*command, "--num-classes", "65", "--num-domains", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"parts", "once", "per_round", "per_run", "shared_statistics"}
    assert {k: told["parts"][k]["floats"] for k in ("head", "translator", "discriminator")} == {
        "head": 33_345,
        "translator": 2_109_952,
        "discriminator": 1_055_236,
    }
    assert told["parts"]["head"]["bytes"] == 4 * 33_345
    assert told["shared_statistics"][0].keys() == {"what", "seen_by", "when"}
    assert main(["traffic", "--algorithm", "scaffold"]) == 0
    out = capsys.readouterr().out
    assert "encoder" in out and "123,502" in out and "mean gradient over local training" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "fedavgg"], "did you mean 'fedavg'"),
        (["--aggregator", "mean,hfedatm"], "give one"),
        (["--station-aggregator", "men"], "did you mean 'mean'"),
        (["--backbone", "lenet"], "lenet5"),
        (["--num-classes", "0"], "num_classes=0 is not positive"),
        (["--rounds", "0"], "rounds=0 is not positive"),
        (["--image-size", "64"], "image_size=64"),
        (["--set", "lambda_di=1"], "Unknown option"),
    ],
)
def test_bad_input_is_named(options, message, capsys):
    assert main(["traffic", *options]) == 2
    assert message in capsys.readouterr().err
