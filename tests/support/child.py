"""A child process of the doctor's, played in this process: importing PyTorch anew takes a second and more."""

from __future__ import annotations

import contextlib
import io


def played(*arguments: str, seconds: float = 60.0) -> tuple[bool, str]:
    """As ark_torch.tools._probes.child with a script. test_doctor.py has real ones, too."""
    option, script = arguments
    if option != "-c":
        raise AssertionError(f"{arguments} is no script")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(script, {})
    return True, told.getvalue().strip()
