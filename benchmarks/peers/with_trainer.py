"""Hugging Face's Trainer over transformers' GPT-2, whose own loop is stopped behind each step until it is asked for."""

import argparse
import math
import os
import queue
import tempfile
import threading
from typing import Any

import numpy as np
import torch

from serve import serve
from shape import Shape, shape_of, with_shape
from with_torch import optimizer_of
from work_done import torch_flops

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def made(shape: Shape) -> Any:
    """transformers' GPT-2 with the numbers that all peers start from; its Conv1D keeps a matrix as (in, out)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    D, weights = shape.embed_dim, shape.weights()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.seq_len, n_embd=D, n_layer=shape.num_layers,
            n_head=shape.num_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip
    state = {"wte.weight": weights["embed"], "wpe.weight": weights["positions"]}
    state |= {"ln_f.weight": weights["norm_scale"], "ln_f.bias": weights["norm_bias"]}
    for i in range(shape.num_layers):
        here = {
            "ln_1.weight": weights["norm1_scale"][i], "ln_1.bias": weights["norm1_bias"][i],
            "ln_2.weight": weights["norm2_scale"][i], "ln_2.bias": weights["norm2_bias"][i],
            "attn.c_attn.weight": weights["qkv"][i].reshape(D, 3 * D),
            "attn.c_attn.bias": weights["qkv_bias"][i].reshape(-1),
            "attn.c_proj.weight": weights["out"][i].reshape(D, D), "attn.c_proj.bias": weights["out_bias"][i],
            "mlp.c_fc.weight": weights["up"][i], "mlp.c_fc.bias": weights["up_bias"][i],
            "mlp.c_proj.weight": weights["down"][i], "mlp.c_proj.bias": weights["down_bias"][i],
        }  # fmt: skip
        state |= {f"h.{i}.{name}": array for name, array in here.items()}
    model.transformer.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return model


class Examples(torch.utils.data.IterableDataset):
    """The rows of the batches that all peers take; the Trainer fetches a batch ahead."""

    def __init__(self, shape: Shape):
        self.shape = shape

    def __iter__(self) -> Any:
        for tokens_BT in self.shape.batches():
            for row_T in tokens_BT:
                ids = torch.from_numpy(row_T).long()
                # transformers shifts the labels by itself: it is given one more than it scores.
                yield {"input_ids": ids[:-1], "labels": ids[:-1], "shift_labels": ids[1:]}


def main() -> None:
    """Train with the Trainer."""
    parser = with_shape(argparse.ArgumentParser(description=__doc__))
    args = parser.parse_args()
    shape = shape_of(args)
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    asked = threading.Semaphore(0)
    losses: queue.Queue[float] = queue.Queue()
    model = made(shape)

    class Told(Trainer):
        """The Trainer, that takes a step when it is asked to, and hands over its loss."""

        def training_step(self, *step: Any, **more: Any) -> torch.Tensor:
            asked.acquire()
            self.last_loss = super().training_step(*step, **more)
            return self.last_loss

    class Behind(TrainerCallback):
        """Says when a step is over, its update included."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.put(trainer.last_loss.item())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=shape.batch_size, max_steps=10**6, logging_strategy="no",
            save_strategy="no", report_to=[], max_grad_norm=0.0, use_cpu=True, disable_tqdm=True,
            lr_scheduler_type="constant", dataloader_pin_memory=False, remove_unused_columns=False,
        )  # fmt: skip
        optimizers = (optimizer_of(shape, model), None)
        trainer = Told(model, arguments, train_dataset=Examples(shape), optimizers=optimizers, callbacks=[Behind()])
        threading.Thread(target=trainer.train, daemon=True).start()

        def take(_: np.ndarray) -> float:
            asked.release()
            return losses.get()

        count = sum(math.prod(parameter.shape) for parameter in model.parameters())
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}

        def work() -> float:
            ids = torch.from_numpy(next(shape.batches())).long()
            ids, next_ids = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            flops = torch_flops(lambda: model(ids, shift_labels=next_ids, labels=ids).loss.backward())
            model.zero_grad()  # the Trainer does so behind its steps, and would add to these
            return flops

        serve(shape, take, work, parameters=count, devices=1, versions=versions)
        # Its loop waits for a batch that never comes.
        os._exit(0)


if __name__ == "__main__":
    main()
