"""Federation: what clients hold and what a model is judged on; ``federate`` builds it from a data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from fedjax_dg import sharding, splits
from fedjax_dg.datasets.domains import Domains
from fedjax_dg.datasets.reading import read_all
from fedjax_dg.errors import unknown
from fedjax_dg.evaluate import EvaluationSet, domains_left_out
from fedjax_dg.partition import assign_stations, by_domain_mix
from fedjax_dg.types import Examples, Topology


class Setting(NamedTuple):
    """Who holds which domains."""

    domain_mix: float
    validation_fraction: float = 0.2
    num_sources: int | None = None  # if set, that many domains are trained on


#: The three settings of FedADG and Stable-FedADG. The text we have does not define them: these are our reading.
SETTINGS = {
    "single-domain": Setting(1.0, 0.3, num_sources=1),  # all clients share one domain
    "leave-one-domain-out": Setting(0.0, 0.3),  # every client has one of the source domains
    "mixed": Setting(0.5, 0.3),  # every client has several, and another mixture than its neighbours
}


class Deal(NamedTuple):
    """Who holds which rows of a data set and which are judged: a federation before any example is read."""

    held: Int[np.ndarray, "S C N"]  # -1 = padding
    ids: Int[np.ndarray, "S C"]
    judged: Int[np.ndarray, " E"]  # likewise
    unseen: Bool[np.ndarray, " E"]
    topology: Topology
    held_out: str | None


class Source(NamedTuple):
    """Where a streamed federation's examples are read from."""

    domains: Domains
    deal: Deal


@dataclass(frozen=True)
class Federation:
    """Clients' examples, padded to one size, and the evaluation set.

    Of a streamed one (``source``), inputs have only a shape here: every round reads those that it needs, and every
    evaluation a part after another (``stream``).
    """

    clients: Examples  # [S, C, N, ...]
    ids: Int[Array, "S C"]  # identity of a client: its randomness follows it, wherever it is placed
    evaluation: EvaluationSet
    topology: Topology
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    held_out: str | None
    source: Source | None = None

    @property
    def data(self) -> tuple[Examples, Int[Array, "S C"]]:
        """What a round reads. ``ValueError`` for a streamed federation, of which that is another thing every round."""
        if self.source is not None:
            raise ValueError(
                "This federation is streamed, so no array holds its examples: run it with run or run_blocks, or build it "
                "with stream=False."
            )
        return self.clients, self.ids

    @property
    def inputs(self) -> Array:
        return self.clients.inputs

    @property
    def labels(self) -> Int[Array, "S C N"]:
        return self.clients.labels

    @property
    def mask(self) -> Bool[Array, "S C N"]:
        return self.clients.mask

    @property
    def domain(self) -> Int[Array, "S C N"]:
        return self.clients.domain

    def counts(self) -> Int[np.ndarray, "S C G"]:
        """Real examples of each client by domain."""
        domain, mask = sharding.fetch((self.domain, self.mask))
        return np.stack([((domain == g) & mask).sum(-1) for g in range(len(self.domain_names))], axis=-1)


def federate(
    domains: Domains,
    held_out: str | None = None,
    stations: int = 10,
    clients_per_station: int = 10,
    domain_mix: float | None = None,
    seed: int = 0,
    *,
    mesh: sharding.Mesh | None = None,
    stream: bool = False,
    workers: int = 0,
    **options: Any,
) -> Federation:
    """Deal a data set to stations x clients, leaving one domain out, and put its examples on the devices.

    ``options``, and who gets what: see ``deal``. ``mesh``: the devices that hold the clients; a process builds only the
    clients of its own devices. ``stream``: leave the inputs where they are; rounds then read what they need (``stream``).
    Images in files are decoded by ``workers`` processes (0: by threads). Raises ``ValueError``, one sentence, for anything
    out of range.
    """
    dealt = deal(domains, held_out, stations, clients_per_station, domain_mix, seed, **options)
    if not stream:
        domains = domains._replace(inputs=read_all(domains.inputs, workers))
    return place(domains, dealt, mesh, stream)


def deal(
    domains: Domains,
    held_out: str | None = None,
    stations: int = 10,
    clients_per_station: int = 10,
    domain_mix: float | None = None,
    seed: int = 0,
    *,
    setting: str | None = None,
    sources: Sequence[str] | None = None,
    station_assignment: str = "by-domain",
    remainders: str = "owners",
    label_alpha: float | None = None,
    split: str | None = None,
    validation_fraction: float | None = None,
    station_rounds: int = 1,
    local_epochs: int = 1,
    local_steps: int | None = None,
    batch_size: int = 32,
    participants: int | None = None,
) -> Deal:
    """Who holds which examples of a data set, leaving one domain out, and on which a model is judged.

    Training examples of the source domains go to clients by ``partition.by_domain_mix`` (``domain_mix`` is the paper's
    lambda: 1 = every client has the global mix; 0, the default, = one domain a client; ``label_alpha`` adds Dirichlet label
    skew), and clients to stations by ``station_assignment``: ``by-domain`` (clients own domains in whole stations, so at
    domain_mix 0 a station holds one domain), ``contiguous``, ``round-robin`` or ``random``. Clients are padded to the
    largest one and masked.

    ``sources``: the domains that are trained on, instead of all but ``held_out``; what is neither is left out.
    ``setting``: a preset of ``domain_mix`` and ``validation_fraction`` by name (``SETTINGS``): ``single-domain`` (all
    clients share the one domain of ``sources``), ``leave-one-domain-out`` (one source domain a client), ``mixed`` (half of a
    client's examples from its own domain, half from the global mix, or as ``domain_mix`` says).

    The model is judged on the validation examples of every source domain and on all examples of ``held_out`` (None: no
    domain is held out; ``a+b``: two are), with ``split="domainbed"`` on the part of it that DomainBed calls ``in``.
    ``split`` names the rule that draws the validation examples (``splits.SPLITS``); by default the data set's own, or if it
    has none ``validation_fraction`` (0.2, or the setting's) of each domain at random.

    The remaining options are the sizes of a round (``Topology``). Raises ``ValueError``, one sentence, for anything out of
    range.
    """
    for name in domains_left_out(held_out):
        if name not in domains.domain_names:
            raise unknown("held-out domain", name, domains.domain_names)
    topology = Topology(
        stations, clients_per_station, station_rounds, local_epochs, local_steps, batch_size, participants
    )
    check_topology(topology)
    preset = check_setting(setting, sources, domain_mix)
    out = [domains.domain_names.index(name) for name in domains_left_out(held_out)]
    validation = splits.draw(domains, split, validation_share(setting, validation_fraction), seed)
    source = np.isin(domains.domain, source_ids(domains, held_out, sources))
    train = np.flatnonzero(source & ~validation)
    dealt = by_domain_mix(
        domains.domain[train],
        stations * clients_per_station,
        preset.domain_mix,
        seed,
        remainders=remainders,
        block=clients_per_station if station_assignment == "by-domain" else 1,
        labels=domains.labels[train],
        label_alpha=label_alpha,
    )
    counts = np.stack([np.bincount(domains.domain[train][d], minlength=len(domains.domain_names)) for d in dealt])
    places = assign_stations(counts, stations, station_assignment, seed)  # [S, C]
    tested = np.isin(domains.domain, out) & ~(validation if split == "domainbed" else False)
    judged = np.flatnonzero((source & validation) | tested)
    if domains.identity is None:
        unseen = np.ones(len(judged), bool)
    else:
        unseen = ~np.isin(domains.identity[judged], domains.identity[train])
    held = np.full((*places.shape, max(map(len, dealt))), -1, np.int64)
    for place, client in np.ndenumerate(places):
        held[place][: len(dealt[client])] = train[dealt[client]]
    return Deal(held, places.astype(np.int32), judged, unseen, topology, held_out)


def in_fewer_shapes(deals: Mapping[Any, Deal], slack: float = 0.1) -> dict[Any, Deal]:
    """The same deals, padded to fewer shapes, to share programs: a size within ``slack`` below another takes it."""

    def shared(sizes: Iterable[int]) -> dict[int, int]:
        taken, larger = {}, 0
        for size in sorted(set(sizes), reverse=True):
            larger = taken[size] = larger if size >= (1 - slack) * larger > 0 else size
        return taken

    def padded(values, size, fill):
        width = [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])]
        return np.pad(values, width, constant_values=fill)

    places = shared(dealt.held.shape[-1] for dealt in deals.values())
    judged = shared(len(dealt.judged) for dealt in deals.values())
    return {
        which: dealt._replace(
            held=padded(dealt.held, places[dealt.held.shape[-1]], -1),
            judged=padded(dealt.judged, judged[len(dealt.judged)], -1),
            unseen=padded(dealt.unseen, judged[len(dealt.judged)], False),
        )
        for which, dealt in deals.items()
    }


def place(domains: Domains, dealt: Deal, mesh: sharding.Mesh | None = None, stream: bool = False) -> Federation:
    """A dealt federation with its examples on the devices of ``mesh``; if streamed, without their inputs."""
    held, judged = dealt.held, dealt.judged

    def clients(values):
        def block(index):
            rows = held[index[:3]]
            out = values[np.maximum(rows, 0)]
            out[rows < 0] = 0
            return out

        return sharding.build((*held.shape, *values.shape[1:]), values.dtype, block, mesh)

    def inputs(shape) -> Any:
        return jax.ShapeDtypeStruct((*shape, *domains.inputs.shape[1:]), domains.inputs.dtype)

    real = np.ones(len(domains.labels), bool)
    told = sharding.replicate((domains.labels[judged], judged >= 0, domains.domain[judged], dealt.unseen), mesh)
    seen = inputs(judged.shape) if stream else sharding.replicate(domains.inputs[judged], mesh)
    own = inputs(held.shape) if stream else clients(domains.inputs)
    return Federation(
        clients=Examples(own, *(clients(x) for x in (domains.labels, real, domains.domain))),
        ids=sharding.build(dealt.ids.shape, np.int32, lambda index: dealt.ids[index], mesh),
        evaluation=EvaluationSet(Examples(seen, *told[:3]), told[3]),
        topology=dealt.topology,
        domain_names=tuple(domains.domain_names),
        class_names=tuple(domains.class_names),
        held_out=dealt.held_out,
        source=Source(domains, dealt) if stream else None,
    )


def check_setting(setting: str | None, sources: Sequence[str] | None, domain_mix: float | None) -> Setting:
    """The setting of that name, with what is given in its place. ``ValueError`` for what contradicts it."""
    if setting is not None and setting not in SETTINGS:
        raise unknown("setting", setting, SETTINGS)
    preset = Setting(0.0) if setting is None else SETTINGS[setting]
    if preset.num_sources is not None and len(sources or ()) != preset.num_sources:
        raise ValueError(
            f"setting={setting} trains on {preset.num_sources} domain, but sources={sources} names {len(sources or ())}: "
            f"name {preset.num_sources}."
        )
    if domain_mix is None or domain_mix == preset.domain_mix:
        return preset
    if setting in ("single-domain", "leave-one-domain-out"):
        raise ValueError(
            f"setting={setting} has domain_mix={preset.domain_mix:g}, not {domain_mix}: leave domain_mix out, or setting."
        )
    return preset._replace(domain_mix=domain_mix)


def validation_share(setting: str | None, fraction: float | None) -> float | None:
    """The share of examples that are for validation: as given, else the setting's, else None for the split's own."""
    return SETTINGS[setting].validation_fraction if fraction is None and setting is not None else fraction


def source_ids(domains: Domains, held_out: str | None, sources: Sequence[str] | None) -> list[int]:
    """Ids of the domains that are trained on. ``ValueError`` for names that do not exist, twice, or the held-out one."""
    if sources is None:
        return [i for i, name in enumerate(domains.domain_names) if name not in domains_left_out(held_out)]
    for name in sources:
        if name not in domains.domain_names:
            raise unknown("source domain", name, domains.domain_names)
    if not sources or len(set(sources)) < len(sources) or set(domains_left_out(held_out)) & set(sources):
        raise ValueError(
            f"sources={list(sources)} with held_out={held_out}: name each source once, at least one, and not the held-out "
            "domain."
        )
    return [domains.domain_names.index(name) for name in sources]


def check_topology(topology: Topology) -> None:
    """``ValueError`` for sizes that no round can have."""
    for name, value in topology._asdict().items():
        if value is None and name in ("local_steps", "participants"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a positive whole number: give 1 or more.")
    if topology.participants is not None and topology.participants > topology.clients_per_station:
        raise ValueError(
            f"participants={topology.participants} is more than the {topology.clients_per_station} clients of a station: "
            f"give at most {topology.clients_per_station}, or None for all of them."
        )
