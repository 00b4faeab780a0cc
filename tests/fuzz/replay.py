"""Run one program again: ``python -m tests.fuzz.replay FILE [--unguarded]``.

FILE is JSON, ``{"config": ..., "program": ...}``, as a failing test writes it; the program is edited in place by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.fuzz import judge
from tests.lab.group import Lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--unguarded", action="store_true", help="what DeepSpeed does by itself")
    arguments = parser.parse_args()
    case = json.loads(arguments.file.read_text())
    config, program = case["config"], case["program"]
    lab = Lab()
    try:
        answers = judge.run(lab, config, program, not arguments.unguarded)
    finally:
        lab.close()
    print(judge.listing(config, program))
    for rank, answer in enumerate(answers):
        print(f"\nrank {rank}: {answer['status']} {answer.get('error', '')}")
        print(answer.get("trace", answer.get("log", "")), end="")
        for step in answer.get("steps", []):
            print(f"  after {step['at']}: difference {step['difference']:.2e}, limit {step['limit']:.2e}")
        for text in answer.get("texts", []):
            print(text)
        for name in ("changed", "left", "leaked", "afterwards"):
            if answer.get(name):
                print(f"  {name}: {answer[name]}")
    broken = judge.verdict(config, program, answers)
    print(f"\n{'broken: ' + broken if broken else 'as it should be'}")


if __name__ == "__main__":
    main()
