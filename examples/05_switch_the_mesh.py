"""Change the layout by one word: the numbers stay the same, and what a device holds does not.

Usage:
  python examples/05_switch_the_mesh.py
"""

import spanax
from spanax.models import gpt

spanax.simulate(8)

config = gpt.GPTConfig(vocab_size=256, seq_len=32, num_layers=2, num_heads=4, embed_dim=64)
workload = spanax.Workload(
    build=lambda rngs: gpt.GPT(config, rngs),
    batch=gpt.example_batch(batch_size=16, seq_len=32),
    loss=gpt.loss,
)
program = workload.trace(learning_rate=1e-3, num_steps=6)
for layout in ("data", "zero1", "fsdp", "fsdp+tensor+seq"):
    plan = spanax.plan(program, spanax.local(), layout=layout)
    run = spanax.start(program, plan, seed=0)
    for _, batch in zip(range(6), spanax.batches("python", plan, seed=0)):
        loss = float(run.step(batch)["loss"])
    print(f"{layout:16} {str(plan.mesh):16} {plan.state_bytes() / 2**10:7.1f} KiB a device, loss {loss:.5f}")
