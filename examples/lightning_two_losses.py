"""Two losses in Lightning's manual optimization: DeepSpeed ZeRO without and with zeroguard, beside plain PyTorch.

    python examples/lightning_two_losses.py

``TwoLosses`` is an ordinary LightningModule; ``ZeroGuardCallback()`` is all that zeroguard asks for. Everything runs on
one CPU rank, on the real Trainer and a real engine.
"""

from __future__ import annotations

import sys

import _lightning  # before the others: it sets up the process
import torch
from lightning.pytorch import LightningModule, Trainer

from zeroguard.integrations.lightning import ZeroGuardCallback


class TwoLosses(LightningModule):
    """Each loss gets a backward of its own over one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = _lightning.TwoHeads()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss_a, loss_b = self.net(batch)
        self.manual_backward(loss_a, retain_graph=True)
        self.manual_backward(loss_b)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=_lightning.LR)


callback = ZeroGuardCallback({"sinks": []}, summary=False)


def train(stage: int, offload: bool, guarded: bool) -> torch.nn.Module:
    """One fit."""
    model = TwoLosses()
    trainer = Trainer(
        # On GPUs: strategy="deepspeed_stage_2_offload"
        strategy=_lightning.TrainerOnCPU(config=_lightning.config(stage, offload), logging_level=40),
        callbacks=[callback] if guarded else [],
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle, and plain PyTorch has to see the same order
    )
    trainer.fit(model, torch.utils.data.DataLoader(_lightning.batches(), batch_size=None))  # type: ignore[arg-type]
    return model.net


if __name__ == "__main__":
    status = _lightning.compare(train)
    print(f"\nThe last run:\n{callback.summary()}")
    sys.exit(status)
