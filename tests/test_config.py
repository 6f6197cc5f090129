"""Configurations: the file, ``--set``, what reaches a method, and one sentence for everything wrong before training."""

import functools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from fedjax_dg import config as configuration
from fedjax_dg import datasets
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.algorithms import ALGORITHMS, OPTIMIZERS
from fedjax_dg.algorithms.fedavg import FedAvgHparams
from fedjax_dg.algorithms.fedsr import FedSRHparams
from fedjax_dg.cli import keep_programs, main
from fedjax_dg.config import (
    RunConfig,
    aggregator_options,
    algorithm_options,
    build_aggregator,
    build_algorithm,
    build_station_aggregator,
    check,
    names,
    parse_settings,
    read_toml,
    topology,
    typed_settings,
)
from fedjax_dg.datasets import emoji_styles
from fedjax_dg.types import Topology

TOML = """
[run]
algorithm = "fedsr"
aggregator = "mean, hfedatm"
rounds = 8
client_lr = 1
participants = 3

[set]
l2 = 0.5
fot = false
samples = 3
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"

    def write(text):
        path.write_text(text)
        return str(path)

    return write


def given(**options):
    return check(RunConfig(**options))


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_a_configuration():
    assert check(RunConfig()) == RunConfig(domain_mix=0.0, local_epochs=1)


def test_a_file_gives_its_options_and_leaves_the_others(toml):
    config = check(read_toml(toml(TOML)))
    assert config == RunConfig(
        algorithm="fedsr",
        aggregator="mean, hfedatm",
        rounds=8,
        client_lr=1.0,
        participants=3,
        domain_mix=0.0,
        local_epochs=1,
        settings={"l2": 0.5, "fot": False, "samples": 3},
    )
    assert names(config.aggregator) == ["mean", "hfedatm"]
    assert topology(config) == Topology(10, 10, 5, 1, None, 7, 3)


def test_options_on_the_command_line_win_over_the_file(toml, capsys, monkeypatch):
    resolved = []

    def stop(config, devices, workers, report):
        resolved.append(config)
        raise ValueError("stop here.")

    monkeypatch.setattr("fedjax_dg.cli.resolve", stop)
    path = toml(TOML)
    for arguments in (["--config", path], [f"--config={path}"]):
        assert main(["run", "--rounds", "4", *arguments, "--participants", "None", "--set", "l2=0.25"]) == 2
    expected = check(read_toml(path))
    expected = replace(expected, rounds=4, participants=None, settings={**expected.settings, "l2": 0.25})
    assert resolved == [expected, expected]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nround = 3", r"Unknown option in .*run.toml 'round'; did you mean 'rounds'\? Available: dataset, "),
        ("[runs]\nrounds = 3", r"Unknown table in .*run.toml 'runs'; did you mean 'run'\? Available: run, set"),
        ("rounds = 3", "Unknown table in .*run.toml 'rounds'"),
        ("run = 3", "run = 3 in .*run.toml is not a table: write .run. and the options below"),
        ("[run]\nrounds = 2.5", "rounds = 2.5 in .*run.toml is not of type int: correct it"),
        ('[run]\nclient_lr = "fast"', "client_lr = 'fast' in .*run.toml is not of type float: correct it"),
        ("[run]\nseeds = true", "seeds = True in .*run.toml is not of type int: correct it"),
        ("[run]\ndataset = 1", "dataset = 1 in .*run.toml is not of type str: correct it"),
        ("[run\n", "Cannot read the configuration .*run.toml: .*; give a TOML file with a .run. table"),
        ("[run]\nclient_lr = nan", "client_lr=nan is not finite"),
        ("[set]\nalpha = true", "alpha=True is not a number: give one, such as 0.75"),
        ("[run]\nalgorithm = 'fedsr'\n[set]\nsamples = 2.5", "samples=2.5 is not a whole number: give one, such as 20"),
        ("[run]\nsettings = 1", "Unknown option in .*run.toml 'settings'"),
    ],
)
def test_a_wrong_file_is_refused(toml, text, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        check(read_toml(toml(text)))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Cannot read the configuration .*none.toml"):
        read_toml(tmp_path / "none.toml")


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def test_settings_are_split_at_the_first_equals_sign():
    assert parse_settings(("alpha=0.5", " gram = sum ", "x=a=b")) == {"alpha": "0.5", "gram": "sum", "x": "a=b"}
    with pytest.raises(ValueError, match="--set 'alpha' has no '=': write it as key=value, for example alpha=0.5"):
        parse_settings(("alpha",))


def test_settings_take_the_type_of_their_default():
    settings = {"alpha": "1", "fot": "FALSE", "samples": "3", "l2_form": "squared", "gram": "mean"}
    typed = given(algorithm="fedsr", settings=settings).settings
    assert typed == {"alpha": 1.0, "fot": False, "samples": 3, "l2_form": "squared", "gram": "mean"}
    assert [type(v) for v in typed.values()] == [float, bool, int, str, str]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_option_of_an_algorithm_survives_being_text(algorithm):
    defaults = algorithm_options(algorithm)
    config = given(algorithm=algorithm, aggregator="mean", settings={k: str(v) for k, v in defaults.items()})
    assert config.settings == defaults
    build_algorithm(config)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_every_option_of_an_aggregator_survives_being_text(aggregator):
    defaults = aggregator_options(aggregator)
    config = given(aggregator=aggregator, settings={k: str(v) for k, v in defaults.items()})
    assert config.settings == defaults
    build_aggregator(config, aggregator)


def recorded(monkeypatch, table, name):
    """What the factory of that name is called with; its signature stays."""
    calls, factory = [], table[name]

    @functools.wraps(factory)
    def watched(*args, **kwargs):
        calls.append((args, kwargs))
        return factory(*args, **kwargs)

    monkeypatch.setitem(table, name, watched)
    return calls


def test_hyper_parameters_reach_the_algorithm(monkeypatch):
    calls = recorded(monkeypatch, configuration.ALGORITHMS, "fedsr")
    settings = {"l2": "0.5", "cmi": "0", "samples": "3", "l2_form": "squared", "alpha": "0.5"}
    build_algorithm(given(algorithm="fedsr", client_lr=0.2, client_optimizer="adam", settings=settings))
    hparams = FedSRHparams(client_lr=0.2, l2=0.5, cmi=0.0)
    assert calls[-1:] == [((hparams,), {"optimizer": OPTIMIZERS["adam"], "samples": 3, "l2_form": "squared"})]


def test_an_algorithm_keeps_its_own_optimizer_and_defaults(monkeypatch):
    calls = recorded(monkeypatch, configuration.ALGORITHMS, "fedavg")
    build_algorithm(given(client_lr=0.3))
    assert calls[-1:] == [((FedAvgHparams(client_lr=0.3),), {})]


@pytest.mark.parametrize(("algorithm", "epochs"), [("fedavg", 1), ("fedadg", 8), ("stable_fedadg", 8)])
def test_local_epochs_are_the_algorithms_own_unless_given(algorithm, epochs):
    assert given(algorithm=algorithm).local_epochs == topology(given(algorithm=algorithm)).local_epochs == epochs
    assert given(algorithm=algorithm, local_epochs=4).local_epochs == 4
    settings = {"warmup_epochs": "1"}
    assert given(algorithm="fedadg", settings=settings).local_epochs == 6


@pytest.mark.parametrize("algorithm", ["fish", "groupdro"])
def test_the_number_of_domains_is_the_data_sets(algorithm, monkeypatch):
    calls = recorded(monkeypatch, configuration.ALGORITHMS, algorithm)
    build_algorithm(given(algorithm=algorithm), num_domains=5)
    assert calls[-1][1] == {"num_domains": 5}
    with pytest.raises(ValueError, match="Unknown option of .* 'num_domains'"):
        given(algorithm=algorithm, settings={"num_domains": "3"})


def test_a_setting_fills_in_the_domain_mix():
    assert given(setting="mixed").domain_mix == 0.5
    assert given(setting="mixed", domain_mix=0.2).domain_mix == 0.2
    assert given(setting="single-domain", sources="noto").domain_mix == 1.0


def test_hyper_parameters_reach_each_aggregator_that_has_them(monkeypatch):
    config = given(
        aggregator="mean,hfedatm,fedavgm",
        server_weighting="samples",
        settings={"alpha": "0.5", "fot": "false", "gram": "mean", "server_momentum": "0.5"},
    )
    expected = {
        "mean": {},
        "hfedatm": {"alpha": 0.5, "fot": False, "gram": "mean"},
        "fedavgm": {"server_momentum": 0.5},
    }
    for name, options in expected.items():
        calls = recorded(monkeypatch, configuration.AGGREGATORS, name)
        build_aggregator(config, name)
        assert calls == [((), {**options, "weighting": "samples", "bn_pool": "naive"})]


def test_a_station_rule_has_its_own_weighting_and_shares_settings(monkeypatch):
    """The mean unless another is named, as before there was a choice."""
    calls = recorded(monkeypatch, configuration.AGGREGATORS, "fedrc")
    options = {"station_weighting": "uniform", "bn_pool": "exact", "settings": {"tau": "3"}}
    config = given(aggregator="mean,fedrc", station_aggregator="fedrc", **options)
    build_station_aggregator(config)
    build_aggregator(config, "fedrc")
    shared = {"tau": 3.0, "bn_pool": "exact"}
    assert calls == [((), shared | {"weighting": "uniform"}), ((), shared | {"weighting": "clients"})]
    alone = given(aggregator="mean", station_aggregator="fedrc", settings={"tau": "3"})
    assert alone.settings == {"tau": 3.0}
    calls = recorded(monkeypatch, configuration.AGGREGATORS, "mean")
    build_station_aggregator(given(aggregator="fedrc"))
    assert calls == [((), {"weighting": "samples", "bn_pool": "naive"})]


# --- bad input -------------------------------------------------------------------------------------------------------

BAD_INPUT = {
    "dataset": (["--dataset", "emoji_stiles"], "Unknown data set 'emoji_stiles'; did you mean 'emoji_styles'? Avail"),
    "backbone": (["--backbone", "lenet"], "Unknown backbone 'lenet'; did you mean 'lenet5'? Available: lenet5,"),
    "setting of domains": (
        ["--setting", "mix"],
        "Unknown setting 'mix'; did you mean 'mixed'? Available: single-domain, leave-",
    ),
    "one source": (
        ["--setting", "single-domain", "--sources", "noto,twemoji"],
        "setting=single-domain trains on 1 domain, but sources=['noto', 'twemoji'] names 2: name 1.",
    ),
    "source": (["--sources", "notto"], "Unknown source domain 'notto'; did you mean 'noto'? Available: noto, twemoji"),
    "warm-up": (
        ["--algorithm", "fedadg", "--local-epochs", "3"],
        "local_epochs=3, but this method needs 4 or more, as its first 3 only warm up: raise local_epochs, or lower",
    ),
    "algorithm": (["--algorithm", "FedAvgg"], "Unknown algorithm 'FedAvgg'; did you mean 'fedavg'? Available: fedavg,"),
    "aggregator": (
        ["--aggregator", "mean,hfedatn"],
        "Unknown aggregator 'hfedatn'; did you mean 'hfedatm'? Available: ",
    ),
    "no aggregator": (["--aggregator", ","], "aggregator=',' names no server rule: give one or more of mean, hfedatm"),
    "same aggregator": (["--aggregator", "mean, mean"], "aggregator='mean, mean' names a server rule twice: name each"),
    "held-out": (
        ["--held-out", "notto"],
        "Unknown held-out domain 'notto'; did you mean 'noto'? Available: noto, twem",
    ),
    "assignment": (
        ["--station-assignment", "randon"],
        "Unknown station rule 'randon'; did you mean 'random'? Availabl",
    ),
    "selection": (
        ["--selection", "oracel"],
        "Unknown selection rule 'oracel'; did you mean 'oracle'? Available: source",
    ),
    "station rule": (
        ["--station-aggregator", "medain"],
        "Unknown station aggregator 'medain'; did you mean 'median'? Available: mean, ",
    ),
    "temperature": (["--aggregator", "fedrc", "--set", "tau=0"], "tau=0.0 is not positive: give a number above 0."),
    "trim": (["--aggregator", "trimmed_mean", "--set", "trim=2"], "trim=2.0 is not in [0, 1]: give a number in that "),
    "pooled median": (
        ["--aggregator", "median", "--bn-pool", "exact"],
        "bn_pool=exact is given, but medians and trimm",
    ),
    "weighting": (["--server-weighting", "sample"], "Unknown server weighting 'sample'; did you mean 'samples'? Avail"),
    "station weighting": (["--station-weighting", "client"], "Unknown station weighting 'client'; did you mean 'clien"),
    "optimizer": (["--client-optimizer", "adamm"], "Unknown client optimizer 'adamm'; did you mean 'adam'? Available:"),
    "setting": (
        ["--set", "alpa=1"],
        "Unknown option of fedavg or mean,hfedatm 'alpa'; did you mean 'alpha'? Available",
    ),
    "setting of a method not run": (
        ["--set", "l2=1"],
        "Unknown option of fedavg or mean,hfedatm 'l2'; available: alpha",
    ),
    "no value": (["--set", "alpha"], "--set 'alpha' has no '=': write it as key=value, for example alpha=0.5."),
    "no number": (["--set", "alpha=much"], "alpha=much is not a number: give one, such as 0.75."),
    "no truth value": (["--set", "fot=maybe"], "fot=maybe is not true or false: give one of them."),
    "choice": (["--set", "gram=summ"], "Unknown gram 'summ'; did you mean 'sum'? Available: sum, mean."),
    "reserved": (["--set", "client_lr=1"], "--set client_lr is not how client_lr is set: use --client-lr."),
    "reserved weighting": (
        ["--set", "weighting=samples"],
        "--set weighting is not how weighting is set: use --server-w",
    ),
    "zero rate": (["--client-lr", "0"], "client_lr=0.0 is not positive: give a number above 0."),
    "negative rate": (["--client-lr", "-0.1"], "client_lr=-0.1 is not positive: give a number above 0."),
    "NaN rate": (["--client-lr", "nan"], "client_lr=nan is not finite: give a number."),
    "infinite rate": (["--client-lr", "inf"], "client_lr=inf is not finite: give a number."),
    "server rate": (
        ["--aggregator", "fedavgm", "--set", "server_lr=0"],
        "server_lr=0.0 is not positive: give a number ab",
    ),
    "share": (["--set", "alpha=1.5"], "alpha=1.5 is not in [0, 1]: give a number in that range."),
    "NaN share": (["--set", "alpha=nan"], "alpha=nan is not finite: give a number."),
    "negative weight": (["--set", "ridge=-1"], "ridge=-1.0 is negative: give 0 or more."),
    "NaN mix": (
        ["--domain-mix", "nan"],
        "domain_mix is nan, but must lie in [0, 1]; pass 0 for one domain a client, 1",
    ),
    "large mix": (
        ["--domain-mix", "1.1"],
        "domain_mix is 1.1, but must lie in [0, 1]; pass 0 for one domain a client, 1",
    ),
    "label skew": (
        ["--label-alpha", "0"],
        "label_alpha is 0.0, but must be a positive finite number; pass None for no",
    ),
    "rounds": (["--rounds", "0"], "rounds=0 is not positive: give 1 or more."),
    "seeds": (["--seeds", "-1"], "seeds=-1 is not positive: give 1 or more."),
    "eval_every": (
        ["--eval-every", "3"],
        "rounds=20 is no multiple of eval_every=3: give rounds=21 or another eval_ev",
    ),
    "eval_every 0": (["--eval-every", "0"], "eval_every=0 is not positive: give 1 or more."),
    "stations": (["--stations", "0"], "stations=0 is not a positive whole number: give 1 or more."),
    "batch": (["--batch-size", "-8"], "batch_size=-8 is not a positive whole number: give 1 or more."),
    "steps": (["--local-steps", "0"], "local_steps=0 is not a positive whole number: give 1 or more."),
    "participants": (
        ["--participants", "11"],
        "participants=11 is more than the 10 clients of a station: give at most",
    ),
    "no participants": (["--participants", "0"], "participants=0 is not a positive whole number: give 1 or more."),
    "clients": (
        ["--clients-per-station", "300"],
        "3000 clients for 2448 examples, but every client needs one; pass 24",
    ),
    "norm": (
        ["--norm", "group"],
        "norm=group is given, but lenet5 has no such option: leave it out, or choose one of v",
    ),
    "unknown norm": (["--backbone", "resnet18", "--norm", "batches"], "Unknown norm 'batches'; did you mean 'batch'?"),
    "frozen": (["--freeze-bn"], "freeze_bn=True is given, but lenet5 has no such option: leave it out, or choose one "),
    "image size": (["--backbone", "alexnet"], "alexnet "),
    "batch statistics": (
        ["--bn-pool", "exactly"],
        "Unknown bn_pool 'exactly'; did you mean 'exact'? Available: naive,",
    ),
    "reserved pooling": (["--set", "bn_pool=exact"], "--set bn_pool is not how bn_pool is set: use --bn-pool."),
    "no weights": (["--pretrained", "nowhere.pth"], ""),
    "small Grams": (
        ["--set", "max_gram=100"],
        "The Gram of dense2 has 120 inputs, more than max_gram=100, and no block",
    ),
    "no Grams": (["--set", "max_gram=0"], "max_gram=0 is not positive: give a number above 0."),
    "data folder": (["--data-dir", "here"], "data_dir='here' is given, but emoji_styles comes with the library: leave"),
    "jobs": (["--jobs", "0"], "jobs=0 is not positive: give 1 or more."),
    "no file": (["--config", "nowhere.toml"], "Cannot read the configuration nowhere.toml: "),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_before_any_training(case, tmp_path, capsys):
    arguments, message = BAD_INPUT[case]
    assert main(["run", "--out", str(tmp_path / "run"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"fedjax-dg: {message}")
    assert err.count("\n") == 1 and err.endswith(".\n") and out == ""
    assert not (tmp_path / "run").exists()


def test_a_damaged_data_file_is_named(tmp_path, capsys, monkeypatch):
    damaged = tmp_path / "emoji_styles.npz"
    damaged.write_bytes(b"PK\x03\x04 cut off here")
    monkeypatch.setitem(datasets.DATASETS, "emoji_styles", lambda: emoji_styles.load(damaged))
    assert main(["run", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert str(damaged) in err and "reinstall it with" in err and err.count("\n") == 1


def test_a_folder_of_another_run_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"schema": 1, **asdict(given(rounds=7))}))
    for extra in ([], ["--resume"]):
        assert main(["run", "--out", str(tmp_path), *extra]) == 2
        err = capsys.readouterr().err
        assert (
            "holds a run of another configuration (rounds 7 -> 20): pass --overwrite to replace it, or another" in err
        )
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["run", "--stationz", "3"], "--stations"),
        (["run", "--held-outs", "noto"], "--held-out"),
        (["tabel"], "table"),
        (["data", "lst"], "list"),
    ],
)
def test_an_unknown_option_or_command_shows_the_nearest(arguments, nearest, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert nearest in capsys.readouterr().err.replace(arguments[1] if len(arguments) > 1 else arguments[0], "")


def test_typed_settings_of_no_settings():
    assert typed_settings(RunConfig()) == {}


# --- compiled programs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "enabled", "after"),
    [(None, True, "fedjax_dg"), ("/elsewhere", True, "/elsewhere"), (None, False, None)],
)
def test_compiled_programs_are_kept_unless_the_user_decides(before, enabled, after, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_to = {"jax_compilation_cache_dir": before, "jax_enable_compilation_cache": enabled}
    monkeypatch.setattr("fedjax_dg.cli.jax.config", SimpleNamespace(**set_to, update=set_to.__setitem__))
    keep_programs()
    expected = str(tmp_path / after) if after == "fedjax_dg" else after
    assert set_to["jax_compilation_cache_dir"] == expected
