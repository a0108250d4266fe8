"""Three dimensions: stages, copies of each of them for the batch, and each layer split in two.

Usage:
  python examples/10_three_dimensions.py
"""

import spanax
from spanax.models import gpt
from spanax.plan.plan import Schedule

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

config = gpt.GPTConfig(vocab_size=256, seq_len=32, num_layers=4, num_heads=4, embed_dim=64)
workload = spanax.Workload(
    build=lambda rngs: gpt.GPT(config, rngs),
    batch=gpt.example_batch(batch_size=16, seq_len=32),
    loss=gpt.loss,
)
program = workload.trace(learning_rate=1e-3, num_steps=6)  # nothing is allocated
schedule = Schedule(pipeline="zero-bubble", microbatches=4)
plan = spanax.plan(program, spanax.local(), layout="3d", schedule=schedule)
print(plan)

run = spanax.start(program, plan)
for _, batch in zip(range(6), spanax.batches("python", plan)):
    metrics = run.step(batch)
print(f"loss after {run.num_steps} steps: {float(metrics['loss']):.3f}")
