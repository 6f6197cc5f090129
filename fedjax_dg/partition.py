"""Which client gets which example, and which station which client: host-side NumPy, run once before training.

Three steps, each usable alone: `domain_counts` fixes how many examples of each domain every client holds,
`by_domain_mix` draws the examples, `assign_stations` groups the clients into stations.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dg.errors import unknown

REMAINDERS = ("owners", "first")
STATION_RULES = ("contiguous", "round-robin", "random", "by-domain")


def domain_counts(
    sizes: ArrayLike,
    clients: int,
    domain_mix: float,
    *,
    remainders: str = "owners",
    block: int = 1,
) -> np.ndarray:
    """How many examples of each domain each client holds, from one domain a client to the global mix.

    With n_k = `sizes[k]`, C = `clients` and lambda = `domain_mix`, client c is due

        t[c, k] = n_k * ((1 - lambda) * own[c, k] + lambda / C)

    examples of domain k; it gets the floor, and the n_k - sum_c floor(t[c, k]) left over go out one a client.
    own[:, k] sums to 1 and says who holds domain k at lambda = 0:

    - at least as many clients as non-empty domains: domain k owns m_k clients in a row (in domain order) and
      own = 1 / m_k on them; m_k starts at 1, and the domain with the largest n_k / m_k (ties: lowest k) takes one more
      client until sum m_k = C;
    - fewer clients than domains: each domain goes whole to one client, largest domain first, always to the client
      that holds the fewest examples so far.

    `block` > 1 runs the same rule with C / `block` blocks of consecutive clients in place of clients; inside a block
    the clients share evenly. With `block` = clients per station, every station owns one domain at lambda = 0 (one or
    more whole domains where there are fewer blocks than domains).

    Args:
        sizes: examples of each domain, [domains]; 0 for a domain that takes no part, such as the held-out one.
        clients: number of clients C.
        domain_mix: lambda in [0, 1]; 1 gives every client the global mix, 0 gives every client its own domain.
        remainders: "owners" hands what is left of domain k to the clients that own k, smallest client first, then to
            the others, smallest first. "first" (compat) repeats the released benchmark bug for bug: clients 0, 1, ...
            get it whatever they own, so lambda = 0 is impure.
        block: number of consecutive clients that own domains together; must divide `clients`.

    Returns:
        int64 [clients, domains]; column k sums to `sizes[k]` exactly.

    Raises:
        ValueError: on fewer clients than 1 or more than examples, a `domain_mix` outside [0, 1], an unknown
            `remainders`, a `block` that does not divide `clients`, or sizes that are no counts.

    Deviations: "owners" (pure at lambda = 0, client sizes balanced) is ours; the released code knows only "first", and
    no blocks. With "owners" no client is empty. For `block` = 1 this follows from the rule: if an owner's floor is 0,
    so is everybody's, and the n_k >= m_k examples left reach all m_k owners. With `block` > 1 a domain smaller than its
    blocks would leave clients empty; each of those takes one example from the largest client, from its largest domain,
    and is the one impurity at lambda = 0. "first" may leave clients empty, as the released code does. More clients than
    examples are refused in both modes. With fewer clients than domains, equal domains are placed later id first; the
    released code leaves that order to NumPy's unstable sort, so there, and only there, "first" may differ from it.

    Reference: Bai et al., "Benchmarking Algorithms for Federated Domain Generalization", ICLR 2024,
    https://arxiv.org/abs/2307.04942 (heterogeneous partitioning); code https://github.com/inouye-lab/FedDG_Benchmark.

    >>> domain_counts([6, 3], clients=3, domain_mix=0.0).tolist()
    [[3, 0], [3, 0], [0, 3]]
    >>> domain_counts([6, 3], clients=3, domain_mix=1.0).tolist()
    [[2, 1], [2, 1], [2, 1]]
    """
    sizes = _checked_sizes(sizes)
    _check_clients(clients, block, num_examples=int(sizes.sum()))
    if not 0 <= domain_mix <= 1:  # written so that NaN fails too
        raise ValueError(
            f"domain_mix is {domain_mix}, but must lie in [0, 1]; pass 0 for one domain a client, 1 for the global mix."
        )
    if remainders not in REMAINDERS:
        raise unknown("remainders", remainders, REMAINDERS)

    num_blocks = clients // block
    enough = num_blocks >= np.count_nonzero(sizes)
    owns = _deal_blocks(sizes, num_blocks) if enough else _stack_domains(sizes, num_blocks)
    owns = np.repeat(owns, block, axis=0)

    own = owns / np.maximum(owns.sum(axis=0), 1)
    if enough:
        due = sizes * (own * (1 - domain_mix) + 1 / clients * domain_mix)
    else:
        # The same t in the released code's order of operations, as one rounding can move a floor.
        due = sizes / clients * domain_mix + sizes * own * (1 - domain_mix)
    counts = np.floor(due).astype(np.int64)

    left = sizes - counts.sum(axis=0)
    if remainders == "first":
        return counts + (np.arange(clients)[:, None] < left)
    return _feed_empty(_remainders_to_owners(counts, left, owns))


def by_domain_mix(
    domain: ArrayLike,
    clients: int,
    domain_mix: float,
    seed: int,
    *,
    remainders: str = "owners",
    block: int = 1,
    labels: ArrayLike | None = None,
    label_alpha: float | None = None,
) -> list[np.ndarray]:
    """The examples of each client: domains mixed by `domain_mix`, classes skewed by `label_alpha` if given.

    Client c gets `domain_counts(...)[c, k]` examples of domain k. Each domain is permuted once, in order of domain id
    from one `np.random.default_rng(seed)`, and handed out consecutively.

    With `label_alpha` = alpha the counts stay and the classes are skewed. With p the label frequencies over all
    examples, client c draws q_c ~ Dirichlet(alpha * p) once; then it draws its examples of every domain without
    replacement, the class of each from q_c renormalised over the classes of which the domain still has examples. Large
    alpha brings every client near p, small alpha near a single class, as far as what the domains hold allows.

    Args:
        domain: domain id of each example, integers >= 0, [N].
        clients, domain_mix, remainders, block: see `domain_counts`.
        seed: fixes the result completely.
        labels: class of each example, integers, [N]; read only with `label_alpha`.
        label_alpha: concentration alpha > 0, or None for no skew.

    Returns:
        One int64 index array a client, together every index 0..N-1 exactly once. Inside a client the domains come in
        order of id (and with `label_alpha` the classes in order inside a domain): shuffle before making batches.

    Raises:
        ValueError: as `domain_counts`; also for ids or labels of the wrong shape or kind, `label_alpha` not a positive
            number, and `label_alpha` without `labels`.

    Deviations: with `remainders="first"` and no `label_alpha` this is the released benchmark's partition, index for
    index (save the order of equal domains, see `domain_counts`). With `label_alpha`, clients draw in a random order:
    whoever draws last gets what the others left, and in order of client that would always be the last station. The
    draws are made in bulk (a multinomial, cut to what is there, the excess redrawn among the classes left), which has
    the distribution of drawing one by one and ends after at most one pass a class.

    Reference: Bai et al., "Benchmarking Algorithms for Federated Domain Generalization", ICLR 2024,
    https://arxiv.org/abs/2307.04942; label skew: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data
    Distribution for Federated Visual Classification", 2019, https://arxiv.org/abs/1909.06335.

    >>> parts = by_domain_mix(np.array([0, 0, 0, 0, 1, 1]), clients=3, domain_mix=0.0, seed=0)
    >>> [sorted(part.tolist()) for part in parts[2:]]
    [[4, 5]]
    """
    domain = _checked_ids("domain", domain)
    if domain.min(initial=0) < 0:
        raise ValueError(f"domain holds the id {domain.min()}, but ids must be 0 or more; renumber the domains from 0.")
    sizes = np.bincount(domain)
    counts = domain_counts(sizes, clients, domain_mix, remainders=remainders, block=block)

    rng = np.random.default_rng(seed)
    members = np.split(np.argsort(domain, kind="stable"), np.cumsum(sizes)[:-1])
    pools = [rng.permutation(member) for member in members]
    if label_alpha is not None:
        label = _checked_labels(labels, label_alpha, len(domain))
        log_q = _log_dirichlet(label_alpha * np.bincount(label) / len(label), clients, rng)
        pools = [_skew(pool, label, counts[:, k], log_q, rng) for k, pool in enumerate(pools)]

    examples = _group_by_client(np.concatenate(pools), counts)
    return np.split(examples, np.cumsum(counts.sum(axis=1))[:-1])


def assign_stations(counts: ArrayLike, stations: int, how: str, seed: int) -> np.ndarray:
    """Which clients each station gets, as row numbers of `counts`.

    - "contiguous": clients 0, 1, ... in blocks, the released HFedATM code's default. `domain_counts` orders clients by
      domain, so for a small `domain_mix` stations are nearly single-domain;
    - "round-robin": client c goes to station c mod `stations`, so stations look alike;
    - "random": contiguous blocks of a permutation drawn from `seed`;
    - "by-domain": clients sorted stably by the domain they hold most of (ties: lowest id), then contiguous blocks.

    Args:
        counts: examples of each domain at each client, [clients, domains].
        stations: number of stations; must divide the number of clients.
        how: one of the four rules above.
        seed: read by "random" only.

    Returns:
        int64 [stations, clients per station]; every client once.

    Raises:
        ValueError: on fewer than 1 station, clients that do not divide into stations, or an unknown rule.

    >>> assign_stations(np.array([[3, 0], [0, 3], [3, 0], [0, 3]]), stations=2, how="by-domain", seed=0).tolist()
    [[0, 2], [1, 3]]
    """
    counts = np.asarray(counts)
    if counts.ndim != 2:
        raise ValueError(f"counts has shape {counts.shape}, but must be [clients, domains]; pass domain_counts(...).")
    clients = len(counts)
    if stations < 1 or stations > clients or clients % stations:
        divisors = ", ".join(str(s) for s in range(1, clients + 1) if clients % s == 0)
        raise ValueError(
            f"{clients} clients do not divide into {stations} stations of equal size; choose stations from {divisors}, "
            "or another number of clients."
        )
    if how == "contiguous":
        return np.arange(clients).reshape(stations, -1)
    if how == "round-robin":
        return np.arange(clients).reshape(-1, stations).T
    if how == "random":
        return np.random.default_rng(seed).permutation(clients).reshape(stations, -1)
    if how == "by-domain":
        return np.argsort(counts.argmax(axis=1), kind="stable").reshape(stations, -1)
    raise unknown("station rule", how, STATION_RULES)


def _deal_blocks(sizes: np.ndarray, num_blocks: int) -> np.ndarray:
    """Blocks in a row for each domain, in numbers close to proportion: bool [num_blocks, domains]."""
    dealt = (sizes > 0).astype(np.int64)
    for _ in range(num_blocks - dealt.sum()):
        dealt[np.argmax(sizes / np.maximum(dealt, 1))] += 1
    owner = np.repeat(np.arange(len(sizes)), dealt)
    return owner[:, None] == np.arange(len(sizes))


def _stack_domains(sizes: np.ndarray, num_blocks: int) -> np.ndarray:
    """Each domain whole to the block with the fewest examples so far, largest first: bool [num_blocks, domains]."""
    owns = np.zeros((num_blocks, len(sizes)), dtype=bool)
    load = np.zeros(num_blocks, dtype=np.int64)
    for k in np.argsort(sizes, kind="stable")[::-1]:  # of equal domains the later first
        block = load.argmin()
        owns[block, k] = True
        load[block] += sizes[k]
    return owns


def _remainders_to_owners(counts: np.ndarray, left: np.ndarray, owns: np.ndarray) -> np.ndarray:
    """`counts` plus one example of domain k for `left[k]` clients: owners first, smaller clients first."""
    counts = counts.copy()
    held = counts.sum(axis=1)
    for k, num in enumerate(left):
        takers = np.lexsort((held, ~owns[:, k]))[:num]
        counts[takers, k] += 1
        held[takers] += 1
    return counts


def _feed_empty(counts: np.ndarray) -> np.ndarray:
    """`counts` with one example moved from the largest client, from its largest domain, to each empty one."""
    counts = counts.copy()
    held = counts.sum(axis=1)
    for client in np.flatnonzero(held == 0):
        donor = held.argmax()  # holds at least 2, as there are no more clients than examples and one has none
        k = counts[donor].argmax()
        counts[[donor, client], k] += [-1, 1]
        held[[donor, client]] += [-1, 1]
    return counts


def _log_dirichlet(concentration: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Log of `num` Dirichlet draws, each up to a constant: [num, classes].

    A Gamma(a) variable is Gamma(a + 1) * U^(1/a). Its log stays finite where for small a the variable itself is 0,
    which would leave 0/0 once the one class with all the weight has run out.
    """
    a = np.maximum(concentration, 1e-300)  # below, 1/a overflows; draws are one class a client long before
    shape = (num, len(a))
    return np.log(rng.standard_gamma(a + 1, shape)) - rng.standard_exponential(shape) / a


def _skew(
    pool: np.ndarray, label: np.ndarray, num: np.ndarray, log_q: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """One domain's examples reordered so that the next `num[c]`, client after client, have classes drawn from q_c."""
    pool = pool[np.argsort(label[pool], kind="stable")]
    stock = np.bincount(label[pool], minlength=log_q.shape[1])
    taken = np.zeros((len(num), len(stock)), dtype=np.int64)
    for client in rng.permutation(np.flatnonzero(num)):
        taken[client] = _draw_classes(int(num[client]), log_q[client], stock, rng)
        stock -= taken[client]
    return _group_by_client(pool, taken)


def _draw_classes(num: int, log_q: np.ndarray, stock: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many of `num` draws without replacement from `stock` fall on each class, with class weights exp(log_q)."""
    taken = np.zeros_like(stock)
    while num > 0:  # every pass either finishes or empties a class
        open_classes = np.flatnonzero(stock > taken)
        weight = np.exp(log_q[open_classes] - log_q[open_classes].max())
        drawn = rng.multinomial(num, weight / weight.sum())
        drawn = np.minimum(drawn, (stock - taken)[open_classes])
        taken[open_classes] += drawn
        num -= drawn.sum()
    return taken


def _group_by_client(examples: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Examples that lie group after group, reordered by client: client c takes the next `counts[c, g]` of group g."""
    num_clients, num_groups = counts.shape
    client = np.repeat(np.tile(np.arange(num_clients), num_groups), counts.T.ravel())
    return examples[np.argsort(client, kind="stable")]


def _checked_ids(name: str, ids: ArrayLike) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{name} has shape {ids.shape} and type {ids.dtype}, but must be a flat array of integers; "
            "pass one integer an example."
        )
    return ids


def _checked_sizes(sizes: ArrayLike) -> np.ndarray:
    sizes = _checked_ids("sizes", sizes).astype(np.int64)
    if sizes.min(initial=0) < 0:
        raise ValueError(f"sizes holds {sizes.min()}, but a domain has 0 examples or more; pass 0 to leave one out.")
    return sizes


def _check_clients(clients: int, block: int, num_examples: int) -> None:
    if clients < 1:
        raise ValueError(f"clients is {clients}, but must be at least 1; pass a positive number of clients.")
    if clients > num_examples:
        raise ValueError(
            f"{clients} clients for {num_examples} examples, but every client needs one; "
            f"pass {num_examples} clients or fewer, or more examples."
        )
    if block < 1 or clients % block:
        raise ValueError(
            f"block is {block}, but must be at least 1 and divide the {clients} clients; "
            "pass the number of clients per station, or 1."
        )


def _checked_labels(labels: ArrayLike | None, label_alpha: float, num_examples: int) -> np.ndarray:
    """Labels as 0, 1, ... without gaps, so that every class has a positive share."""
    if not 0 < label_alpha < np.inf:  # written so that NaN fails too
        raise ValueError(
            f"label_alpha is {label_alpha}, but must be a positive finite number; pass None for no label skew."
        )
    if labels is None:
        raise ValueError(
            f"label_alpha is {label_alpha} without labels, but label skew needs them; pass labels, or label_alpha=None."
        )
    labels = _checked_ids("labels", labels)
    if len(labels) != num_examples:
        raise ValueError(
            f"{len(labels)} labels for {num_examples} examples, but every example needs one; pass labels in the order "
            "of domain."
        )
    return np.unique(labels, return_inverse=True)[1]
