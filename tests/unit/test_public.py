"""The public surface: short, listed, documented, cheap to import."""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import zeroguard
from zeroguard import errors

PACKAGE = Path(zeroguard.__file__).parent

#: A name that is added or taken away here is a change of the public surface: CHANGELOG.md has to say so.
PUBLIC = [
    "AlreadyGuardedError",
    "ConfigError",
    "EngineNotFoundError",
    "Finding",
    "GradientsUnavailableError",
    "GuardConfig",
    "GuardUnavailableError",
    "GuardViolation",
    "NotGuardedError",
    "Repair",
    "Session",
    "SessionClosedError",
    "ZeroGuardError",
    "guard",
    "load_config",
]

#: What ``import zeroguard`` must not bring with it.
NOT_IMPORTED = (
    "torch",
    "pydantic",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "yaml",
    "rich",
)


def sources() -> list[Path]:
    """Every file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_all_is_frozen() -> None:
    assert zeroguard.__all__ == PUBLIC


def test_all_is_sorted() -> None:
    assert zeroguard.__all__ == sorted(zeroguard.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(zeroguard, name))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_members_are_documented(name: str) -> None:
    """Methods and properties that a class of ours defines itself, not pydantic's or Exception's."""
    member = getattr(zeroguard, name)
    if not inspect.isclass(member):
        return
    for attribute, value in vars(member).items():
        if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
            assert inspect.getdoc(getattr(member, attribute)), f"{name}.{attribute}"


@pytest.mark.parametrize("path", sources(), ids=label)
def test_module_lists_its_names_and_documents_them(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "no module docstring"
    listed = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ),
        None,
    )
    definitions = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name, node in definitions.items():
        if not name.startswith("_"):
            assert ast.get_docstring(node), f"{name} has no docstring"
    if listed is not None:
        assert sorted(set(listed)) == sorted(listed), "a name stands twice in __all__"
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        unknown = set(listed) - definitions.keys() - assigned - imported
        assert not unknown, f"__all__ lists {sorted(unknown)}, which the module does not have"


def test_import_is_cheap() -> None:
    """In a fresh interpreter: here other tests may have imported anything."""
    code = f"import sys, zeroguard; print([name for name in {NOT_IMPORTED!r} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_import_does_no_work() -> None:
    """No process group, no handler on the root logger, nothing printed, no warning."""
    code = (
        "import logging, zeroguard, torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "assert not logging.getLogger('zeroguard').handlers\n"
        "assert logging.getLogger('zeroguard').level == logging.NOTSET\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("name", errors.__all__)
def test_every_exception_derives_from_the_base(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, zeroguard.ZeroGuardError)
    assert getattr(zeroguard, name) is kind
    assert name in (errors.__doc__ or ""), "the tree in the docstring does not show it"


def test_exceptions_that_are_also_builtin_ones() -> None:
    assert issubclass(zeroguard.ConfigError, ValueError)
    assert issubclass(zeroguard.EngineNotFoundError, TypeError)


@pytest.mark.parametrize("path", [p for p in sources() if p.name != "errors.py"], ids=label)
def test_no_exception_is_defined_elsewhere(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                kind = getattr(builtins, getattr(base, "id", ""), None)
                assert not (isinstance(kind, type) and issubclass(kind, BaseException)), (
                    f"{node.name}: put it in errors.py"
                )
