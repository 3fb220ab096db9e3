"""Weights & Biases, where the user asks for it. Nothing that happens there ends a run or keeps it waiting for long."""

from __future__ import annotations

import netrc
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONNECT = 10.0  # seconds that the start of an online run may take
FINISH = 60.0  # seconds that the last upload may take
VARIABLES = ("WANDB_MODE", "WANDB_PROJECT")  # set by a user who wants W&B


@dataclass(frozen=True)
class LogConfig:
    """Weights & Biases; the files in the run directory are always written.

    Attributes:
        wandb: true: log there too, with the previews; without an API key or a network it logs offline. none: only if
            WANDB_MODE or WANDB_PROJECT is set, and without the previews. false: never.
        project: its project.
        name: of the run there; empty: the name of the run directory.
    """

    wandb: bool | None = None
    project: str = "visgen"
    name: str = ""

    def wanted(self) -> bool:
        """Return whether to log there."""
        if os.environ.get("WANDB_MODE") == "disabled":
            return False
        return any(os.environ.get(name) for name in VARIABLES) if self.wandb is None else self.wandb


class Remote:
    """One W&B run, or nothing. After a first failure it is left alone.

    Attributes:
        line: where the run is, or why there is none; for the user.
    """

    def __init__(self, config: LogConfig, run: Path, values: Mapping[str, Any], job: str = "train") -> None:
        self.config, self.line = config, ""
        self.run: Any = None
        if not config.wanted():
            return
        try:
            self.run, self.line = _start(config, run, values, job)
        except ImportError:
            self.line = "W&B: wandb is not installed, so nothing is logged there (pip install wandb)"
        except Exception as error:  # a service has no list of what it raises
            self.line = f"warning: W&B cannot be used ({_short(error)}); the files of the run have everything"

    def log(self, values: Mapping[str, Any], step: int | None = None) -> str:
        """Log values; return a warning or ""."""
        return self.attempt(lambda run: run.log(dict(values), step=step))

    def image(self, name: str, path: Path, step: int) -> str:
        """Log a picture if the user asked for W&B in so many words; return a warning or ""."""

        def work(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(str(path))}, step=step)

        return self.attempt(work) if self.config.wandb else ""

    def finish(self) -> str:
        """Wait for the last upload, but not for long; return a warning or ""."""
        run, failed = self.run, list[Exception]()
        if run is None:
            return ""

        def work() -> None:
            try:
                run.finish()
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(FINISH)
        self.run = None
        if thread.is_alive():
            return f"warning: W&B has not finished in {FINISH:.0f} s; `wandb sync` uploads the rest"
        return f"warning: W&B has not finished ({_short(failed[0])})" if failed else ""

    def attempt(self, work: Callable[[Any], Any]) -> str:
        """Do `work` with the run, if there is one; return a warning or ""."""
        try:
            if self.run is not None:
                work(self.run)
        except Exception as error:
            self.run = None
            return f"warning: W&B failed ({_short(error)}); from here on only the run's own files are written"
        return ""


def _start(config: LogConfig, run: Path, values: Mapping[str, Any], job: str) -> tuple[Any, str]:
    """Return a W&B run that keeps its files in the run directory and its id over resumes, and where it is."""
    import wandb

    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        os.environ.setdefault(name, str(run.resolve()))
    identity = run / "wandb_id"
    if not identity.exists():
        identity.write_text(secrets.token_hex(4))
    project = config.project
    if project == LogConfig.project:
        project = os.environ.get("WANDB_PROJECT") or project

    def begin(mode: str) -> Any:
        return wandb.init(
            project=project,
            name=config.name or run.resolve().name,
            id=identity.read_text().strip() or None,
            resume=None if mode == "offline" else "allow",
            job_type=job,
            mode=mode,  # type: ignore[arg-type]
            config=dict(values),
            settings=wandb.Settings(silent=True, console="off", init_timeout=CONNECT),
        )

    mode, why = os.environ.get("WANDB_MODE") or "", "WANDB_MODE"
    if not mode:
        mode, why = ("online", "") if has_wandb_key() else ("offline", "no API key")
    if mode == "online":
        try:
            started = begin(mode)
            return started, f"W&B: {started.url or mode}"
        except Exception as error:
            mode, why = "offline", _short(error)
    where = run / "wandb"
    line = f"W&B: {mode} ({why})"
    if mode == "offline":
        line += f", files in {where}; `wandb sync {where}/offline-run-*` uploads them"
    return begin(mode), line


def has_wandb_key() -> bool:
    """Return whether WANDB_API_KEY or a netrc entry of the W&B server is there."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            path = Path(name or "").expanduser()  # RuntimeError: no home
            if name and path.is_file() and netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError, RuntimeError, UnicodeError):  # wandb itself reports a damaged netrc
            continue
    return False


def _short(error: Exception) -> str:
    """Return the kind of an error and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
