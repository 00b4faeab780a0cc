"""One worker: set up the process group once, then run cases as they come."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import traceback
import warnings

warnings.filterwarnings("ignore")


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's variables without torchrun: DeepSpeed asks for them.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    backend = "gloo"
    if os.environ["LAB_DEVICE"] == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{os.environ['LAB_STORE']}", rank=rank, world_size=ranks)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    comm = importlib.import_module("deepspeed.comm.torch")  # not "import ... as": that gives PyTorch itself
    if hasattr(comm, "build_shm_op"):
        comm.build_shm_op = lambda: None  # compiled for inference only; 45 seconds saved
    deepspeed.init_distributed(backend)
    # A collection walks everything that was imported; DeepSpeed makes several an engine, the lab one a case.
    importlib.import_module("tests.lab.programs")
    gc.collect()
    gc.freeze()
    out = os.fdopen(int(os.environ["LAB_PIPE"]), "w")
    for line in sys.stdin:
        case = json.loads(line)
        module, name = case.pop("call").rsplit(".", 1)
        try:
            answer = getattr(importlib.import_module(f"tests.lab.{module}"), name)(**case)
        except BaseException as error:
            answer = {"status": "error", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            traceback.print_exc()
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
