"""The structure of the package, read from its source: imports run one way, and the house rules hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zeroguard

PACKAGE = Path(zeroguard.__file__).parent
DOOR = "zeroguard.backends.deepspeed"
#: The modules that may import it, inside a function.
OPENERS = ("zeroguard.attach", "zeroguard.integrations.launcher", "zeroguard.stress.worker")

#: Lowest first. A module may import modules of lower layers, and of its own package. The longest prefix that fits
#: counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("zeroguard.events", "zeroguard.findings", "zeroguard.backends"),
    ("zeroguard.errors", "zeroguard.collective", "zeroguard.heartbeat"),
    ("zeroguard.backends.base",),
    ("zeroguard.backends.deepspeed", "zeroguard.guards", "zeroguard.report"),
    ("zeroguard.files", "zeroguard.lanes"),
    ("zeroguard.sinks", "zeroguard.plugins"),
    ("zeroguard.config",),
    ("zeroguard.settings",),
    ("zeroguard.breakage", "zeroguard.ranks"),
    ("zeroguard.session",),
    ("zeroguard.attach",),
    ("zeroguard", "zeroguard._scripted"),
    ("zeroguard.integrations", "zeroguard.show", "zeroguard.stress", "zeroguard.testing"),
    ("zeroguard.cli",),
    ("zeroguard.__main__",),
)

COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "init_process_group",
        "irecv",
        "isend",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
    }
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
every_module = pytest.mark.parametrize("name", MODULES)


@dataclass(frozen=True)
class Import:
    """One imported module. ``typing`` ones stand under ``if TYPE_CHECKING``, ``inner`` ones inside a function."""

    target: str
    line: int
    inner: bool
    typing: bool


def imports(name: str, tree: ast.AST) -> Iterator[Import]:
    """What ``name`` imports, wherever it stands; ``from package import module`` counts as the module."""
    package = name if MODULES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, inner: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inner, typing)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield Import(whole if whole in MODULES else base, node.lineno, inner, typing)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing = True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner, typing)

    return visit(tree, False, False)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int | None:
    """The number of the layer, by the longest prefix; bare ``zeroguard`` stands for the package's __init__ alone."""
    found = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or (prefix != "zeroguard" and inside(module, prefix))
    ]
    return max(found)[1] if found else None


def home(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    return max((p for layer_ in LAYERS for p in layer_ if inside(module, p)), key=len)


# -- imports run one way ---------------------------------------------------------------------------------------------


@every_module
def test_every_module_has_a_layer(name: str) -> None:
    assert layer(name) is not None, f"{name}: give it a place in LAYERS, and in docs/architecture.md"


@every_module
def test_imports_run_one_way(name: str) -> None:
    here = layer(name)
    if here is None:
        pytest.skip("has no layer")
    for item in imports(name, TREES[name]):
        if not inside(item.target, "zeroguard") or home(item.target) == home(name):
            continue
        there = layer(item.target)
        assert there is not None, f"{name}:{item.line} imports {item.target}, which has no layer"
        assert there < here, f"{name}:{item.line} imports {item.target}, which is not below it"


@every_module
def test_only_the_openers_open_the_door(name: str) -> None:
    for item in imports(name, TREES[name]):
        if not inside(item.target, DOOR) or inside(name, DOOR):
            continue
        assert name in OPENERS, f"{name}:{item.line} imports {item.target}; only {OPENERS} may"
        assert item.inner, f"{name}:{item.line}: import {DOOR} inside the function that needs it"


def test_the_openers_do_open_it() -> None:
    """So that the test above is not true of nothing."""
    for name in OPENERS:
        assert any(inside(item.target, DOOR) for item in imports(name, TREES[name])), name


@every_module
def test_guards_know_neither_torch_nor_what_is_above_them(name: str) -> None:
    """A guard is a state machine: events in, findings and requests out."""
    if not inside(name, "zeroguard.guards"):
        return
    for item in imports(name, TREES[name]):
        root = item.target.split(".")[0]
        assert root not in ("torch", "logging", "warnings", "deepspeed"), f"{name}:{item.line} imports {item.target}"


# -- one door to DeepSpeed, one place for collectives ----------------------------------------------------------------


@every_module
def test_only_the_door_knows_deepspeed(name: str) -> None:
    if inside(name, DOOR):
        return
    for item in imports(name, TREES[name]):
        assert item.target.split(".")[0] != "deepspeed", f"{name}:{item.line} imports {item.target}"
    found = re.search(r"sys\.modules\s*(\[|\.get\()\s*['\"]deepspeed", MODULES[name].read_text(encoding="utf-8"))
    assert not found, f"{name} takes deepspeed from sys.modules"


@every_module
def test_nothing_imports_a_trainer_on_import(name: str) -> None:
    """Integrations may import their trainer at the top; nothing else may import one at all."""
    if inside(name, "zeroguard.integrations") and name != "zeroguard.integrations":
        return
    for item in imports(name, TREES[name]):
        root = item.target.split(".")[0]
        assert root not in ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"), (
            f"{name}:{item.line} imports {item.target}"
        )


def collective_calls(tree: ast.AST) -> list[tuple[int, str]]:
    """Calls of torch.distributed's (or deepspeed.comm's) collectives, under whatever name they were imported."""
    packages = ("torch.distributed", "deepspeed.comm")
    roots = set(packages)
    bare: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {a.asname for a in node.names if a.asname and a.name.startswith(packages)}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                shown = alias.asname or alias.name
                if whole in packages:
                    roots.add(shown)
                elif (node.module or "").startswith(packages) and alias.name in COLLECTIVES:
                    bare[shown] = alias.name
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        if isinstance(call, ast.Name) and call.id in bare:
            found.append((node.lineno, bare[call.id]))
        elif isinstance(call, ast.Attribute) and call.attr in COLLECTIVES and ast.unparse(call.value) in roots:
            found.append((node.lineno, call.attr))
    return found


@every_module
def test_only_collective_py_communicates(name: str) -> None:
    found = collective_calls(TREES[name])
    if name == "zeroguard.collective":
        assert found
    else:
        assert not found, f"{name} calls {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed as d\nd.broadcast(x, 0)",
        "from torch.distributed import all_gather as g\ng(x, y)",
        "import deepspeed.comm as c\nc.all_reduce(x)",
    ],
)
def test_the_search_for_collectives_finds_them(text: str) -> None:
    assert len(collective_calls(ast.parse(text))) == 1


@pytest.mark.parametrize("text", ["import functools\nfunctools.reduce(f, x)", "x.gather(0, i)", "dist.get_rank()"])
def test_the_search_for_collectives_finds_nothing_else(text: str) -> None:
    assert collective_calls(ast.parse(text)) == []


# -- never -----------------------------------------------------------------------------------------------------------


@every_module
def test_never(name: str) -> None:
    for node in ast.walk(TREES[name]):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom):
            assert not any(alias.name == "*" for alias in node.names), f"{where}: star import"
        elif isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where}: bare except"
        elif isinstance(node, ast.Assert):
            # "python -O" drops it, and its message is no help to a user.
            raise AssertionError(f"{where}: assert statement")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert name == "zeroguard.cli", f"{where}: print in library code"
        elif isinstance(node, ast.Global):
            raise AssertionError(f"{where}: global statement")
