"""Flags of accelerate, torchrun, MaxText, Levanter, Hugging Face and Lightning: accepted, or answered with ours."""

import re

import pytest

from requested import flag_names
from spanax.commands.check import CheckCommand
from spanax.commands.launch import LAUNCHERS
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import UnknownNameError
from spanax.train.config import TrainConfig
from spanax.usage import OTHER_FLAGS, SAME_FLAGS, parse_flags

OF_OTHER_TOOLS = (
    """
--max-steps 5, --num-train-epochs 1, --max-epochs 1, --max-train-steps 5, --num-train-steps 5, --lr 1e-3,
--learning-rate 1e-3, --learning_rate 1e-3, --warmup-steps 5, --num-warmup-steps 5, --weight-decay 0.1,
--max-grad-norm 1, --gradient-clip-val 1, --optimizer adamw, --num-epochs 1, --eval-steps 5, --eval-interval 5,
--save-steps 5, --checkpoint-period 5, --logging-steps 5, --log-every-n-steps 5, --save-total-limit 2,
--ema-decay 0.99, --output-dir runs/a, --seed 1, --devices 8, --steps 5, --per-device-batch-size 8,
--per_device_batch_size 8, --per-device-train-batch-size 8, --batch-size 8, --train-batch-size 8,
--gradient-accumulation-steps 4, --accumulate-grad-batches 4, --mixed-precision bf16, --precision bf16-mixed, --bf16,
--fp16, --nproc-per-node 8, --nnodes 2, --num-nodes 2, --num-machines 2, --num-processes 8, --checkpoint-dir ckpt,
--resume-from ckpt, --resume-from-checkpoint ckpt, --ckpt-path ckpt, --run-name a, --base-output-directory out,
--default-root-dir out, --strategy fsdp, --accelerator gpu, --fsdp full_shard, --deepspeed z.json,
--tensor-parallel-size 2, --pipeline-parallel-size 2, --ici-fsdp-parallelism 8, --ici_tensor_parallelism 2,
--ici-data-parallelism 2, --ici-expert-parallelism 2, --dcn-data-parallelism 2, --dcn-fsdp-parallelism 2,
--optim adamw_torch, --lr-scheduler-type cosine, --warmup-ratio 0.1, --model-name-or-path gpt2, --model gpt2,
--train-file x.txt, --dataset x, --dataset-name x, --max-seq-length 64, --block-size 64, --max-target-length 64,
--gradient-checkpointing, --remat-policy full, --attn-implementation flash, --report-to wandb, --logger wandb,
--config-file a.toml
""".replace("\n", " ")
    .strip()
    .split(", ")
)


@pytest.mark.parametrize("command", OF_OTHER_TOOLS)
def test_a_flag_of_another_tool_is_accepted_or_answered(command: str) -> None:
    """Accepted with the value that was given, or refused with flags that exist."""
    known = {f"--{name.replace('_', '-')}" for name in flag_names(TrainConfig)} | {"--processes", "--hosts"}
    words = command.split()
    try:
        assert parse_flags(TrainConfig, "train", words) != TrainConfig()
    except UnknownNameError as error:
        named = set(re.findall(r"--[a-z][a-z-]+", str(error).partition("fix: ")[2]))
        assert named and named <= known and error.exit_code == 2
        assert words[0] not in known


def test_tables_of_flags_of_other_tools_have_no_flag_of_spanax() -> None:
    kinds = (TrainConfig, PlanCommand, CheckCommand, *(flags for flags, _ in LAUNCHERS.values()))
    flags = {name.replace("_", "-") for kind in kinds for name in flag_names(kind)}
    assert not flags & (SAME_FLAGS.keys() | OTHER_FLAGS.keys()) and not SAME_FLAGS.keys() & OTHER_FLAGS.keys()
    assert {*SAME_FLAGS.values()} <= flags
    tried = {command.split()[0].removeprefix("--").replace("_", "-") for command in OF_OTHER_TOOLS}
    assert not tried - flags - SAME_FLAGS.keys() - OTHER_FLAGS.keys()
