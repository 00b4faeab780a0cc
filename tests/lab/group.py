"""A group of worker processes, one a rank, that are reused between cases: a process start costs seconds, a case does
not.

Each worker reads a case (a JSON object) from its standard input and answers with one JSON line on a pipe of its own,
so that what DeepSpeed prints gets in nobody's way.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Group:
    """``ranks`` workers. ``python_path`` is put first on their path, to test another DeepSpeed release."""

    def __init__(self, ranks: int, *, python_path: str = "", env: dict[str, str] | None = None) -> None:
        self.ranks = ranks
        self.python_path = python_path
        self.env = env or {}
        self.procs: list[subprocess.Popen[bytes]] = []
        self.pipes: list[int] = []
        self.store = ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the group's owner)

    def start(self) -> None:
        self.store = tempfile.mktemp(prefix="zeroguard-store-")
        for rank in range(self.ranks):
            read, write = os.pipe()
            path = os.pathsep.join(p for p in (self.python_path, str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
            env = {
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "LAB_DEVICE": "cpu",
                **self.env,
                "PYTHONPATH": path,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "LAB_STORE": self.store,
                "LAB_PIPE": str(write),
            }
            self.procs.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.lab.child"],
                    stdin=subprocess.PIPE,
                    stdout=self.log,
                    stderr=self.log,
                    pass_fds=[write],
                    env=env,
                    cwd=ROOT,
                )
            )
            os.close(write)
            self.pipes.append(read)

    def run(self, case: dict[str, Any], timeout: float = 90.0) -> list[dict[str, Any]]:
        """Run one case on all ranks; returns each rank's answer. A rank that dies or hangs answers with ``status:
        dead``."""
        if not self.procs:
            self.start()
        line = (json.dumps(case) + "\n").encode()
        answers: list[dict[str, Any]] = []
        try:
            for proc in self.procs:
                assert proc.stdin is not None
                proc.stdin.write(line)
                proc.stdin.flush()
            deadline = time.monotonic() + timeout
            answers = [self._answer(pipe, deadline) for pipe in self.pipes]
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            text = self.tail()
            self.stop()
            return [
                {"status": "dead", "error": f"{type(error).__name__}: {error}", "log": text} for _ in range(self.ranks)
            ]
        return answers

    @staticmethod
    def _answer(pipe: int, deadline: float) -> dict[str, Any]:
        data = b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("no answer in time")
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                raise EOFError("the worker ended")
            data += chunk
        return json.loads(data)

    def tail(self, size: int = 4000) -> str:
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - size))
        return self.log.read().decode(errors="replace")

    def stop(self) -> None:
        for proc in self.procs:
            proc.kill()
        for proc in self.procs:
            proc.wait()
            if proc.stdin is not None:
                proc.stdin.close()
        for pipe in self.pipes:
            os.close(pipe)
        self.procs, self.pipes = [], []
        Path(self.store).unlink(missing_ok=True)


class Lab:
    """Groups by number of ranks and path, started when first needed."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self.groups: dict[Any, Group] = {}
        self.env = env or {}

    def run(self, ranks: int, case: dict[str, Any], *, python_path: str = "", **kwargs: Any) -> list[dict[str, Any]]:
        key = (ranks, python_path)
        if key not in self.groups:
            self.groups[key] = Group(ranks, python_path=python_path, env=self.env)
        return self.groups[key].run(case, **kwargs)

    def close(self, keys: Sequence[Any] | None = None) -> None:
        for key in list(self.groups if keys is None else keys):
            self.groups.pop(key).stop()
