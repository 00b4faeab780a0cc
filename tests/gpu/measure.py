"""Host reads of offloaded gradients on this machine's GPU, unguarded and guarded: one JSON object on standard output.

    python -m tests.gpu.measure [--iterations 134] [--releases FOLDER ...]

Each iteration makes three reads of ``optimizer.accumulated_grads_in_cpu``, newest accumulator first, right after
non-boundary backwards (ZeRO-2, bf16, pinned, gradient_accumulation_steps 4, three layers of 2048 x 2048). A read is
wrong when the same read after a device synchronization gives another norm.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from tests.lab.group import Lab


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=134)
    parser.add_argument("--releases", nargs="*", default=[""], help="folders to put first on the path, '' for none")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: a CPU copies before Python goes on, so it cannot show this race", file=sys.stderr)
        return 2
    rows = []
    lab = Lab({"DS_ACCELERATOR": "cuda", "LAB_DEVICE": "cuda"})
    for folder in options.releases:
        version = lab.run(1, {"call": "race.version"}, python_path=folder, timeout=280)[0]["version"]
        for overlap in (False, True):
            for name, guarded in (
                ("without", False),
                ("event", {"guards": [{"name": "host_read", "wait": "event"}]}),
                ("stream", {"guards": [{"name": "host_read", "wait": "stream"}]}),
                ("device", {"guards": [{"name": "host_read", "wait": "device"}]}),
            ):
                case = {"call": "race.host_reads", "guarded": guarded, "iterations": options.iterations}
                answer = lab.run(1, {**case, "overlap_comm": overlap}, python_path=folder, timeout=280)[0]
                row = {"deepspeed": version, "overlap_comm": overlap, "arm": name}
                rows.append(
                    {**row, "reads": answer.get("reads"), "wrong": answer.get("wrong"), "error": answer.get("error")}
                )
                print(row, answer.get("wrong"), "of", answer.get("reads"), answer.get("error") or "", file=sys.stderr)
        lab.close()
    print(json.dumps({"scenario": "host-read", "environment": environment(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
