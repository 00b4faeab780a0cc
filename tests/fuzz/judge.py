"""The right answer: what is wrong with what a program did, if anything, and the program as one can read it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.grammar import allowed
from tests.lab.group import Lab

__all__ = ["listing", "report", "run", "verdict"]

#: A case takes 0.05 s; more than this, in which a busy machine also starts the workers, is a hang.
SECONDS = 90.0


def run(lab: Lab, config: dict[str, Any], program: list[dict[str, Any]], guarded: bool = True) -> list[dict[str, Any]]:
    case = {"call": "fuzz.case", "config": config, "program": program, "guarded": guarded}
    return lab.run(config["ranks"], case, timeout=SECONDS)


def verdict(config: dict[str, Any], program: list[dict[str, Any]], answers: list[dict[str, Any]]) -> str:
    """The first broken invariant of any rank; empty for none."""
    for rank, answer in enumerate(answers):
        broken = _one(config, program, answer)
        if broken:
            return f"rank {rank}: {broken}"
    return ""


def _one(config: dict[str, Any], program: list[dict[str, Any]], answer: dict[str, Any]) -> str:
    status = answer["status"]
    if status in ("dead", "error", "reference"):
        return f"{status}: {answer['error']}\n{answer.get('trace', answer.get('log', ''))}"
    severe, mode = answer.get("severe", []), config["mode"]
    if status == "crash":
        # Where nothing is repaired DeepSpeed may crash, and that is said loudly enough.
        return "" if mode != "repair" else f"crash at {answer['at']}: {answer['error']}\n{answer['trace']}"
    if status == "wrong":
        last = answer["steps"][-1]
        if mode == "repair" or not last["said"]:
            said = f", findings: {severe}" if severe else ", and nothing was said"
            odd = f": {answer['error']}" if answer["error"] else ""
            return f"wrong after operation {last['at']}: {last['difference']:.2e} > {last['limit']:.2e}{odd}{said}"
        return ""
    if mode != "detect":
        unexpected = [f["kind"] for f in answer.get("findings", []) if f["kind"] not in allowed(config, program)]
        if unexpected:
            return f"exact, but found {unexpected}:\n" + "\n".join(answer["texts"])
    # Where nothing is repaired, DeepSpeed's state after a backward is DeepSpeed's affair.
    for name in ("changed", "leaked", *(("left", "afterwards") if mode == "repair" else ())):
        if answer.get(name):
            return f"{name}: {answer[name]}"
    return ""


def report(config: dict[str, Any], program: list[dict[str, Any]], broken: str) -> str:
    """What a failing test says, with the way to run it again."""
    name = f"zeroguard-fuzz-{config['mode']}-{config['stage']}{'o' if config['offload'] else ''}-{config['ranks']}.json"
    path = Path(tempfile.gettempdir()) / name
    path.write_text(json.dumps({"config": config, "program": program}))
    return f"{broken}\n\n{listing(config, program)}\n\nagain: python -m tests.fuzz.replay {path}"


def listing(config: dict[str, Any], program: list[dict[str, Any]]) -> str:
    """The program in words of Python. What x, loss and Heads are: tests/lab/fuzz.py."""
    lines = [f"# {json.dumps(config)}"]
    for at, entry in enumerate(program):
        lines.append(f"{_line(at, entry):<78}  # {at}")
    return "\n".join(lines)


def _line(at: int, entry: dict[str, Any]) -> str:
    op = entry["op"]
    if op == "forward":
        return f"y{entry['slot']} = engine(x({at}), heads={entry['heads']})"
    if op == "backward":
        loss = " + ".join(f"loss(y{slot}, {head})" for slot, head in entry["terms"])
        retain = "retain_graph=True" if entry["retain"] else ""
        if entry["by"] == "engine":
            return f"engine.backward({loss}{', ' if retain else ''}{retain})"
        return f"({loss}).backward({retain})"
    if op == "boom":  # raises above the heads, or between them and the trunk
        return f"try: backward that raises at {entry['place']}, by {entry['by']}, heads={entry['heads']}"
    if op == "eval":
        around = ("engine.eval(); ", "; engine.train()") if entry["mode"] else ("", "")
        return f"{around[0]}with no_grad: engine(x({at}), heads={entry['heads']}){around[1]}"
    return {
        "zero_grad": lambda: (
            {"engine": "engine", "optimizer": "engine.optimizer", "module": "engine.module"}[entry["by"]]
            + ".zero_grad()"
        ),
        "boundary": lambda: f"engine.set_gradient_accumulation_boundary({entry['value']})",
        "step": lambda: "engine.step()" + ("  # applies" if entry["applies"] else ""),
        "stop": lambda: f"try: engine(x({at}), heads={entry['heads']}, stop=True)  except: pass",
        "freeze": lambda: f"module.heads[{entry['head']}].requires_grad_({not entry['on']})",
        "save": lambda: "engine.save_checkpoint(folder)",
        "load": lambda: "engine.load_checkpoint(folder)",
    }[op]()
