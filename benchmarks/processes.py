"""Measurements in processes of their own, ended when their time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIME_LIMIT_S = 300


def measured(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Any:
    """What a module of this package prints as its last line, in JSON.

    Args:
        module: Its name, such as "tracing". It is run with the arguments.
        *arguments: Of the command line.
        environment: What to add to the environment of this process.
    """
    finished = subprocess.run(  # which kills it when the time is over
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
        env=os.environ | dict(environment or {}),
    )
    if finished.returncode:
        raise RuntimeError(
            f"benchmarks.{module} failed with {arguments}: {finished.stderr[-1000:]}"
        )
    return json.loads(finished.stdout.splitlines()[-1])


def all_measured(
    module: str,
    arguments: Sequence[Sequence[str]],
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """`measured` for each of some command lines, two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        calls = [
            pool.submit(measured, module, *each, environment=environment)
            for each in arguments
        ]
        return [call.result() for call in calls]
