"""PyTorch's side of ``text.py``: RoBERTa and BERT with a classifier on the first token, trained as a client does.

What one writes in PyTorch: ``nn.Linear``, ``nn.Embedding``, ``scaled_dot_product_attention``, optimizers in their fused
form, ``torch.utils.checkpoint`` a layer for ``remat``. Names of parameters are ours with dots, so weights pass over as they
are. Left out: ``torch.compile``, which needs a C++ compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

torch = importlib.import_module("torch")
nn, F = torch.nn, torch.nn.functional
checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint

OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, fused=True),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9, fused=True),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, rate, fused=True),
}


class Layer(nn.Module):
    """h = norm(x + attention(x)); norm(h + MLP(h))."""

    def __init__(self, config: Any, dropout: float):
        super().__init__()
        width, self.heads, self.dropout = config.hidden_size, config.num_attention_heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.intermediate = nn.Linear(width, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any, there: Any) -> Any:
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        chance = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, there[:, None, None, :], chance)
        h = self.attention_norm(x + self.drop(self.attention_output(attended.transpose(1, 2).flatten(2))))
        return self.output_norm(h + self.drop(self.output(F.gelu(self.intermediate(h)))))


class Embeddings(nn.Module):
    """Of a token, its position and type 0."""

    def __init__(self, config: Any, dropout: float):
        super().__init__()
        self.pad = config.pad_token_id if config.model_type == "roberta" else None
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: Any) -> Any:
        if self.pad is None:
            places = torch.arange(ids.shape[1])
        else:
            real = (ids != self.pad).long()
            places = real.cumsum(1) * real + self.pad
        return self.drop(self.norm(self.word(ids) + self.position(places) + self.token_type.weight[0]))


class Encoder(nn.Module):
    """Embeddings and layers."""

    def __init__(self, config: Any, dropout: float, remat: bool):
        super().__init__()
        self.embeddings, self.layers, self.remat = Embeddings(config, dropout), [], remat
        for i in range(config.num_hidden_layers):
            layer = Layer(config, dropout)
            self.layers.append(layer)
            self.add_module(f"layer_{i}", layer)

    def forward(self, ids: Any, there: Any) -> Any:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, there, use_reentrant=False) if self.remat else layer(x, there)
        return x


class Classifier(nn.Module):
    """A dense layer and a head on the first token; RoBERTa drops out before the first of them too."""

    def __init__(self, config: Any, classes: int, dropout: float, remat: bool):
        super().__init__()
        self.encoder = Encoder(config, dropout, remat)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, classes)
        self.drop = nn.Dropout(dropout)
        self.first_drop = nn.Dropout(dropout if config.model_type == "roberta" else 0.0)

    def forward(self, ids: Any, there: Any) -> Any:
        first = self.first_drop(self.encoder(ids, there)[:, 0])
        return self.head(self.drop(torch.tanh(self.dense(first))))


def network(config: Any, classes: int, dropout: float, remat: bool, leaves: Mapping[str, np.ndarray]) -> Any:
    """A classifier with our weights: ``leaves`` by their names (``params/dense/kernel``)."""
    net = Classifier(config, classes, dropout, remat)
    last = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
    state = {}
    for name, x in leaves.items():
        _, *layer, kind = name.split("/")
        state[".".join([*layer, last[kind]])] = torch.tensor(x.T if kind == "kernel" else x)
    net.load_state_dict(state)
    return net


def logits(net: Any, ids: np.ndarray, there: np.ndarray) -> np.ndarray:
    """In evaluation mode."""
    net.eval()
    with torch.no_grad():
        return net(torch.tensor(ids).long(), torch.tensor(there)).numpy()


def training(
    net: Any, optimizer: str, rate: float, batch: int, ids: np.ndarray, there: np.ndarray, labels: np.ndarray
) -> Callable[[int], float]:
    """One pass of a client over its examples, from the parameters that the network has now: of a number of threads, the
    last loss."""
    parameters = list(net.parameters())
    start = [x.detach().clone() for x in parameters]
    ids, there, labels = torch.tensor(ids).long(), torch.tensor(there), torch.tensor(labels).long()

    def run(threads: int) -> float:
        torch.set_num_threads(threads)
        net.train()
        with torch.no_grad():
            for own, given in zip(parameters, start):
                own.copy_(given)
        descent, loss = OPTIMIZERS[optimizer](parameters, rate), None
        for rows in torch.randperm(len(labels)).split(batch):
            descent.zero_grad()
            loss = F.cross_entropy(net(ids[rows], there[rows]), labels[rows])
            loss.backward()
            descent.step()
        assert loss is not None
        return loss.item()

    return run
