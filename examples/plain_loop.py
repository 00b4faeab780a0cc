"""Two losses from one forward: DeepSpeed ZeRO without and with zeroguard, beside the same loop in plain PyTorch.

    python examples/plain_loop.py            # a table
    python examples/plain_loop.py --json     # one JSON object a line

``train`` is an ordinary loop; ``train_guarded`` is all that zeroguard asks for. Real engines run both on two CPU ranks,
and the parameters that they end with are compared with those of plain PyTorch, which runs ``train`` too.
"""

from __future__ import annotations

import sys
from typing import Any

import _compare  # before zeroguard: it lets this file run from a checkout that is not installed

import zeroguard


def train(engine: Any, batches: Any, backward: Any) -> None:
    """One forward and two losses a step; ``backward`` is one of PATTERNS."""
    for tokens, values in batches:
        logits, guesses = engine(tokens)
        loss_a = _compare.language_loss(logits, tokens)
        loss_b = _compare.value_loss(guesses, values)
        backward(engine, loss_a, loss_b)
        engine.step()


def train_guarded(engine: Any, batches: Any, backward: Any) -> zeroguard.Session:
    """The same loop with zeroguard around it."""
    with zeroguard.guard(engine) as session:
        train(engine, batches, backward)
    return session


def engine_twice(engine: Any, loss_a: Any, loss_b: Any) -> None:
    """The gradients of both losses add up."""
    engine.backward(loss_a, retain_graph=True)
    engine.backward(loss_b)


def loss_twice(engine: Any, loss_a: Any, loss_b: Any) -> None:
    """The same through PyTorch's own backward."""
    loss_a.backward(retain_graph=True)
    loss_b.backward()


def zero_grad_between(engine: Any, loss_a: Any, loss_b: Any) -> None:
    """The gradients of the first loss are looked at and thrown away; only the second loss counts."""
    engine.zero_grad()
    engine.backward(loss_a, retain_graph=True)
    engine.zero_grad()
    engine.backward(loss_b)


PATTERNS = {
    "engine.backward twice": engine_twice,
    "loss.backward twice": loss_twice,
    "zero_grad between": zero_grad_between,
}

if __name__ == "__main__":
    sys.exit(_compare.main(__doc__, train, train_guarded, PATTERNS))
