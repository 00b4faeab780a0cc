"""A process that closes one session after its process group is gone, and another one when the interpreter ends."""

from __future__ import annotations

import atexit
import importlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        import deepspeed

        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # for inference; takes long
        deepspeed.init_distributed("gloo")
        import zeroguard
        from tests.lab import idle, returned, snapshot
        from tests.lab import programs as lab

        guarded = []
        for _ in range(2):
            engine = lab.build(idle.Breaking(), lab.ds_config(3, False))[0]
            returned.train(engine)
            before = snapshot.engine(engine)
            session = zeroguard.guard(engine, returned.CONFIG, sinks=[lambda record: None])
            guarded.append((engine, session, before))
        dist.destroy_process_group()

    def close(name: str, engine: Any, session: Any, before: snapshot.Snapshot) -> None:
        session.close()
        left = sorted(snapshot.changed(before, snapshot.engine(engine)))
        print(f"{name}:", left, snapshot.ours(engine), flush=True)

    close("group gone", *guarded[0])
    atexit.register(close, "exit", *guarded[1])


if __name__ == "__main__":
    main()
