"""The table of foreign attributes against every verified release, and the guards at work on each.

A release is installed from its source distribution, without dependencies, into a folder of its own (``make releases``).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.scenarios import OUTPUT_HOOKS, SCENARIOS, Scenario, judge
from tests.integration.test_give_back import all_is_back
from tests.lab.group import ROOT, Lab
from zeroguard.backends.deepspeed.attributes import VERIFIED, version_tuple

FOLDER = Path(os.environ.get("LAB_RELEASES", ROOT / ".releases"))
CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def path_of(release: str) -> str:
    """The folder to put first on the path; empty for the installed release."""
    if release == VERIFIED[-1]:
        return ""
    folder = FOLDER / release
    if not (folder / "deepspeed").is_dir():
        pytest.fail(f"DeepSpeed {release} is not in {folder}; run: make releases")
    return str(folder)


@pytest.fixture(scope="module")
def old_lab() -> Lab:
    """Groups of one release at a time: five of them at once would fill the machine."""
    lab = Lab()
    yield lab
    lab.close()


@pytest.mark.parametrize("release", VERIFIED)
class TestRelease:
    def test_every_attribute_is_there(self, old_lab: Lab, release: str) -> None:
        for stage, offload in CONFIGURATIONS:
            answer = old_lab.run(
                1,
                {"call": "contract.probe", "stage": stage, "offload": offload},
                python_path=path_of(release),
                timeout=240,
            )[0]
            assert answer.get("version", "").startswith(release), answer
            assert answer["missing"] == {}, (stage, offload)
            assert "accumulator_reset" in answer["selected"]
            assert "retained_graph" in answer["selected"]

    def test_two_losses_are_exact(self, old_lab: Lab, release: str) -> None:
        """On releases before 0.18 loss.backward() is not DeepSpeed's to support."""
        patterns = ["clear_engine", "boundary_engine", "misuse_engine"]
        if version_tuple(release) >= (0, 18):
            patterns += ["clear_manual", "boundary_manual", "misuse_manual"]
        for stage, offload in CONFIGURATIONS:
            # Accumulation over several micro-batches is what older releases get wrong by themselves.
            for pattern, gas in [*((p, 1) for p in patterns), ("boundary_engine", 4), ("misuse_engine", 4)]:
                case = {"call": "programs.two_losses", "pattern": pattern, "stage": stage, "offload": offload}
                answer = old_lab.run(1, {**case, "gas": gas}, python_path=path_of(release))[0]
                where = (stage, offload, pattern, gas)
                assert answer["status"] == "exact", (*where, answer.get("differences"), answer["error"])
                assert answer["findings"] == [], (*where, answer["texts"])

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace("`", ""))
    def test_the_twelve_programs(self, old_lab: Lab, release: str, scenario: Scenario) -> None:
        """As make compat runs them, on fewer configurations. On releases before 0.18 nobody has loss.backward()."""
        places = [(1, False), (2, True), (3, True)]
        verdict = judge(scenario, old_lab, path_of(release), version_tuple(release), places)
        old = scenario.manual and version_tuple(release) < OUTPUT_HOOKS
        assert verdict.status in (("unavailable",) if old else ("works", "not needed")), verdict

    def test_idle_parameters_are_exact(self, old_lab: Lab, release: str) -> None:
        for stage, offload in CONFIGURATIONS:
            case = {"call": "idle.idle", "stage": stage, "offload": offload}
            answer = old_lab.run(1, case, python_path=path_of(release))[0]
            assert max(answer["differences"]) <= 3e-8, (stage, offload, answer)

    def test_reads_are_exact(self, old_lab: Lab, release: str) -> None:
        """Gradients and their norms between backward and step."""
        for stage, offload in CONFIGURATIONS:
            for dtype, limit in (("fp32", 5e-7), ("fp16", 2e-3)):
                case = {"call": "reading.read", "stage": stage, "offload": offload, "dtype": dtype}
                answer = old_lab.run(1, case, python_path=path_of(release))[0]
                for window in answer["windows"]:
                    assert window["names"], (stage, offload, dtype, window)
                    assert max(window["whole"], window["norms"]) <= limit, (stage, offload, dtype, window)

    def test_nothing_stays_in_flight_and_all_is_given_back(self, old_lab: Lab, release: str) -> None:
        answer = old_lab.run(1, {"call": "status.left_behind", "case": "eval"}, python_path=path_of(release))[0]
        assert answer["seen"]["at_boundary"]["registry"] == 0, answer
        for stage, offload in CONFIGURATIONS:
            case = {"call": "returned.course", "stage": stage, "offload": offload}
            all_is_back(old_lab.run(1, case, python_path=path_of(release))[0])
        old_lab.close()


def test_the_table_is_the_only_knowledge() -> None:
    """Each private name of DeepSpeed's that the backend uses stands in the table, or is asked for with a default."""
    import ast

    from zeroguard.backends.deepspeed.attributes import TABLE

    known = {item.name for item in TABLE}
    optional: set[str] = set()
    used: dict[str, str] = {}
    own = {"_per_tensor", "_prologue", "_current"}
    for file in (ROOT / "zeroguard" / "backends" / "deepspeed").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                optional.update(a.value for a in node.args[1:2] if isinstance(a, ast.Constant))
            owner = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id in ("opt", "optimizer", "engine"):
                used[node.attr] = file.name
    unknown = {n: f for n, f in used.items() if n.startswith("_") and n not in known | optional | own}
    assert unknown == {}
