"""What one arm of a scenario is told. No PyTorch is needed to say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GAS", "SCENARIOS", "Job", "Usual"]

#: Micro-batches a step of host-read, stage 2.
GAS = 4


@dataclass(frozen=True)
class Usual:
    """What --stage, --size and --offload are where they are not given."""

    stage: int
    offload: bool
    size: int
    small: int
    """The size where nothing can race."""


SCENARIOS = {
    "host-read": Usual(2, True, 4096, 256),
    "retained-graph": Usual(2, True, 64, 8),
    "inflight": Usual(3, False, 64, 64),
}


@dataclass(frozen=True)
class Job:
    """What one arm runs.

    Attributes:
        scenario: a key of :data:`SCENARIOS`.
        guarded: whether zeroguard is attached.
        iterations: how often.
        seed: of the first iteration.
        stage: ZeRO stage.
        size: width of a layer; 0 for the usual one.
        offload: whether the optimizer is in pinned host memory.
        widen: whether the window is made larger by a delay kernel.
        skip: iterations that another process has run before.
    """

    scenario: str
    guarded: bool
    iterations: int = 100
    seed: int = 0
    stage: int = 2
    size: int = 0
    offload: bool = True
    widen: bool = False
    skip: int = 0

    def config(self, gas: int, bf16: bool) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": False}
        if self.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 3 * self.size**2,
                "stage3_max_reuse_distance": 0,
            }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **({"bf16": {"enabled": True}} if bf16 else {}),
        }
