"""The work of ``round.py`` as one would write it in PyTorch: a loop over stations and their clients, then the server's step.

Not run by itself. What makes it quick is in it: data in memory, as floats in the network's layout; channels last, which
oneDNN's small convolutions prefer (15 % here); pooling before ReLU; one shuffle a client instead of a gather a batch; parts
of the server's step skipped where no filter moves. Left out: ``torch.compile``, which needs a C++ compiler.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

from scipy.optimize import linear_sum_assignment

torch = importlib.import_module("torch")
nn = torch.nn

Tensors = list[Any]
BATCH, RATE, MOMENTUM = 32, 0.05, 0.9
ALPHA, RIDGE = 0.75, 1e-6
CONV1, CONV2, DENSE1 = 0, 2, 4  # places of the kernels among the parameters, each before its bias


def network(classes: int) -> Any:
    """LeNet-5 for 32 x 32 images."""
    layers = (
        *(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


# --- clients and stations -------------------------------------------------------------------------------------------


def train(net: Any, start: Tensors, images: Any, labels: Any) -> Tensors:
    """One epoch of a client, from the parameters ``start``: its own."""
    parameters = list(net.parameters())
    with torch.no_grad():
        for own, given in zip(parameters, start):
            own.copy_(given)
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    order = torch.randperm(len(labels))
    for x, y in zip(images[order].split(BATCH), labels[order].split(BATCH)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [x.detach().clone() for x in parameters]


@torch.no_grad()
def grams(net: Any, images: Any) -> list[Tensors]:
    """Per dense layer, of what it reads: Gram, sum of rows, number of rows."""
    x, found = images, []
    for layer in net:
        if isinstance(layer, nn.Linear):
            found.append([x.T @ x, x.sum(0), torch.tensor(float(len(x)))])
        x = layer(x)
    return found


def station(net: Any, start: Tensors, images: Any, labels: Any, rule: str) -> list[Tensors]:
    """A station's round: the mean of its clients' models and, for HFedATM, the sums of their Grams."""
    models, statistics = [], []
    for x, y in zip(images, labels):
        models.append(train(net, start, x, y))
        if rule == "hfedatm":
            statistics.append(grams(net, x))
    merged = mean(models, [len(y) for y in labels])
    return [merged, *([sum(parts) for parts in zip(*layer)] for layer in zip(*statistics))]


def mean(models: list[Tensors], weights: list[int]) -> Tensors:
    """The weighted mean of models."""
    shares = [w / sum(weights) for w in weights]
    return [sum(share * x for share, x in zip(shares, each)) for each in zip(*models)]


# --- the server -----------------------------------------------------------------------------------------------------


def server(rule: str, start: Tensors, stations: list[list[Tensors]], weights: list[int]) -> Tensors:
    """The new global model: ``mean``, or ``hfedatm`` with the filter order of ``start``."""
    if rule == "mean":
        return mean([model for model, *_ in stations], weights)
    aligned = [align(start, model, statistics) for model, *statistics in stations]
    models = [model for model, _ in aligned]
    merged = mean(models, weights)
    for number in range(len(aligned[0][1])):
        place = DENSE1 + 2 * number
        kernels, biases = ([model[i] for model in models] for i in (place, place + 1))
        layer = [statistics[number] for _, statistics in aligned]
        merged[place], merged[place + 1] = regmean(merged[place], kernels, biases, layer)
    return merged


def align(reference: Tensors, model: Tensors, statistics: list[Tensors]) -> tuple[Tensors, list[Tensors]]:
    """A model with its filters in the order of a reference's, and the Grams of its dense layers in that order."""
    model, statistics = list(model), list(statistics)
    for place in (CONV1, CONV2):
        order = match(reference[place], model[place])
        if torch.equal(order, torch.arange(len(order))):
            continue
        model[place], model[place + 1] = model[place][order], model[place + 1][order]
        if place == CONV1:
            model[CONV2] = model[CONV2][:, order]
            continue
        gram, total, rows = statistics[0]
        inputs = torch.arange(len(total)).view(len(order), -1)[order].flatten()  # the flatten keeps a filter together
        model[DENSE1] = model[DENSE1][:, inputs]
        statistics[0] = [gram[inputs][:, inputs], total[inputs], rows]
    return model, statistics


def match(reference: Any, kernel: Any) -> Any:
    """The order of filters of least cost 1 - cos to the reference's."""
    one, other = (nn.functional.normalize(x.flatten(1), dim=1) for x in (reference, kernel))
    return torch.as_tensor(linear_sum_assignment((1 - one @ other.T).numpy())[1])


def regmean(average: Any, kernels: Tensors, biases: Tensors, statistics: list[Tensors]) -> tuple[Any, Any]:
    """Kernel [o, d] and bias [o] that answer as each layer does on its own inputs: with shrunken Grams G_e,
    (sum G_e + r I)(W - M) = sum G_e (W_e - M), M the average."""
    width = average.shape[1]
    matrix, target = average.new_zeros(width, width), average.new_zeros(average.shape[::-1])
    for kernel, (gram, _, _) in zip(kernels, statistics):
        shrunken = ALPHA * gram
        shrunken.diagonal().copy_(gram.diagonal())
        matrix += shrunken
        target += shrunken @ (kernel - average).T
    matrix.diagonal().add_(RIDGE * matrix.diagonal().mean())
    merged = average + torch.linalg.solve(matrix, target).T
    rows = sum(n for _, _, n in statistics)
    parts = zip(kernels, biases, statistics)
    return merged, sum(n * bias + (kernel - merged) @ total for kernel, bias, (_, total, n) in parts) / rows


# --- whole rounds, in one process or two ----------------------------------------------------------------------------


def some_stations(draw: Callable, classes: int, rule: str, threads: int, stations: range) -> Callable:
    """start -> what each of ``stations`` sends up. ``draw(stations)``: their images [s, C, N, H, W, 3] and labels."""
    torch.set_num_threads(threads)
    images, labels = (torch.from_numpy(x) for x in draw(stations))
    images, net = images.movedim(-1, -3), network(classes)  # a view: in memory, channels stay last
    return lambda start: [station(net, start, x, y, rule) for x, y in zip(images, labels)]


def other_half(pipe: Any, *work: Any) -> None:
    """The second process: for every model it gets, what its stations send up and its CPU seconds so far."""
    run = some_stations(*work)
    pipe.send("ready")
    while (start := pipe.recv()) is not None:
        found = run([torch.from_numpy(x) for x in start])
        pipe.send(([[[x.numpy() for x in part] for part in sent] for sent in found], time.process_time()))
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def work(
    draw: Callable, classes: int, rule: str, num_stations: int, clients: int, threads: int, processes: int
) -> tuple[Callable[[], float], Callable[[], float]]:
    """A round, which returns the CPU seconds of other processes, and an end, which returns their peak of memory."""
    torch.manual_seed(0)
    half = num_stations // processes
    model = [x.detach().clone() for x in network(classes).parameters()]
    pipe, busy = None, 0.0
    if processes == 2:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        told = (theirs, draw, classes, rule, threads, range(half, num_stations))
        context.Process(target=other_half, args=told, daemon=True).start()
        theirs.close()
        pipe.recv()
    run = some_stations(draw, classes, rule, threads, range(half))

    def step() -> float:
        nonlocal model, busy
        before = busy
        if pipe:
            pipe.send([x.numpy() for x in model])
        found = run(model)
        if pipe:
            theirs, busy = pipe.recv()
            found += [[[torch.from_numpy(x) for x in part] for part in sent] for sent in theirs]
        model = server(rule, model, found, [clients] * num_stations)
        if not all(x.isfinite().all() for x in model):
            raise FloatingPointError("The merged model is not finite.")
        return busy - before

    def end() -> float:
        if not pipe:
            return 0.0
        pipe.send(None)
        return pipe.recv()

    return step, end
