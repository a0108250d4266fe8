"""FSDP and tensor parallel together: the layout of choice once one layer is too large for one device.

Usage:
  python examples/04_two_dimensions.py
"""

import spanax
from spanax.models import gpt

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

config = gpt.GPTConfig(vocab_size=256, seq_len=32, num_layers=2, num_heads=4, embed_dim=64)
workload = spanax.Workload(
    build=lambda rngs: gpt.GPT(config, rngs),
    batch=gpt.example_batch(batch_size=16, seq_len=32),
    loss=gpt.loss,
)
program = workload.trace(learning_rate=1e-3, num_steps=6)  # nothing is allocated
plan = spanax.plan(program, spanax.local(), layout="fsdp+tensor", mesh={"fsdp": 4, "model": 2})
print(plan)

run = spanax.start(program, plan)
for _, batch in zip(range(6), spanax.batches("python", plan)):
    metrics = run.step(batch)
print(f"loss after {run.num_steps} steps: {float(metrics['loss']):.3f}")
