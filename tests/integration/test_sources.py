"""The configuration of a real engine, out of all sources, with a guard of an installed plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.group import Lab
from tests.lab.site import install


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"), "plugin_distribution", "broken_distribution")


@pytest.fixture(scope="module")
def plugin_lab() -> Iterator[Lab]:
    """Workers of its own: they have the plugins on their path."""
    made = Lab()
    yield made
    made.close()


@pytest.mark.parametrize("as_file", [False, True], ids=["dict", "file"])
def test_every_source_reaches_a_real_engine(plugin_lab: Lab, site: Path, as_file: bool) -> None:
    answer = plugin_lab.run(1, {"call": "sources.merged", "as_file": as_file}, python_path=str(site))[0]
    assert answer.get("origins") == {
        "guards": "keyword arguments",
        "on_violation": "file zeroguard.yaml",
        "on_unavailable": "default",
        "on_guard_error": "default",
        "agree": "keyword arguments",
        "agree_every_n_steps": "default",
        "heartbeat": "default",
        "max_findings": 'key "zeroguard" of the DeepSpeed configuration',
        "sinks": "file zeroguard.yaml",
    }, answer
    assert answer["config"]["max_findings"] == 7
    assert answer["config"]["agree"] is True
    assert answer["config"]["guards"][0] == {"name": "backward_budget", "limit": 1}
    assert "did you mean 'on_violation'?" in answer["wrong"]
    # The plugin's guard runs beside a built-in one, and the broken distribution is only mentioned.
    assert answer["selected"] == ["retained_graph", "backward_budget"]
    assert [(item["guard"], item["kind"]) for item in answer["findings"]] == [("backward_budget", "budget_exceeded")]
    if not as_file:
        assert any("broken-guards 0.3" in text for text in answer["warnings"])
