"""Hugging Face's Trainer with zeroguard: one right training_step, and one that steps twice a batch without a word.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node=1 examples/transformers_trainer.py

On GPUs leave DS_ACCELERATOR away and give torchrun as many processes as there are GPUs. Nothing is downloaded: the
model is a tiny GPT-2 with random weights.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout that is not installed

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from zeroguard.integrations.transformers import ZeroGuardTrainerCallback

if os.environ.get("DS_ACCELERATOR") == "cpu":
    # Else DeepSpeed compiles an operator that only inference uses; that takes 45 seconds.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


class Summed(Trainer):
    """Two losses, one backward."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        out = model(**self._prepare_inputs(inputs))
        loss = out.loss + 1e-3 * out.logits.pow(2).mean()
        self.accelerator.backward(loss, scale_wrt_gas=False)
        return loss.detach()


class Twice(Trainer):
    """The same two losses, a backward each: accelerator.backward steps, so each batch moves the weights twice."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        out = model(**self._prepare_inputs(inputs))
        self.accelerator.backward(out.loss, retain_graph=True, scale_wrt_gas=False)
        self.accelerator.backward(1e-3 * out.logits.pow(2).mean(), scale_wrt_gas=False)
        return out.loss.detach()


def main() -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    settings = {"deepspeed": DEEPSPEED, "max_steps": 4, "logging_steps": 2, "save_strategy": "no", "report_to": []}
    for kind in (Summed, Twice):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, **settings)
            trainer = kind(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data)
            # on_violation="raise" is the default: training stops at the end of the step with the finding.
            with ZeroGuardTrainerCallback(on_violation="record", grad_norm=True).attach(trainer) as guarded:
                trainer.train()
        if trainer.is_world_process_zero():
            steps, engine_steps = trainer.state.global_step, trainer.model_wrapped.global_steps
            print(f"\n{kind.__name__}: {steps} steps of the Trainer, {engine_steps} of the engine")
            print(guarded.summary(), *guarded.session, sep="\n")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
