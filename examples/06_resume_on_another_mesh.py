"""Save on one mesh, go on on another: the same parameters, bit for bit, and the next example of the data.

Usage:
  python examples/06_resume_on_another_mesh.py
"""

import tempfile

import numpy as np

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

plan = spanax.plan(program, spanax.local(), layout="data+tensor", mesh="data=2,model=4")
run, data = spanax.start(program, plan), spanax.batches("python", plan)
for _ in range(3):
    run.step(next(data))
folder = tempfile.mkdtemp()
run.save(folder, data=data).wait()

plan = spanax.plan(program, spanax.local(), layout="fsdp+tensor", mesh="fsdp=4,model=2")
resumed = spanax.restore(program, plan, folder)
for path, array in run.params().items():
    np.testing.assert_array_equal(array, resumed.params()[path])
for _, batch in zip(range(3), spanax.batches("python", plan, position=resumed.position)):
    metrics = resumed.step(batch)
print(f"resumed at step 3, now at step {resumed.num_steps}: loss {float(metrics['loss']):.3f}")
