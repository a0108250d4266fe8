"""A tracker for Weights & Biases that resumes its run with the run folder."""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import WANDB, WANDB_ID
from spanax.train.record.trackers import RunInfo

UPLOAD_SECONDS = 60.0
"""How long the end of a run waits for uploads; `wandb sync` completes them later."""


@dataclass(eq=False)
class WeightsAndBiases:
    """Logs to Weights & Biases; a resumed run continues its W&B run. `WANDB_MODE=offline` stores it in `wandb/`."""

    _run: Any = None
    _logged: int = 0
    _last: int = 0

    def begin(self, about: RunInfo) -> None:
        """Starts or resumes the W&B run; steps logged by an earlier attempt cannot be changed and are skipped."""
        import wandb

        place = Folder.of(about.folder)
        place.make(WANDB).checked_path(may_link_inside=True)  # wandb itself opens files there by path
        before = _recorded_id(place)
        self._logged = max(about.reached, about.step) if before else 0
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
        """Logs one row of the history."""
        if step > self._logged:
            self._last = step
            self._run.log(dict(values), step=step)

    def back(self, step: int) -> None:
        """Skips repeated steps up to the last one logged, because the history is append-only."""
        self._logged = max(self._logged, self._last)

    def end(self) -> None:
        """Finishes the upload."""
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
