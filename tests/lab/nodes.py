"""A job on two machines, made of network namespaces with addresses of their own; run as a script, one of its ranks."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Nodes:
    """Two machines on one cable. Needs root and ``ip``; :meth:`why_not` says what is missing."""

    def __init__(self) -> None:
        number = os.getpid() % 65536
        self.names = [f"zg{number}{side}" for side in "ab"]
        self.links = [f"zgv{number}{side}" for side in "ab"]
        self.addresses = [f"10.{200 + number % 50}.{number // 256}.{end}" for end in (1, 2)]
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def stop(self) -> None:
        for name in self.names:
            # The agents and whatever ranks they have left; nothing else runs on these machines.
            inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in inside.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for agent in self.agents:
            agent.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # takes its link with it
        subprocess.run(["ip", "link", "del", self.links[0]], check=False, capture_output=True)

    @staticmethod
    def why_not() -> str:
        """Why this machine cannot be two; empty if it can."""
        if shutil.which("ip") is None:
            return "there is no program ip (iproute2)"
        name = f"zgtry{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
        if made.returncode:
            return f"network namespaces are not allowed here: {made.stderr.strip()}"
        ran = subprocess.run(["ip", "netns", "exec", name, "true"], check=False, capture_output=True, text=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        return f"network namespaces cannot be entered here: {ran.stderr.strip()}" if ran.returncode else ""

    def run(self, out: Path) -> None:
        """Start ``torchrun`` on both, with two ranks each, on this file."""
        for node, (name, link, address) in enumerate(zip(self.names, self.links, self.addresses, strict=True)):
            env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LAB_DEVICE": "cpu"}
            env.update(GLOO_SOCKET_IFNAME=link, LAB_OUT=str(out), LAB_TIMEOUT="5", PYTHONPATH=str(ROOT))
            command = [
                *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29400"),
                *("--rdzv-id=zeroguard", f"--local-addr={address}", f"--rdzv-conf=is_host={1 - node}", __file__),
            ]
            with (out / f"node-{node}.log").open("wb") as log:
                agent = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            self.agents.append(agent)

    def cut(self) -> None:
        """Take the cable out, at the second machine's end."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


# -- one rank --------------------------------------------------------------------------------------------------------


def main() -> None:
    import torch

    torch.set_num_threads(1)
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    import deepspeed

    comm = importlib.import_module("deepspeed.comm.torch")
    if hasattr(comm, "build_shm_op"):
        comm.build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    out = Path(os.environ["LAB_OUT"])
    answer: dict[str, Any] = {"stages": {}}
    for stage in (1, 2, 3):
        answer["stages"][stage] = _one_finding(stage, culprit=3)
    answer.update(_cut_off(out))
    path = out / f"rank-{dist.get_rank()}.json"
    path.with_suffix(".part").write_text(json.dumps(answer))
    path.with_suffix(".part").rename(path)
    os._exit(0)  # the process group cannot be taken down in order any more


def _one_finding(stage: int, culprit: int) -> dict[str, Any]:
    """Two healthy steps; in the third a guard on one rank has a finding, and so does one on another, a warning."""
    import torch
    import torch.distributed as dist

    import zeroguard
    from tests.lab import programs as lab
    from zeroguard import events as ev
    from zeroguard.guards.base import Guard, GuardModel

    class Planted(Guard):
        """Finds something on two ranks, in the third step."""

        name = "planted"
        Config = GuardModel

        def handlers(self) -> dict[type[ev.Event], Any]:
            return {ev.StepEnd: self._step}

        def _step(self, event: ev.StepEnd) -> Iterable[Any]:
            self.step, self.checks = event.step, self.checks + 1
            text = {"expected": "nothing", "seen": f"rank {self.rank}", "cause": "planted", "remedy": "none"}
            if event.step == 3 and self.rank in (1, culprit):
                yield self.finding("planted", "error" if self.rank == culprit else "warning", **text)

    torch.manual_seed(0)
    engine = lab.build(lab.TwoHeads(), lab.ds_config(stage, False))[0]
    said: dict[str, Any] = {"raised": "", "step": 0}
    session = None
    try:
        with zeroguard.guard(engine, {"sinks": []}) as session:
            session.watch(Planted(GuardModel(), session._backend))
            for step in range(5):
                said["step"] = step + 1
                one, two = lab.losses(engine, lab.batches(step)[1])
                engine.backward(one + two)
                engine.step()
    except zeroguard.GuardViolation as error:
        said.update(raised=type(error).__name__, ranks=list(error.ranks))
    assert session is not None
    said["report"] = [(f.rank, f.guard, f.severity, f.step) for f in session.all_findings()] if said["raised"] else None
    said["heartbeat"] = any("zeroguard" in one.name for one in __import__("threading").enumerate())
    lab.release(engine)
    dist.barrier()
    return said


def _cut_off(out: Path) -> dict[str, Any]:
    """Train until the cable is out."""
    import torch
    import torch.distributed as dist

    import zeroguard
    from tests.lab import lost
    from tests.lab import programs as lab

    torch.manual_seed(0)
    engine = lab.build(lost.Hooked(), lab.ds_config(2, False))[0]
    lost.hurry()
    said: dict[str, Any] = {"error": ""}
    began = time.monotonic()
    try:
        with zeroguard.guard(engine, {"sinks": []}) as session:
            for step in range(1000):
                began = time.monotonic()
                engine.backward(engine(lab.batches(step)[1]).pow(2).mean())
                engine.step()
                if step == 3 and dist.get_rank() == 0:
                    (out / "training").touch()
                time.sleep(0.02)
    except Exception as error:
        said.update(error=f"{type(error).__name__}: {error}", notes=getattr(error, "__notes__", []))
        said["findings"] = [finding.to_dict() for finding in session.findings]
        said["text"] = session.findings[-1].text() if session.findings else ""
    said["seconds"] = time.monotonic() - began
    return said


if __name__ == "__main__":
    main()
