"""The configuration of a run: one record, its file form, its checks, and the parts that it names."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jaxtyping import ArrayLike

from fedjax_dg import datasets
from fedjax_dg.aggregators import AGGREGATORS, BN_POOLS, WEIGHTINGS
from fedjax_dg.aggregators.grams import SCOPES
from fedjax_dg.algorithms import ALGORITHMS, OPTIMIZERS, augmenting, keep_batch_stats, keep_optimizer
from fedjax_dg.backbones import (
    BACKBONES,
    PRECISIONS,
    TEXT_BACKBONES,
    Backbone,
    EncoderConfig,
    in_precision,
    read_config,
)
from fedjax_dg.datasets.tokenizing import files_of
from fedjax_dg.errors import unknown
from fedjax_dg.evaluate import SELECTIONS
from fedjax_dg.federation import check_setting, check_topology
from fedjax_dg.recipes import AUGMENTS
from fedjax_dg.splits import SPLITS, check_fraction
from fedjax_dg.types import Aggregator, Algorithm, Topology
from fedjax_dg.weights import metadata

# What a number given with --set must satisfy, by name; every other number must be finite and not negative.
POSITIVE = ("client_lr", "server_lr", "epsilon", "server_eps", "samples", "max_gram", "rank")
POSITIVE += ("fourier", "lambda_p", "growth_rounds", "bank", "mixing_level", "shared_images")
POSITIVE += ("tau", "decay_rounds", "rows", "microbatch")
SHARES = ("alpha", "ema", "server_momentum", "server_b1", "server_b2")
SHARES += ("threshold", "smoothing", "meta_lr", "drop", "drop_channels", "batch", "style_alpha", "magnitude", "trim")
SHARES += ("share_prob", "explore_prob")


@dataclass(frozen=True)
class RunConfig:
    """A run: algorithm x aggregators x held-out domains x seeds over one federation. The defaults are the demo."""

    dataset: str = "emoji_styles"
    """Data set; `fedjax-dg data list` names them."""
    data_dir: str | None = None
    """Folder of the data set's files, as they are or prepared; not needed for embedded ones."""
    image_size: int | None = None
    """One side of the images, to which they are resized; None = the data set's own, 224 for pictures in files."""
    max_length: int | None = None
    """Tokens of a text, special ones too; longer texts are cut; None = 128."""
    examples_per_domain: int | None = None
    """Use at most so many examples of every domain, drawn once for all seeds; None = all."""
    backbone: str = "lenet5"
    """Network; those for texts have the sizes that config.json says in the folder of `pretrained`, if there is one."""
    dropout: float | None = None
    """Dropout of all layers of a network for texts; None = its own, mostly 0.1."""
    freeze_encoder: bool = False
    """Train only the classifier of a pretrained network for texts; the encoder reads every text once, before round 1."""
    remat: bool = False
    """Compute inside the layers of a network for texts anew in the backward pass: less memory, a third more time."""
    norm: str | None = None
    """Norm after its convolutions, where it can have several: batch, group; None = its own."""
    freeze_bn: bool = False
    """Keep the running statistics of batch norm as they are, in training too."""
    bn_pool: str = "naive"
    """Merging batch statistics: naive (mean of variances), exact (of the mixture), local (a client keeps its own)."""
    pretrained: str | None = None
    """Weights to start from: a file .pth, .safetensors (torchvision's or timm's names) or .npz, or a model's folder."""
    precision: str = "float32"
    """What layers compute in: float32, bfloat16; parameters, Grams and solves stay float32."""
    algorithm: str = "fedavg"
    """What a client does."""
    aggregator: str = "mean,hfedatm"
    """Server rules, comma separated; the first is the baseline of the paired differences."""
    held_out: str = "fluent_mono"
    """Domain that nobody trains on; `all` leaves each out in turn."""
    stations: int = 10
    """Stations of the federation."""
    clients_per_station: int = 10
    """Clients of each station."""
    station_assignment: str = "by-domain"
    """Which clients a station has: by-domain, contiguous, round-robin, random."""
    setting: str | None = None
    """Preset of who holds what: single-domain (with sources), leave-one-domain-out, mixed; None = domain_mix."""
    sources: str | None = None
    """Domains that are trained on, comma separated; None = all but the held-out one."""
    split: str | None = None
    """Validation examples: official (the data set's), random, domainbed, 90/10; None = official if embedded, else random."""
    validation_fraction: float | None = None
    """Their share of every domain, unless the split is official; None = the split's or the setting's own, mostly 0.2."""
    stream: str = "auto"
    """Whether rounds read their examples from disk: on, off, auto (if they do not fit into the devices' memory)."""
    domain_mix: float | None = None
    """The paper's lambda: 0 = one domain a client, 1 = every client has the global mix; None = the setting's, or 0."""
    label_alpha: float | None = None
    """Dirichlet label skew of the clients; None = no skew."""
    remainders: str = "owners"
    """Who gets the examples that do not divide: owners (of their domain), first (as the benchmark's code does)."""
    rounds: int = 20
    """Server rounds."""
    station_rounds: int = 5
    """Station rounds in a server round."""
    local_epochs: int | None = None
    """Passes of a client over its own examples in a station round; None = the algorithm's own (mostly 1)."""
    local_steps: int | None = None
    """Steps of a client in a station round, instead of local epochs."""
    batch_size: int = 7
    """Examples in a local step."""
    augment: str = "none"
    """How training images are augmented: none, domainbed, fl, feddg_ga."""
    client_lr: float = 0.1
    """Step size of the local optimizer."""
    client_optimizer: str | None = None
    """Local optimizer: sgd, momentum, adam; None = the algorithm's own."""
    keep_optimizer: bool = False
    """Keep the local optimizer's state on the client between station rounds, instead of starting it afresh."""
    participants: int | None = None
    """Clients of each station that are sampled for a server round; None = all."""
    station_aggregator: str = "mean"
    """Rule of the stations; a hyper-parameter that it shares with a server rule is the same for both."""
    station_weighting: str = "samples"
    """Weights of clients at their station: samples, clients, uniform."""
    regmean_scope: str | None = None
    """Dense layers that HFedATM merges by RegMean: head, all_dense, none; None = head for texts, all_dense for images."""
    server_weighting: str = "clients"
    """Weights of stations at the server, for every server rule: samples, clients (the paper's gamma), uniform."""
    seeds: int = 3
    """Number of seeds, 0, 1, ...: each has its own partition, initialisation and batches."""
    selection: str = "source-validation"
    """Which round's model is scored: source-validation, last, oracle, leave-one-domain-out (trains without pairs too)."""
    eval_every: int = 1
    """Rounds between two evaluations and checkpoints."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the algorithm and the aggregators, by name (`--set`)."""


#: Of a TOML file.
TABLES = ("run", "set", "sweep")
RUN_OPTIONS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "settings")


def read_toml(path: str | Path) -> RunConfig:
    """A run's TOML file: ``[run]`` with the option names in snake case, ``[set]`` with hyper-parameters.

    Raises ``ValueError`` for a file that cannot be read, or an option that does not exist.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"Cannot read the configuration {path}: {error}; give a TOML file with a [run] table."
        ) from None
    for table, options in content.items():
        if table not in TABLES:
            raise unknown(f"table in {path}", table, TABLES)
        if not isinstance(options, dict):
            raise ValueError(f"{table} = {options!r} in {path} is not a table: write [{table}] and the options below.")
    options = content.get("run", {})
    options = {name: typed_option(name, value, path) for name, value in options.items()}
    return RunConfig(**options, settings=dict(content.get("set", {})))


def typed_option(name: str, value: Any, where: str | Path) -> Any:
    """An option's value of its own type. ``ValueError`` for a name or a type that it does not have."""
    if name not in RUN_OPTIONS:
        raise unknown(f"option in {where}", name, RUN_OPTIONS)
    kind = str(RunConfig.__dataclass_fields__[name].type).split(" | ")[0]
    kinds = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}[kind]
    if type(value) not in kinds:
        raise ValueError(f"{name} = {value!r} in {where} is not of type {kind}: correct it.")
    return float(value) if kind == "float" else value


def parse_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """``("alpha=0.5", ...)`` as a dict. Raises ``ValueError`` for a pair without ``=``."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} has no '=': write it as key=value, for example alpha=0.5.")
    return {key.strip(): value.strip() for key, value in (pair.split("=", 1) for pair in pairs)}


def names(comma_list: str) -> list[str]:
    """``"mean,hfedatm"`` as a list."""
    return [name.strip() for name in comma_list.split(",") if name.strip()]


def check(config: RunConfig) -> RunConfig:
    """The configuration with its hyper-parameters typed. Raises ``ValueError``, one sentence, for anything wrong."""
    for kind, given, allowed in (
        ("data set", config.dataset, datasets.DATASETS),
        ("backbone", config.backbone, (*BACKBONES, *TEXT_BACKBONES)),
        ("precision", config.precision, PRECISIONS),
        ("algorithm", config.algorithm, ALGORITHMS),
        ("station aggregator", config.station_aggregator, AGGREGATORS),
        ("augmentation", config.augment, AUGMENTS),
        ("selection rule", config.selection, SELECTIONS),
        ("station weighting", config.station_weighting, WEIGHTINGS),
        ("server weighting", config.server_weighting, WEIGHTINGS),
        ("bn_pool", config.bn_pool, (*BN_POOLS, "local")),
        ("stream", config.stream, ("auto", "on", "off")),
        ("regmean_scope", config.regmean_scope or "head", (*SCOPES, "none")),
        ("split", config.split or "random", SPLITS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    if not names(config.aggregator):
        raise ValueError(
            f"aggregator={config.aggregator!r} names no server rule: give one or more of {', '.join(AGGREGATORS)}."
        )
    for name in names(config.aggregator):
        if name not in AGGREGATORS:
            raise unknown("aggregator", name, AGGREGATORS)
    if len(set(names(config.aggregator))) < len(names(config.aggregator)):
        raise ValueError(f"aggregator={config.aggregator!r} names a server rule twice: name each once.")
    if config.client_optimizer is not None and config.client_optimizer not in OPTIMIZERS:
        raise unknown("client optimizer", config.client_optimizer, OPTIMIZERS)
    for name in ("rounds", "seeds", "eval_every"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} is not positive: give 1 or more.")
    if config.selection == "leave-one-domain-out" and config.held_out != "all":
        raise ValueError(
            f"selection=leave-one-domain-out compares all held-out domains, but held_out={config.held_out}: give all."
        )
    check_number("client_lr", config.client_lr)
    if config.examples_per_domain is not None and config.examples_per_domain < 1:
        raise ValueError(f"examples_per_domain={config.examples_per_domain} is not positive: give 1 or more.")
    if config.image_size is not None and config.image_size < 1:
        raise ValueError(f"image_size={config.image_size} is not positive: give the pixels of a side, such as 224.")
    if config.max_length is not None and config.max_length < 1:
        raise ValueError(
            f"max_length={config.max_length} is not positive: give the most tokens of a text, such as 128."
        )
    check_texts(config)
    if config.validation_fraction is not None:
        check_fraction(config.validation_fraction)
    preset = check_setting(config.setting, None if config.sources is None else names(config.sources), config.domain_mix)
    config = dataclasses.replace(config, domain_mix=preset.domain_mix, settings=typed_settings(config))
    config = dataclasses.replace(config, local_epochs=topology(config).local_epochs)
    check_topology(topology(config))
    if config.rounds % config.eval_every:
        raise ValueError(
            f"rounds={config.rounds} is no multiple of eval_every={config.eval_every}: "
            f"give rounds={-(-config.rounds // config.eval_every) * config.eval_every} or another eval_every."
        )
    return config


def check_texts(config: RunConfig) -> None:
    """``ValueError`` where data set, network and options are not all for texts, or all for images."""
    texts = config.dataset in datasets.texts.LOADERS
    fitting = TEXT_BACKBONES if texts else BACKBONES
    if config.backbone not in fitting:
        raise ValueError(
            f"{config.dataset} holds {'texts' if texts else 'images'}, which {config.backbone} does not take: choose one of "
            f"{', '.join(fitting)} with --backbone."
        )
    for name in ("image_size", "augment") if texts else ("dropout", "freeze_encoder", "remat"):
        value = getattr(config, name)
        if value not in (None, False, "none"):
            kind = "images" if texts else "texts"
            raise ValueError(
                f"{name}={value} is given, which is for {kind}, but {config.dataset} holds none: leave it out."
            )
    if config.freeze_encoder and config.pretrained is None:
        raise ValueError(
            "freeze_encoder is given without pretrained weights, so nothing would be learnt from the texts: name a model's "
            "folder with --pretrained."
        )
    takers = [name for name in (*names(config.aggregator), config.station_aggregator) if name in _with("regmean_scope")]
    if config.regmean_scope is not None and not takers:
        raise ValueError(
            f"regmean_scope={config.regmean_scope} is given, but {config.aggregator}, {config.station_aggregator} have no "
            f"RegMean: leave it out, or choose {' or '.join(_with('regmean_scope'))}."
        )


def _with(option: str) -> list[str]:
    """The aggregators that have an option."""
    return [name for name, rule in AGGREGATORS.items() if option in inspect.signature(rule).parameters]


def check_number(name: str, value: int | float) -> None:
    """``ValueError`` for a number that its name rules out."""
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not finite: give a number.")
    if name in POSITIVE and value <= 0:
        raise ValueError(f"{name}={value} is not positive: give a number above 0.")
    if name in SHARES and not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not in [0, 1]: give a number in that range.")
    if value < 0:
        raise ValueError(f"{name}={value} is negative: give 0 or more.")


def typed_settings(config: RunConfig) -> dict[str, Any]:
    """``config.settings`` with each value of its default's type."""
    reserved = {"client_lr": "--client-lr", "weighting": "--server-weighting", "bn_pool": "--bn-pool"}
    reserved["regmean_scope"] = "--regmean-scope"
    defaults = algorithm_options(config.algorithm)
    for name in (*names(config.aggregator), config.station_aggregator):
        defaults |= aggregator_options(name)
    out = {}
    for key, value in config.settings.items():
        if key in reserved:
            raise ValueError(f"--set {key} is not how {key} is set: use {reserved[key]}.")
        if key not in defaults:
            raise unknown(f"option of {config.algorithm} or {config.aggregator}", key, defaults)
        out[key] = _typed(key, value, defaults[key])
    return out


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, str):
        return str(value)
    if isinstance(default, bool):
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise ValueError(f"{key}={value} is not true or false: give one of them.")
    try:
        number = int(str(value)) if isinstance(default, int) else float(str(value))
    except (TypeError, ValueError):
        kind = "whole number" if isinstance(default, int) else "number"
        raise ValueError(f"{key}={value} is not a {kind}: give one, such as {default}.") from None
    check_number(key, number)
    return number


# what ``--set`` does not change: sizes that the data set tells, and what is no number or word
NOT_SET = ("optimizer", "num_domains", "num_sources", "gammas", "codec")


def algorithm_options(name: str) -> dict[str, Any]:
    """What ``--set`` can change of an algorithm, with defaults: its traced hyper-parameters and its static options."""
    parameters = dict(inspect.signature(ALGORITHMS[name]).parameters)
    hparams = parameters.pop("hparams").default._asdict()
    hparams.pop("client_lr")
    return hparams | {key: p.default for key, p in parameters.items() if key not in NOT_SET}


def aggregator_options(name: str) -> dict[str, Any]:
    """What ``--set`` can change of an aggregator, with defaults."""
    parameters = inspect.signature(AGGREGATORS[name]).parameters
    return {k: p.default for k, p in parameters.items() if k not in ("weighting", "bn_pool", "regmean_scope")}


def build_backbone(config: RunConfig, num_classes: int, image_size: tuple[int, int], channels: int = 3) -> Backbone:
    """The network a configuration names, for images of that size and so many channels.

    ``ValueError`` for an option it does not have, or images that are not RGB where it takes no others.
    """
    factory: Callable = BACKBONES[config.backbone]
    given = {"norm": config.norm, "freeze_bn": config.freeze_bn or None}
    for name, value in given.items():
        having = [k for k, b in BACKBONES.items() if name in inspect.signature(b).parameters]
        if value is not None and config.backbone not in having:
            raise ValueError(
                f"{name}={value} is given, but {config.backbone} has no such option: leave it out, or choose one of "
                f"{', '.join(having)}."
            )
    given = {k: v for k, v in given.items() if v is not None}
    if channels != 3:
        having = [k for k, b in BACKBONES.items() if "channels" in inspect.signature(b).parameters]
        if config.backbone not in having:
            raise ValueError(
                f"{config.backbone} takes images of 3 channels, but those of {config.dataset} have {channels}: choose one "
                f"of {', '.join(having)}."
            )
        given["channels"] = channels
    backbone = factory(num_classes, image_size=image_size, **given)
    return in_precision(backbone, config.precision)


def build_text_backbone(
    config: RunConfig, num_classes: int, max_length: int, vocab_size: int, sizes: EncoderConfig | None = None
) -> Backbone:
    """The network a configuration names, for texts of at most ``max_length`` tokens whose ids are below ``vocab_size``.

    ``sizes``: its own, by default ``encoder_sizes``. ``ValueError`` for options and weights that do not fit.
    """
    factory: Callable = TEXT_BACKBONES[config.backbone]
    sizes = encoder_sizes(config, vocab_size) if sizes is None else sizes
    for name in ("norm", "freeze_bn"):
        if getattr(config, name):
            raise ValueError(f"{name} is given, but {config.backbone} has no such option: leave it out.")
    options = {name: getattr(config, name) for name in ("dropout", "freeze_encoder", "remat")}
    backbone = factory(num_classes, config=sizes, max_length=max_length, **options)
    return in_precision(backbone, config.precision)


def encoder_sizes(config: RunConfig, vocab_size: int) -> EncoderConfig:
    """Those of the ``config.json`` in the folder of ``pretrained``; without such a folder the network's own, with an
    embedding for ``vocab_size`` tokens. ``ValueError`` for weights that do not fit.
    """
    sizes = inspect.signature(TEXT_BACKBONES[config.backbone]).parameters["config"].default
    given = None if config.pretrained is None else Path(config.pretrained)
    if given is not None and given.is_dir():
        sizes = read_config(given, sizes.model_type)
        if not files_of(given):
            raise ValueError(
                f"The folder {given} holds weights but no tokenizer, so it is not known which tokens its ids are: add its "
                "tokenizer.json, vocab.json and merges.txt, or vocab.txt."
            )
        return sizes
    if given is not None and given.suffix != ".npz" and not metadata(given):
        raise ValueError(
            f"pretrained={config.pretrained} is a file, but texts are cut into tokens as the model's own tokenizer does it: "
            "give the folder with config.json, the tokenizer and the weights."
        )
    return sizes._replace(vocab_size=vocab_size)


def settled(config: RunConfig, setting: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> RunConfig:
    """A configuration with the options of a sweep's setting: of [run], or hyper-parameters."""
    given = dict(setting)
    options = {name: given.pop(name) for name in list(given) if name in RUN_OPTIONS}
    return dataclasses.replace(config, **options, settings=config.settings | given)


def relevant(config: RunConfig, aggregator: str, setting: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What of a sweep's setting makes a difference to the cells of one server rule, beside the names these have anyway."""
    options = algorithm_options(config.algorithm)
    for name in (aggregator, config.station_aggregator):
        options |= aggregator_options(name)
    told = ("algorithm", "aggregator")
    return tuple((k, v) for k, v in setting.items() if k in options or k in RUN_OPTIONS and k not in told)


class Numbers(NamedTuple):
    """The hyper-parameters of a round that are arguments of its program: others of the same structure compile nothing."""

    algorithm: Any  # the method's Hparams
    station: dict[str, Any]  # of the stations' rule
    server: dict[str, Any]


def numbers_of(config: RunConfig, aggregator: str) -> Numbers:
    """What a configuration gives them, with one of its server rules."""
    hparams = inspect.signature(ALGORITHMS[config.algorithm]).parameters["hparams"].default
    given = {k: config.settings[k] for k in hparams._fields if k in config.settings}
    rules = [
        {k: config.settings.get(k, v) for k, v in aggregator_numbers(name).items()}
        for name in (config.station_aggregator, aggregator)
    ]
    return Numbers(hparams._replace(**given, client_lr=config.client_lr), *rules)


def aggregator_numbers(name: str) -> dict[str, Any]:
    """The options of an aggregator that are traced, with defaults."""
    hints = get_type_hints(AGGREGATORS[name])
    return {k: v for k, v in aggregator_options(name).items() if hints[k] == ArrayLike}


def build_algorithm(config: RunConfig, hparams: Any = None, **sizes: int) -> Algorithm:
    """The algorithm a configuration names, with its hyper-parameters; those of the ``sizes`` of a data set that it takes.

    ``hparams``: in place of the configuration's.
    """
    factory: Callable = ALGORITHMS[config.algorithm]
    hparams = numbers_of(config, config.station_aggregator).algorithm if hparams is None else hparams
    options = algorithm_options(config.algorithm)
    given = {k: v for k, v in config.settings.items() if k in options and k not in hparams._fields}
    optimizer = {} if config.client_optimizer is None else {"optimizer": OPTIMIZERS[config.client_optimizer]}
    given |= {name: size for name, size in sizes.items() if name in inspect.signature(factory).parameters}
    algorithm = factory(hparams, **optimizer, **given)
    if (augment := AUGMENTS[config.augment]) is not None:
        algorithm = augmenting(algorithm, augment)
    if config.bn_pool == "local":
        algorithm = keep_batch_stats(algorithm)
    return keep_optimizer(algorithm) if config.keep_optimizer else algorithm


def build_aggregator(config: RunConfig, name: str, numbers: Mapping[str, Any] = {}) -> Aggregator:
    """The server rule of that name, with its options and the configuration's weighting; ``numbers`` in place of those."""
    return _build_rule(config, name, config.server_weighting, numbers)


def build_station_aggregator(config: RunConfig, numbers: Mapping[str, Any] = {}) -> Aggregator:
    """The rule of the stations, likewise."""
    return _build_rule(config, config.station_aggregator, config.station_weighting, numbers)


def _build_rule(config: RunConfig, name: str, weighting: str, numbers: Mapping[str, Any]) -> Aggregator:
    given = {k: v for k, v in config.settings.items() if k in aggregator_options(name)} | dict(numbers)
    if config.regmean_scope is not None and name in _with("regmean_scope"):
        given["regmean_scope"] = config.regmean_scope
    return AGGREGATORS[name](**given, weighting=weighting, bn_pool=pooling(config))


def pooling(config: RunConfig) -> str:
    """How both tiers pool batch statistics; those that clients keep to themselves are averaged for the server's use."""
    return "naive" if config.bn_pool == "local" else config.bn_pool


def topology(config: RunConfig) -> Topology:
    """The sizes of a configuration."""
    sizes = {name: getattr(config, name) for name in Topology._fields}
    if config.local_epochs is None:
        sizes["local_epochs"] = build_algorithm(config).local_epochs
    return Topology(**sizes)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Which options of two configurations differ, for an error message."""
    keys = [k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
    return ", ".join(f"{k} {theirs.get(k)!r} -> {ours.get(k)!r}" for k in keys)
