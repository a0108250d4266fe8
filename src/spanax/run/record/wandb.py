"""Weights & Biases: a tracker whose run goes on when ours does."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.documents import read_bytes
from spanax.run.record.trackers import WANDB, About

UPLOAD_SECONDS = 60.0
"""So long the end of a run waits for what is still to be sent; `wandb sync` sends the rest."""


@dataclass(eq=False)
class WeightsAndBiases:
    """A run of Weights & Biases: the same one when the run goes on. `WANDB_MODE=offline` keeps it in `wandb/`."""

    _run: Any = None
    _told: int = 0
    _last: int = 0

    def begin(self, about: About) -> None:
        """Steps that an attempt before told of are not told again: their numbers cannot be taken back."""
        import wandb

        folder = about.folder / WANDB
        folder.mkdir(exist_ok=True)
        before = _kept_id(folder / "id")
        self._told = max(about.reached, about.step) if before else 0
        self._run = wandb.init(
            id=before or _new_id(folder / "id"),
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


def _kept_id(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        found = re.fullmatch(r"[a-z0-9]{8,64}", read_bytes(path, max_bytes=64, follow_links=False).decode())
        return found[0] if found else None
    return None


def _new_id(path: Path) -> str:
    made = secrets.token_hex(8)
    path.unlink(missing_ok=True)
    with open(path, "x") as file:  # "x" follows no link
        file.write(made)
    return made
