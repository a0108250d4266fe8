"""Weights & Biases: a tracker whose run goes on when ours does."""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import WANDB, WANDB_ID
from spanax.run.record.trackers import RunInfo

UPLOAD_SECONDS = 60.0
"""So long the end of a run waits for what is still to be sent; `wandb sync` sends the rest."""


@dataclass(eq=False)
class WeightsAndBiases:
    """A run of Weights & Biases: the same one when the run goes on. `WANDB_MODE=offline` keeps it in `wandb/`."""

    _run: Any = None
    _told: int = 0
    _last: int = 0

    def begin(self, about: RunInfo) -> None:
        """Steps that an attempt before told of are not told again: their numbers cannot be taken back."""
        import wandb

        place = Folder.of(about.folder)
        place.make(WANDB).checked_path(may_link_inside=True)  # wandb itself opens files there by path
        before = _recorded_id(place)
        self._told = max(about.reached, about.step) if before else 0
        self._run = wandb.init(
            id=before or _new_id(place),
            resume="allow",
            dir=str(about.folder),
            project=os.environ.get("WANDB_PROJECT", "spanax"),
            name=os.environ.get("WANDB_NAME", about.folder.name),
            config={**about.settings, "plan": dict(about.summary)},
            allow_val_change=True,
            settings=wandb.Settings(console="off", finish_timeout=UPLOAD_SECONDS, login_timeout=UPLOAD_SECONDS),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of its history."""
        if step > self._told:
            self._last = step
            self._run.log(dict(values), step=step)

    def back(self, step: int) -> None:
        """Its history only grows: it goes on behind the last step told."""
        self._told = max(self._told, self._last)

    def end(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()


def _recorded_id(place: Folder) -> str | None:
    try:
        text = place.read(WANDB_ID).decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if re.fullmatch(r"[a-z0-9]{8,64}", text) else None


def _new_id(place: Folder) -> str:
    new_id = secrets.token_hex(8)
    place.replace(WANDB_ID, [new_id])
    return new_id
