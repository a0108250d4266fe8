"""PPO's loss over trajectories: advantages by a scan backwards in time, two heads, running statistics, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

TIME, OBS, ACTIONS = 12, 8, 4


class ActorCritic(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Sequential(nnx.Linear(OBS, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 64, rngs=rngs), nnx.tanh)
        self.policy, self.value = nnx.Linear(64, ACTIONS, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)
        self.mean, self.count = nnx.BatchStat(jnp.zeros(OBS)), nnx.BatchStat(jnp.asarray(1e-4))

    def __call__(self, obs):
        h = self.body(obs - self.mean[...])
        return jax.nn.log_softmax(self.policy(h)), self.value(h)[..., 0]


build = ActorCritic


def advantages(rewards, values, dones):
    def back(carry, step):
        after, next_value = carry
        reward, value, done = step
        delta = reward + 0.99 * next_value * (1 - done) - value
        after = delta + 0.95 * 0.99 * (1 - done) * after
        return (after, value), after

    zeros = jnp.zeros(rewards.shape[1:])
    _, result = jax.lax.scan(back, (zeros, values[-1]), (rewards, values, dones), reverse=True)
    return result


def loss(model, batch):
    model.count[...] += len(batch["obs"])
    model.mean[...] += (batch["obs"].mean((0, 1)) - model.mean[...]) / model.count[...]
    log_probs, values = model(batch["obs"])
    taken = jnp.take_along_axis(log_probs, batch["actions"][..., None], axis=-1)[..., 0]
    by_time = lambda x: jnp.swapaxes(x, 0, 1)  # noqa: E731
    gained = advantages(*map(by_time, (batch["rewards"], jax.lax.stop_gradient(values), batch["dones"])))
    gained = by_time(gained)
    returns = gained + jax.lax.stop_gradient(values)
    gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    ratio = jnp.exp(taken - batch["old_log_probs"])
    policy = -jnp.minimum(ratio * gained, jnp.clip(ratio, 0.8, 1.2) * gained).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return policy + 0.5 * jnp.mean((values - returns) ** 2) - 0.01 * entropy, {"entropy": entropy}


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(size, TIME, OBS)).astype(np.float32),
        "actions": rng.integers(0, ACTIONS, (size, TIME)).astype(np.int32),
        "rewards": rng.normal(size=(size, TIME)).astype(np.float32),
        "dones": (rng.uniform(size=(size, TIME)) < 0.1).astype(np.float32),
        "old_log_probs": rng.normal(-1.4, 0.05, (size, TIME)).astype(np.float32),
    }
