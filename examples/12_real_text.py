"""Real text: five kinds of language models learn Python's standard library, judged by files they never saw.

Usage:
  python examples/12_real_text.py                        # each model in its first layout, for a moment
  python examples/12_real_text.py --every --steps 2000   # each in every layout of the table, for as long as you like
"""

import argparse
from functools import partial

import numpy as np
import optax

import spanax
from spanax.models import gpt, llama, moe

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

SIZE = {"vocab_size": 256, "seq_len": 32, "num_layers": 2, "num_heads": 4, "embed_dim": 64}
GPT = gpt.GPTConfig(**SIZE)
LLAMA = llama.LlamaConfig(**SIZE, num_kv_heads=2, mlp_dim=192)
QWEN = llama.LlamaConfig(**SIZE, num_kv_heads=2, mlp_dim=192, qk_norm=True, tied_embeddings=True)
MOE = moe.MoEConfig(**SIZE, num_kv_heads=2, mlp_dim=64, num_experts=4)
DROPLESS = moe.MoEConfig(**SIZE, num_kv_heads=2, mlp_dim=64, num_experts=4, capacity_factor=None)

# What is built, its loss, and the layouts.
MODELS = {
    "GPT-2": (partial(gpt.GPT, GPT), gpt.loss, ["fsdp+tensor", "fsdp", "context", "pipeline"]),
    "Llama": (partial(llama.Llama, LLAMA), llama.loss, ["tensor+seq", "hsdp", "ring"]),
    "Qwen3": (partial(llama.Llama, QWEN), llama.loss, ["fsdp", "data+tensor"]),
    "MoE": (partial(moe.Mixtral, MOE), moe.loss, ["expert", "fsdp"]),
    "MoE-dropless": (partial(moe.Mixtral, DROPLESS), moe.loss, ["expert", "fsdp+tensor"]),
}

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", action="store_true", help="every layout, not the first alone")
args = parser.parse_args()

for name in args.models:
    build, loss, layouts = MODELS[name]
    batch = gpt.example_batch(batch_size=32, seq_len=32)
    program = spanax.trace(build=build, optimizer=optax.adamw(3e-3), batch=batch, loss=loss)
    for layout in layouts if args.every else layouts[:1]:
        plan = spanax.plan(program, spanax.local(), layout=layout)
        run = spanax.start(program, plan)
        for _, batch in zip(range(args.steps), spanax.batches("python", plan, epochs=None)):
            run.step(batch)
        held_out = spanax.batches("python", plan, split="validation", shuffle=False)
        found = np.mean([float(run.evaluate(batch)["loss"]) for _, batch in zip(range(4), held_out)])
        print(f"{name} under {layout}, {args.steps} steps; held out: {found / np.log(2):.2f} bits a character")
