"""Doors to the training engines. ``base`` is the vocabulary; ``deepspeed`` is the only code that knows DeepSpeed."""
