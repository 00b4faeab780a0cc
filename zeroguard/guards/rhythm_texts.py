"""What the guard ``accumulation`` says of each kind of fault: one entry a kind, or a kind's variant."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TEXTS", "Text"]


class Text(NamedTuple):
    """The texts of a finding; names in braces are filled in by who saw it."""

    expected: str
    seen: str
    effect: str
    cause: str
    remedy: str


_REPAIR = 'leave "guards" out of the configuration, so that accumulator_reset puts it right'
_ENGINE_STEP = "call engine.step() instead of optimizer.step(); in Fabric that is\n      model._forward_module.step()"

TEXTS: dict[str, Text] = {
    # -- a trainer and DeepSpeed ---------------------------------------------------------------------------------------
    "double_division": Text(
        "a loss is divided once by its {m} micro-batches",
        "{by} divided it by {n}, and engine.backward divides it by {m} again",
        "gradients are {n} times too small: scaled by 1/{nm} instead of 1/{m}. Adam hides most of it; SGD, clipping "
        "and every logged gradient norm do not",
        "{by} sets DeepSpeed's gradient_accumulation_steps and also divides by it itself",
        "multiply the loss by {n} in training_step, or write\n"
        '      {{"name": "accumulation", "action": "repair"}}\n'
        "    and in both cases look at your learning rate",
    ),
    "step_between_backwards": Text(
        "all backwards over one forward's graph come before the step",
        "backward {number} over the graph of forward {forward} comes after a step that consumed an earlier one",
        "two steps a batch, and the later one's gradients mix weights of before and after the first",
        "accelerator.backward, and with it Hugging Face's Trainer, calls engine.step inside the backward",
        "add the losses and call backward once:\n"
        "      accelerator.backward(loss_a + loss_b)\n"
        "    or keep the first from stepping, for Accelerate with gradient_accumulation_steps and\n"
        "      with accelerator.accumulate(model): ...",
    ),
    "late_gradient_read": Text(
        "a gradient is read after its backward and before the step",
        "{what} with no backward since the last step",
        "DeepSpeed answers with what the last step left in its buffers (ZeRO-3, offload), or an error",
        "the step came earlier than the place of the read suggests; in Hugging Face's on_pre_optimizer_step and "
        "on_optimizer_step it is over, as Accelerate steps inside backward",
        "read between backward and step, in your own loop:\n"
        "      engine.backward(loss); norm = safe_get_full_grad(param).norm(); engine.step()\n"
        "    for the norm over all gradients: session.grad_norm(), or grad_norm=True of zeroguard's callbacks",
    ),
    "early_gradient_read": Text(
        "a gradient is read when its window is complete",
        "{what} after a backward that is not the last of its window ({steps} micro-batches a step)",
        "DeepSpeed answers with {answer}",
        "the read stands in the loop over micro-batches",
        "read where the step comes next:\n"
        "      engine.backward(loss)\n"
        "      if engine.is_gradient_accumulation_boundary(): norm = safe_get_full_grad(param).norm()\n"
        "      engine.step()\n"
        "    or with session.gradients(), which refuses where there is none",
    ),
    "bypassed_engine_step": Text(
        "engine.step() after each micro-batch: it alone counts them",
        "optimizer.step() was called without engine.step() at gradient_accumulation_steps = {steps}",
        "no backward ever counts as a boundary, so nothing is reduced for this step: KeyError: 0, or a silently wrong "
        "update",
        "Fabric's optimizer.step() never reaches the engine, whose micro_steps then stay at 0",
        f"{_ENGINE_STEP}\n    or set gradient_accumulation_steps to 1 in the DeepSpeed configuration",
    ),
    "bypassed_engine_step, counters": Text(
        "engine.step(), which steps the optimizer and counts",
        "optimizer.step() was called without engine.step()",
        "this update is right, but engine.global_steps stays where it is: a scheduler in the DeepSpeed configuration "
        "never moves, and every checkpoint without a tag is called global_step0",
        "Fabric's optimizer.step() calls the ZeRO optimizer, never the engine",
        f"{_ENGINE_STEP}\n    or leave it, if you have no such scheduler and name your checkpoints",
    ),
    # -- windows and steps ---------------------------------------------------------------------------------------------
    "overwritten_gradient": Text(
        "several backwards before one step add up",
        "{n} backwards at an accumulation boundary before one step",
        "only the last backward's gradient is applied",
        "every backward at a boundary replaces the gradient of the one before; with gradient_accumulation_steps = 1 "
        "every backward is one",
        f"{_REPAIR}; or let DeepSpeed count:\n"
        '      "gradient_accumulation_steps": {n}, and engine.step() after every backward',
    ),
    "second_step": Text(
        "one step for each window of backwards",
        "a second step, by {by}, with no forward and no backward since the first",
        "{effect}",
        "engine.step() already steps the ZeRO optimizer; the loop, or a trainer, steps it again",
        "step once:\n      engine.backward(loss); engine.step()        # and no optimizer.step()",
    ),
    "step_without_backward": Text(
        "a step comes after a backward, or after zero_grad",
        "a step, by {by}, after a forward and no backward",
        "{effect}",
        "a batch was skipped after its forward, and its step was not",
        "skip both:\n      if torch.isfinite(loss):\n          engine.backward(loss); engine.step()",
    ),
    "open_window": Text(
        "an epoch ends where an accumulation window ends",
        "{open} of {steps} micro-batches wait for the rest of their window, {where}",
        "{effect}",
        "the number of micro-batches is no multiple of gradient_accumulation_steps, and DeepSpeed does not know of "
        "epochs",
        "drop what is left over, where the epoch ends:\n"
        "      engine.zero_grad(); engine.micro_steps -= engine.micro_steps % {steps}\n"
        "    or leave the last batches out: itertools.islice(loader, len(loader) // {steps} * {steps})",
    ),
    "short_window": Text(
        "{steps} micro-batches make a step",
        "{n} of {steps}: zero_grad threw the others away, as it does after {every} micro-batches again and again, and "
        "DeepSpeed counts on",
        "the loss is divided by {steps}, so that this update is {n}/{steps} of what it should be, and the windows that "
        "follow are shifted against their batches",
        "an epoch ends inside a window, and the loop calls zero_grad there; engine.micro_steps is not set back",
        "let the count begin again, where you call zero_grad:\n"
        "      engine.zero_grad(); engine.micro_steps -= engine.micro_steps % {steps}\n"
        "    or leave the last batches out: itertools.islice(loader, len(loader) // {steps} * {steps})",
    ),
    "cleared_every_micro_batch": Text(
        "zero_grad comes once a window, before its first backward",
        "zero_grad after every micro-batch but the last, in {windows} windows in a row",
        "{effect}",
        "zero_grad stands in the loop over micro-batches, as it does in PyTorch without accumulation",
        "leave it out; DeepSpeed clears after each step by itself:\n"
        "      for batch in loader:\n"
        "          engine.backward(engine(batch)); engine.step()",
    ),
    "engine_step_never_called": Text(
        "engine.step() after every backward; it decides by itself whether the optimizer steps",
        "{n} backwards, and neither engine.step() nor the optimizer's step()",
        "nothing is trained",
        "the loop does not step: optimizer.step() of another optimizer does not reach this engine",
        "      engine.backward(loss); engine.step()",
    ),
    # -- updates -------------------------------------------------------------------------------------------------------
    "skipped_update": Text(
        "every step updates the weights",
        "DeepSpeed skipped the update: a gradient was inf or NaN",
        "this batch trains nothing, and your loop goes on as if it had: its own schedulers and counters move",
        "{cause}",
        "look at the batch and its loss; ask after each step at a boundary:\n"
        "      engine.step()\n"
        "      if not engine.was_step_applied(): ...",
    ),
    "updates_keep_being_skipped": Text(
        "a skipped update is an exception",
        "{n} updates in a row were skipped, after {applied} that were applied",
        "nothing is trained any more",
        "the loss, or a weight, is inf or NaN at every batch{scale}",
        "stop, go back to a checkpoint from before, and look at the first batch that was skipped:\n"
        "      assert torch.isfinite(loss), batch",
    ),
    "clipped_nothing": Text(
        "a clip between backward and step changes what the optimizer consumes",
        "{by} was given the model's parameters, and not one of them has a gradient",
        "nothing is clipped; the norm that it returns is 0",
        "ZeRO moves gradients out of param.grad during the backward",
        'let DeepSpeed clip:\n      "gradient_clipping": {limit}          # in its configuration\n'
        "      norm = engine.get_global_grad_norm()   # after engine.step()",
    ),
    "unconfigured_clipping": Text(
        "gradients are clipped where the configuration says so",
        "gradient_clipping is not in DeepSpeed's configuration; DeepSpeed {version} clips at {limit:g}, and the last "
        "norm was {norm:.3g}",
        "updates are smaller than those of a run without clipping, and than those of the same run on DeepSpeed 0.19.2",
        "its default was 0.0, no clipping, up to DeepSpeed 0.19.2, and is 1.0 in newer releases",
        'say what you want, in DeepSpeed\'s configuration:\n      "gradient_clipping": 0.0   # or {limit:g}',
    ),
    "frozen_parameter_moves": Text(
        "a parameter with requires_grad False stays where it is",
        "the optimizer holds it, and steps it with {what}",
        "frozen weights move on every step",
        "they were frozen after deepspeed.initialize, which had taken them into the optimizer's flat partitions",
        "freeze before deepspeed.initialize; or, to freeze in mid-run, keep them as they are with\n"
        '      {{"name": "accumulator_reset", "idle": "untouched"}}',
    ),
    "unfrozen_parameter_stays": Text(
        "a parameter with requires_grad True is trained",
        "the optimizer does not hold it",
        "these weights never move",
        "they were frozen at deepspeed.initialize, which leaves such parameters out, and unfrozen since",
        "unfreeze before deepspeed.initialize; to train them later, give them a parameter group whose learning rate is "
        "0 until then:\n"
        '      torch.optim.AdamW([{{"params": head}}, {{"params": body, "lr": 0.0, "weight_decay": 0.0}}])',
    ),
    "idle_parameter_moves": Text(
        "a parameter that no backward of the window reached stays where it is, as in PyTorch",
        "the optimizer holds it, and steps it with a gradient of zeros: momentum and weight decay move it",
        "these weights drift on every step that leaves them out; PyTorch, which finds .grad None, passes over them",
        "a branch, an expert or a layer that this batch does not run; ZeRO steps whole flat partitions",
        "nothing, if zeros are what you mean; else keep them as they are with\n"
        '      {{"name": "accumulator_reset", "idle": "untouched"}}',
    ),
    "weights_not_finite": Text(
        "weights are finite after a step, if they were before the first",
        "inf or NaN among the samples of this rank's master weights, after step {step}",
        "every loss from here on is NaN; the checkpoints, too",
        "a gradient was inf or NaN, and DeepSpeed applied it: without a loss scale it leaves no step out here",
        "go back to a checkpoint from before this step; to have such steps left out in bf16:\n"
        '      "bf16": {{"enabled": true, "check_grad_overflow": true}}   # ZeRO-1 and 2, from DeepSpeed 0.17 on\n'
        "    or look before the backward: assert torch.isfinite(loss)",
    ),
    "lost_edit": Text(
        "what is written into weights stays there",
        "the gathered weights are not what they were, and deepspeed.zero.GatheredParameters has no modifier_rank",
        "DeepSpeed drops the gathered copy, and with it what was written; the model is as before",
        "GatheredParameters(params) is for reading; without modifier_rank nobody's copy becomes the partitions",
        "say whose copy is to count, and write on that rank:\n"
        "      with deepspeed.zero.GatheredParameters(params, modifier_rank=0):\n"
        "          if rank == 0: ...\n"
        "    and the master weights, which the next step writes back, with safe_set_full_fp32_param",
    ),
    # -- ranks ---------------------------------------------------------------------------------------------------------
    "rank_order": Text(
        "all ranks reduce the gradients of the same parameters, in the same order",
        "{seen}",
        "gradients of different parameters were added to each other: the update is wrong",
        "ranks ran the model's layers in different orders, or one rank a layer that another left out",
        "run the same layers in the same order on every rank; a branch that only some ranks need, with weight 0:\n"
        "      loss = loss + 0.0 * branch(x).sum()",
    ),
    "rank_boundaries": Text(
        "all ranks have their accumulation boundaries at the same backwards",
        "{seen}",
        "on some ranks a backward replaced gradients to which it added on others: the update is wrong",
        "set_gradient_accumulation_boundary is called with different values on different ranks",
        f"{_REPAIR}; or decide from what is the same on every rank:\n"
        "      engine.set_gradient_accumulation_boundary(micro == last)",
    ),
}
