"""Imports the ``deepspeed`` beside it."""

import importlib.util
import inspect
import sys

FOUND = importlib.util.find_spec("deepspeed") is not None

import deepspeed  # noqa: E402
from deepspeed import BEFORE, initialize  # noqa: E402

print(FOUND, BEFORE, initialize is deepspeed.initialize, initialize.__doc__, inspect.signature(initialize))
print(
    initialize(model=1), deepspeed.__loader__.get_source("deepspeed")[:9], "exec_module" in vars(deepspeed.__loader__)
)
print(importlib.reload(deepspeed) is deepspeed, deepspeed.initialize(model=2), sys.argv)
