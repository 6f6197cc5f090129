"""Federation: what clients hold and what a model is judged on; ``federate`` builds it from a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from fedjax_dg import sharding
from fedjax_dg.datasets.domains import Domains
from fedjax_dg.errors import unknown
from fedjax_dg.evaluate import EvaluationSet
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


@dataclass(frozen=True)
class Federation:
    """Clients' examples, padded to one size, and the evaluation set."""

    clients: Examples  # [S, C, N, ...]
    ids: Int[Array, "S C"]  # identity of a client: its randomness follows it, wherever it is placed
    evaluation: EvaluationSet
    topology: Topology
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    held_out: str | None

    @property
    def data(self) -> tuple[Examples, Int[Array, "S C"]]:
        """What a round reads."""
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
        domain, mask = np.asarray(self.domain), np.asarray(self.mask)
        return np.stack([((domain == g) & mask).sum(-1) for g in range(len(self.domain_names))], axis=-1)


def federate(
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
    validation_fraction: float | None = None,
    station_rounds: int = 1,
    local_epochs: int = 1,
    local_steps: int | None = None,
    batch_size: int = 32,
    participants: int | None = None,
    mesh: sharding.Mesh | None = None,
) -> Federation:
    """Deal a data set to stations x clients, leaving one domain out.

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
    domain is held out). A data set without a validation split of its own gets one: ``validation_fraction`` (0.2, or the
    setting's) of each source domain, by identity where items recur across domains, drawn from ``seed``.

    The remaining options are the sizes of a round (``Topology``), and the ``mesh`` whose devices hold the clients: a process
    builds only the clients of its own devices. Raises ``ValueError``, one sentence, for anything out
    of range.
    """
    if held_out is not None and held_out not in domains.domain_names:
        raise unknown("held-out domain", held_out, domains.domain_names)
    topology = Topology(
        stations, clients_per_station, station_rounds, local_epochs, local_steps, batch_size, participants
    )
    check_topology(topology)
    preset = check_setting(setting, sources, domain_mix)
    out = -1 if held_out is None else domains.domain_names.index(held_out)
    validation = domains.validation
    if validation is None:
        fraction = preset.validation_fraction if validation_fraction is None else validation_fraction
        validation = draw_validation(domains, fraction, seed)
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
    judged = np.flatnonzero((source & validation) | (domains.domain == out))
    if domains.identity is None:
        unseen = np.ones(len(judged), bool)
    else:
        unseen = ~np.isin(domains.identity[judged], domains.identity[train])
    held = [[train[dealt[c]] for c in station] for station in places]
    every = sharding.replicate(
        (domains.inputs[judged], domains.labels[judged], np.ones(len(judged), bool), domains.domain[judged], unseen),
        mesh,
    )
    return Federation(
        clients=_pad(domains, held, mesh),
        ids=sharding.build(places.shape, np.int32, lambda index: places[index].astype(np.int32), mesh),
        evaluation=EvaluationSet(Examples(*every[:4]), every[4]),
        topology=topology,
        domain_names=tuple(domains.domain_names),
        class_names=tuple(domains.class_names),
        held_out=held_out,
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


def source_ids(domains: Domains, held_out: str | None, sources: Sequence[str] | None) -> list[int]:
    """Ids of the domains that are trained on. ``ValueError`` for names that do not exist, twice, or the held-out one."""
    if sources is None:
        return [i for i, name in enumerate(domains.domain_names) if name != held_out]
    for name in sources:
        if name not in domains.domain_names:
            raise unknown("source domain", name, domains.domain_names)
    if not sources or len(set(sources)) < len(sources) or held_out in sources:
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


def draw_validation(domains: Domains, fraction: float, seed: int) -> Bool[np.ndarray, " M"]:
    """A validation split: ``fraction`` of every domain's examples; where items recur, of the items, with all their examples.

    Raises ``ValueError`` for a fraction outside [0, 1).
    """
    if not (math.isfinite(fraction) and 0 <= fraction < 1):
        raise ValueError(f"validation_fraction={fraction} is not in [0, 1): give a share such as 0.2.")
    identity = np.arange(len(domains.labels)) if domains.identity is None else domains.identity
    chosen = np.zeros(len(domains.labels), bool)
    for domain in np.unique(domains.domain) if domains.identity is None else [None]:
        here = np.arange(len(identity)) if domain is None else np.flatnonzero(domains.domain == domain)
        items = np.random.default_rng(seed).permutation(np.unique(identity[here]))
        chosen[here] = np.isin(identity[here], items[: int(fraction * len(items))])
    return chosen


def _pad(domains: Domains, held: list[list[np.ndarray]], mesh: sharding.Mesh | None) -> Examples:
    """Stack clients' examples [S, C, N, ...], N = the largest client; padding is zeros."""
    sizes = (len(held), len(held[0]), max(len(client) for station in held for client in station))

    def stack(values):
        def block(index):
            stations, clients, *_ = index
            part = [station[clients] for station in held[stations]]
            out = np.zeros((len(part), len(part[0]), sizes[2], *values.shape[1:]), values.dtype)
            for s, station in enumerate(part):
                for c, client in enumerate(station):
                    out[s, c, : len(client)] = values[client]
            return out

        return sharding.build((*sizes, *values.shape[1:]), values.dtype, block, mesh)

    real = np.ones(len(domains.labels), bool)
    return Examples(stack(domains.inputs), stack(domains.labels), stack(real), stack(domains.domain))
