"""Provides the name of every file in a run folder that Spanax opens, and a limit on its size."""

import re

from spanax.documents import MAX_BYTES, MAX_TOML_BYTES

UNBOUNDED = 1 << 62


class Name(str):
    """The name of a file relative to its folder, with `*` for a variable part, and the maximum number of bytes to read.

    Example:
      >>> Name("heartbeats/*.json", 1 << 16).of(3)
      'heartbeats/3.json'
    """

    max_bytes: int

    def __new__(cls, name: str, max_bytes: int) -> "Name":
        created = super().__new__(cls, name)
        created.max_bytes = max_bytes
        return created

    def of(self, value: object) -> "Name":
        """Returns the name with `*` replaced by a value."""
        return Name(self.replace("*", str(value)), self.max_bytes)

    def value(self, name: str) -> str | None:
        """Returns the part of a file name that matches `*`; None if the name does not match.

        Example:
          >>> HEARTBEAT.value("heartbeats/3.json"), HEARTBEAT.value("heartbeats/3.new")
          ('3', None)
        """
        match = re.fullmatch(re.escape(self).replace(r"\*", "([^/]*)"), name)
        return match[1] if match and match.groups() else None


CONFIG = Name("config.toml", MAX_TOML_BYTES)
PLAN = Name("plan.json", MAX_BYTES)
ENVIRONMENT = Name("env.json", 1 << 20)
METRICS = Name("metrics.jsonl", UNBOUNDED)
SAMPLES = Name("samples.jsonl", UNBOUNDED)

EVENTS = Name("events.jsonl", 1 << 22)
"""Of a larger file, the last events are read. In memory, an event takes up to 30 times the size of its line."""

LOCK = Name("LOCK", 1 << 10)
LEADER_LOCK = Name("LOCK.leader", 1 << 10)
RANK_LOCK = Name("LOCK.rank*", 1 << 10)
STEPS_LOCK = Name("LOCK.steps", 1 << 10)
"""In a folder of checkpoints, which may also be a run folder."""

HEARTBEAT = Name("heartbeats/*.json", 1 << 16)
RANK_LOG = Name("log/rank*.log", UNBOUNDED)
JOB_LOG = Name("log/slurm.log", UNBOUNDED)
JOB_SCRIPT = Name("job.sh", 1 << 20)
PROGRAM = Name("profile/step.hlo.pb", 1 << 31)
PROFILE_SUMMARY = Name("profile/summary.json", MAX_BYTES)
TRACE_FOLDER = "trace"
TRACE = Name(f"profile/{TRACE_FOLDER}/*", UNBOUNDED)
EVENT_FILE = Name("tensorboard/events.out.tfevents.*", UNBOUNDED)
WANDB_ID = Name("wandb/id", 1 << 6)
MODEL = Name("model.json", MAX_BYTES)

MODEL_FILE_BYTES = 1 << 28
"""Limit for files that accompany weights; the largest tokenizers have a tenth of that."""

TOKENIZER = Name("tokenizer.json", MODEL_FILE_BYTES)
TOKENIZER_CONFIG = Name("tokenizer_config.json", MODEL_FILE_BYTES)

OF_TOKENIZER = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    *(
        Name(name, MODEL_FILE_BYTES)
        for name in (
            "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
            "chat_template.jinja",
        )
    ),
)  # fmt: skip
"""The files of a tokenizer; a run folder has the first."""

IMPORTED = (
    *(Name(name, MODEL_FILE_BYTES) for name in ("config.json", "generation_config.json")),
    *OF_TOKENIZER,
    *(Name(name, MODEL_FILE_BYTES) for name in ("preprocessor_config.json", "model.safetensors.index.json")),
)
"""The files that `spanax import` copies unchanged; the index of sharded weights is last."""

IN_RUN = (
    CONFIG, PLAN, ENVIRONMENT, METRICS, SAMPLES, EVENTS, LOCK, LEADER_LOCK, RANK_LOCK, HEARTBEAT, RANK_LOG, JOB_LOG,
    JOB_SCRIPT, PROGRAM, PROFILE_SUMMARY, TRACE, EVENT_FILE, WANDB_ID, MODEL, TOKENIZER,
)  # fmt: skip
"""The files of a run folder, without its checkpoints."""

MANIFEST = Name("manifest.json", MAX_BYTES)
META = Name("meta.json", MAX_BYTES)
PLACES = Name("arrays/state/_sharding", MAX_BYTES)
ARRAYS = Name("arrays/*", UNBOUNDED)

IN_STEP = (MANIFEST, META, PLAN, PLACES, ARRAYS)
"""The files of a step; Orbax and TensorStore write and read those below `arrays` by path."""

CHECKPOINTS = "checkpoints"
HEARTBEATS = "heartbeats"
LOGS = "log"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB = "wandb"

FOLDERS = (CHECKPOINTS, HEARTBEATS, LOGS, PROFILE, TENSORBOARD, WANDB)
"""The folders of a run folder."""

FILES = (
    *IN_RUN,
    Name(f"{CHECKPOINTS}/{STEPS_LOCK}", STEPS_LOCK.max_bytes),
    *(Name(f"{CHECKPOINTS}/*/{name}", name.max_bytes) for name in IN_STEP),
)
"""All files, relative to the run folder."""
