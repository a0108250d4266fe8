"""Tokens per second of the derived decode step, beside a hand-written cache and recomputation, interleaved in one run.

python benchmarks/decoding.py [--length 1024] [--batch-size 4]
python benchmarks/decoding.py --models     # the models of the tests, beside recomputation
python benchmarks/decoding.py --published  # predicted steps beside measured ones
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import spanax
from spanax.decoding.programs import generation_programs
from spanax.models import llama
from spanax.models.workloads import load
from spanax.plan.advice.generation import generation_plan

PUBLISHED = {
    ("llama3-8b", 1): 93.83, ("llama3-8b", 2): 149.10, ("llama3-8b", 4): 217.21, ("llama3-8b", 8): 276.01,
    ("llama3-70b", 2): 16.03, ("llama3-70b", 4): 37.45, ("llama3-70b", 8): 58.78,
}  # fmt: skip
"""Tokens per second of one sequence with a short prompt, by model and number of A100-80GB that share each layer.

Source: meta-pytorch/gpt-fast, README.md, "Tensor Parallelism"; bfloat16, power limited to 330 W.
"""

TESTS = Path(__file__).resolve().parent.parent / "tests"


def written_by_hand(model: llama.Llama, length: int, batch_size: int):
    """Returns a decode step of Llama with a cache, and an empty cache, as one would write them in JAX."""
    config = model.config
    head = config.embed_dim // config.num_heads

    def norm(scale, x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def rotated(x, positions):
        angles = positions[:, None] * config.rope_theta ** (-jnp.arange(head // 2) * 2 / head)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    @partial(jax.jit, donate_argnums=1)
    def step(weights, cache, token, positions):
        x = weights["embed"][token]
        rows = jnp.arange(batch_size)

        def layer(carry, scanned):
            x, keys, values = carry
            index, w = scanned
            h = norm(w["attention_norm"], x)
            q = rotated(jnp.einsum("bd,dhk->bhk", h, w["query"]), positions)
            k = rotated(jnp.einsum("bd,dhk->bhk", h, w["key"]), positions)
            v = jnp.einsum("bd,dhk->bhk", h, w["value"])
            keys = keys.at[rows, index, positions].set(k)
            values = values.at[rows, index, positions].set(v)
            q = q.reshape(batch_size, config.num_kv_heads, -1, head)
            scores = jnp.einsum("bhgk,bshk->bhgs", q, keys[:, index]) / head**0.5
            scores = jnp.where((jnp.arange(length) <= positions[:, None])[:, None, None], scores, -jnp.inf)
            out = jnp.einsum("bhgs,bshk->bhgk", jax.nn.softmax(scores), values[:, index])
            x = x + jnp.einsum("bhk,hkd->bd", out.reshape(batch_size, -1, head), w["out"])
            h = norm(w["mlp_norm"], x)
            x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
            return (x, keys, values), None

        (x, keys, values), _ = jax.lax.scan(layer, (x, *cache), (jnp.arange(config.num_layers), weights["layers"]))
        return norm(weights["norm"], x) @ weights["head"], (keys, values)

    shape = batch_size, config.num_layers, length, config.num_kv_heads, head
    return step, lambda: (jnp.zeros(shape), jnp.zeros(shape))


def weights_of(model: llama.Llama) -> dict:
    """Returns the arrays of a Llama by the names of `written_by_hand`."""
    blocks = nnx.to_flat_state(nnx.state(model.blocks))
    by_path = {".".join(map(str, path)): value[...] for path, value in blocks}
    names = {
        "attention_norm": "attention_norm.scale", "query": "attention.q.kernel", "key": "attention.k.kernel",
        "value": "attention.v.kernel", "out": "attention.out.kernel", "mlp_norm": "mlp_norm.scale",
        "gate": "mlp.gate.kernel", "up": "mlp.up.kernel", "down": "mlp.down.kernel",
    }  # fmt: skip
    layers = {name: next(value for path, value in by_path.items() if path.endswith(end)) for name, end in names.items()}
    head = model.head.kernel[...]
    return {"embed": model.embed[...], "layers": layers, "norm": model.norm.scale[...], "head": head}


def of_llama(length: int, batch_size: int, rounds: int) -> dict:
    """Returns the tokens per second of a Llama with a derived cache, with one by hand, and recomputed."""
    config = llama.LlamaConfig(4096, length, 8, 8, 4, embed_dim=512, mlp_dim=1536)
    model = llama.Llama(config, nnx.Rngs(0))
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (batch_size, length), 0, 4096))
    first = length - 64
    start = time.perf_counter()
    decoder = spanax.decode(model, length=length)
    logits, cache = decoder.prefill(tokens, np.full(batch_size, first))
    prefill_seconds = time.perf_counter() - start
    by_hand, empty = written_by_hand(model, length, batch_size)
    weights = weights_of(model)
    written = empty()
    for position in range(first):
        token = jnp.asarray(tokens[:, position])
        expected, written = by_hand(weights, written, token, jnp.full(batch_size, position))
    difference = float(abs(expected - logits).max())
    recompute = nnx.jit(lambda model, tokens: model(tokens)[:, -1])
    parameters = decoder.parameters()
    step = jax.jit(decoder.stepped, static_argnums=0, donate_argnums=2)
    arrays = cache.arrays
    seconds: dict[str, list[float]] = {"derived": [], "by_hand": [], "recomputed": []}
    for turn in range(rounds + 1):
        start = time.perf_counter()
        for position in range(first, first + 8):
            token = jnp.asarray(tokens[:, position])
            logits, arrays = step(cache.form, parameters, arrays, [token], jnp.full(batch_size, position))
        jax.block_until_ready(logits)
        middle = time.perf_counter()
        for position in range(first, first + 8):
            token = jnp.asarray(tokens[:, position])
            expected, written = by_hand(weights, written, token, jnp.full(batch_size, position))
        jax.block_until_ready(expected)
        end = time.perf_counter()
        jax.block_until_ready(recompute(model, tokens))
        last = time.perf_counter()
        if turn:  # the first one compiles
            seconds["derived"].append((middle - start) / 8)
            seconds["by_hand"].append((end - middle) / 8)
            seconds["recomputed"].append(last - end)
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "tokens_per_s": {name: round(batch_size / value, 1) for name, value in median.items()},
        "derived_to_by_hand": round(median["by_hand"] / median["derived"], 2),
        "derived_to_recomputed": round(median["recomputed"] / median["derived"], 1),
        "difference": difference,
        "derive_compare_compile_s": round(prefill_seconds, 1),
        "cache_bytes": cache.num_bytes,
    }


def of_models(length: int, rounds: int) -> list[dict]:
    """Returns how much faster the derived step of each causal model of the tests is than its forward pass."""
    sys.path += [str(TESTS)]
    from causal import CAUSAL

    rows = []
    for name, case in CAUSAL.items():
        if case.per_token or case.length < 32:
            continue
        model = case.build(nnx.Rngs(0))
        call = case.call or (lambda model, tokens: model(tokens))
        tokens = np.random.default_rng(0).integers(1, 16, (2, length)).astype(np.int32)
        try:
            decoder = spanax.decode(model, case.call, length=length)
            _, cache = decoder.prefill(tokens, np.full(2, length - 32), **case.inputs)
        except spanax.SpanaxError:  # it has fewer positions
            continue
        model.eval()
        forward = nnx.jit(call)
        parameters = decoder.parameters()
        step = jax.jit(decoder.stepped, static_argnums=0, donate_argnums=2)
        ratios = []
        arrays = cache.arrays
        for turn in range(rounds + 1):
            start = time.perf_counter()
            for position in range(length - 32, length - 24):
                token = jnp.asarray(tokens[:, position])
                logits, arrays = step(cache.form, parameters, arrays, [token], jnp.full(2, position))
            jax.block_until_ready(logits)
            middle = time.perf_counter()
            jax.block_until_ready(forward(model, tokens, **case.inputs))
            if turn:
                ratios.append(8 * (time.perf_counter() - middle) / (middle - start))
        rows.append(
            {
                "model": name,
                "ratio": round(float(np.median(ratios)), 1),
                "cache_bytes_per_token": cache.num_bytes // (2 * length),
                "recomputed_lines": len(decoder.recomputed),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def of_published() -> list[tuple[str, ...]]:
    """Returns the predicted tokens per second beside `PUBLISHED`."""
    programs = {
        name: generation_programs(load(name, batch_size=1, seq_len=256), "bfloat16") for name, _ in sorted(PUBLISHED)
    }
    rows = []
    for (name, count), measured in PUBLISHED.items():
        cluster = spanax.cluster(f"a100-80gb:{count}")
        best = generation_plan(programs[name], cluster, mesh=f"model={count}" if count > 1 else None).best
        predicted = 1 / best.step.step_seconds
        rows.append((name, f"{count}", f"{measured:.1f}", f"{predicted:.1f}", f"{measured / predicted:.2f}"))
    return rows


def main() -> None:
    """Prints a table of Markdown with `--models` or `--published`, else the figures of Llama as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--published", action="store_true")
    args = parser.parse_args()
    if args.published:
        print("| model | A100s | measured tokens/s | predicted | step time / measured |\n|---|---|---|---|---|")
        print("\n".join(f"| {' | '.join(row)} |" for row in of_published()))
        return
    if not args.models:
        print(json.dumps(of_llama(args.length, args.batch_size, args.rounds), indent=2))
        return
    rows = of_models(args.length, args.rounds)
    print("| model | times recomputation | bytes per token | lines for all positions |\n|---|---|---|---|")
    for row in rows:
        cells = row["model"], row["ratio"], row["cache_bytes_per_token"], row["recomputed_lines"]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
