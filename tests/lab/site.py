"""Installs the tests' own distributions, as a user would, into a folder to put on the path."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def install(folder: Path, *names: str) -> Path:
    """The folder with the distributions in it that lie under tests/ by these names."""
    # Copies: setuptools builds in the source tree.
    sources = [shutil.copytree(TESTS / name, folder / "sources" / name) for name in names]
    target = folder / "target"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), *map(str, sources)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return target
