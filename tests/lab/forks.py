"""Ranks that a case may kill or stop: one process imports everything once, then forks the ranks of each case, which
form a process group of their own and end with it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """The process that forks, started with the first case."""

    def __init__(self) -> None:
        self.proc: subprocess.Popen[bytes] | None = None
        self.pipe = -1
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the owner)

    def run(self, ranks: int, case: dict[str, Any], *, timeout: float = 4.0, seconds: float = 60.0) -> list[dict]:
        """One case on ``ranks`` new ranks, whose process group gives up after ``timeout`` seconds. Each rank's answer;
        ``{"status": "dead"}`` for one that was killed, stopped or not done within ``seconds``."""
        if self.proc is None:
            self._start()
        assert self.proc is not None
        assert self.proc.stdin is not None
        order = {"ranks": ranks, "timeout": timeout, "seconds": seconds, "case": case}
        self.proc.stdin.write((json.dumps(order) + "\n").encode())
        self.proc.stdin.flush()
        data = b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self.pipe], [], [], seconds + 60)
            chunk = os.read(self.pipe, 1 << 20) if ready else b""
            assert chunk, self.tail()
            data += chunk
        return json.loads(data)

    def _start(self) -> None:
        self.pipe, write = os.pipe()
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LAB_DEVICE": "cpu", "PYTHONPATH": path}
        env["LAB_PIPE"] = str(write)
        command = [sys.executable, "-m", "tests.lab.forks"]
        self.proc = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, pass_fds=[write], env=env, cwd=ROOT
        )
        os.close(write)

    def tail(self, size: int = 6000) -> str:
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - size))
        return self.log.read().decode(errors="replace")

    def stop(self) -> None:
        if self.proc is None:
            return
        assert self.proc.stdin is not None
        self.proc.stdin.close()  # it ends with its input
        self.proc.wait(30)
        os.close(self.pipe)
        self.proc = None


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    import deepspeed  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    comm = importlib.import_module("deepspeed.comm.torch")
    if hasattr(comm, "build_shm_op"):
        comm.build_shm_op = lambda: None
    importlib.import_module("tests.lab.programs")
    _import_all()
    out = os.fdopen(int(os.environ["LAB_PIPE"]), "w")
    for line in sys.stdin:
        out.write(json.dumps(_case(**json.loads(line))) + "\n")
        out.flush()


def _import_all() -> None:
    """What the first engine and the first session of a process import: here, once, not in each rank. A rank that does
    nothing else says what that is."""
    alone = _case(1, 30.0, 60.0, {"call": "forks.imported"})[0]
    for name in alone.get("modules", ()):
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def imported() -> dict[str, Any]:
    import zeroguard
    from tests.lab import programs as lab

    for stage in (1, 2, 3):
        engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, False))
        with zeroguard.guard(engine, {"sinks": []}):
            engine.backward(engine(lab.batches(0)[1])[0].sum())
            engine.step()
    return {"modules": list(sys.modules)}


def _case(ranks: int, timeout: float, seconds: float, case: dict[str, Any]) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids, pipes = [], []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _rank(rank, ranks, port, timeout, dict(case), write)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    deadline = time.monotonic() + seconds
    data = dict.fromkeys(pipes, b"")
    open_ = set(pipes)
    stopped: set[int] = set()
    while open_ - {pipes[i] for i in stopped} and time.monotonic() < deadline:
        for pipe in select.select(list(open_), [], [], 0.2)[0]:
            chunk = os.read(pipe, 1 << 20)
            data[pipe] += chunk
            if not chunk:
                open_.discard(pipe)
        stopped = {i for i, pid in enumerate(pids) if _state(pid) == "T"}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # not yet waited for, so the number is still theirs
        os.waitpid(pid, 0)
    for pipe in pipes:
        os.close(pipe)
    return [json.loads(data[pipe]) if data[pipe].endswith(b"\n") else {"status": "dead"} for pipe in pipes]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _rank(rank: int, ranks: int, port: int, timeout: float, case: dict[str, Any], pipe: int) -> None:
    answer: dict[str, Any]
    linger = case.pop("linger", 0)
    try:
        import deepspeed
        import torch.distributed as dist

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), LAB_TIMEOUT=str(timeout))
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        deepspeed.init_distributed("gloo")
        module, name = case.pop("call").rsplit(".", 1)
        answer = getattr(importlib.import_module(f"tests.lab.{module}"), name)(**case)
    except BaseException as error:
        trace = traceback.format_exc()
        answer = {"status": "error", "error": f"{type(error).__name__}: {error}", "trace": trace}
        print(trace, file=sys.stderr, flush=True)
    answer["threads"] = sorted(one.name for one in threading.enumerate())
    os.write(pipe, (json.dumps(answer) + "\n").encode())
    os.close(pipe)
    # While it does, the others time out in their collectives; once it is gone, they break.
    time.sleep(linger)
    os._exit(0)


if __name__ == "__main__":
    main()
