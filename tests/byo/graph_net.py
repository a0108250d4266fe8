"""A graph network: messages by gather and segment_sum, vmapped over the graphs of a batch; a GRU as update."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NODES, EDGES, DIM = 8, 20, 32


class GraphNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Embed(10, DIM, rngs=rngs)
        self.message = nnx.Sequential(nnx.Linear(2 * DIM + 4, 64, rngs=rngs), nnx.relu, nnx.Linear(64, DIM, rngs=rngs))
        self.update = nnx.GRUCell(DIM, DIM, rngs=rngs)
        self.attend, self.readout = nnx.Linear(DIM, 1, rngs=rngs), nnx.Linear(DIM, 1, rngs=rngs)

    def one_graph(self, atoms, edges, senders, receivers):
        h = self.enter(atoms)
        for _ in range(2):
            messages = self.message(jnp.concatenate([h[senders], h[receivers], edges], axis=-1))
            incoming = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
            h, _ = self.update(h, incoming)
        scores = self.attend(h)[:, 0]
        return jnp.sum(jax.nn.softmax(scores)[:, None] * self.readout(h))

    def __call__(self, graphs):
        return jax.vmap(self.one_graph)(graphs["atoms"], graphs["edges"], graphs["senders"], graphs["receivers"])


build = GraphNet


def loss(model, batch):
    return jnp.mean(jnp.abs(model(batch["graphs"]) - batch["energy"]))


def batch(size):
    rng = np.random.default_rng(0)
    graphs = {
        "atoms": rng.integers(0, 10, (size, NODES)).astype(np.int32),
        "edges": rng.normal(size=(size, EDGES, 4)).astype(np.float32),
        "senders": rng.integers(0, NODES, (size, EDGES)).astype(np.int32),
        "receivers": rng.integers(0, NODES, (size, EDGES)).astype(np.int32),
    }
    return {"graphs": graphs, "energy": rng.normal(size=size).astype(np.float32)}
