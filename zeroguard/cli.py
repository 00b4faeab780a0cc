"""The command line: ``zeroguard`` or ``python -m zeroguard``.

Commands::

    zeroguard schema [--out FILE]     the JSON schema of the configuration

Errors in the arguments are argparse's: text on stderr, exit status 2. A command that fails returns 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroguard import GuardConfig, __version__

__all__ = ["main", "schema_text"]


def schema_text() -> str:
    """The JSON schema of :class:`zeroguard.GuardConfig` as text.

    Keys are sorted and the text ends with a newline, so that the file in docs/ changes only when the model does.
    """
    return json.dumps(GuardConfig.model_json_schema(), indent=2, sort_keys=True) + "\n"


def _schema(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        sys.stdout.write(schema_text())
        return 0
    try:
        arguments.out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        print(f"zeroguard schema: cannot write {arguments.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    # A fixed name: under "python -m zeroguard" argparse would call the program "__main__.py".
    parser = argparse.ArgumentParser(prog="zeroguard", description="Guards for DeepSpeed ZeRO training loops.")
    parser.add_argument("--version", action="version", version=f"zeroguard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    schema = commands.add_parser("schema", help="print the JSON schema of the configuration")
    schema.add_argument("--out", type=Path, metavar="FILE", help="write it to FILE instead of standard output")
    schema.set_defaults(run=_schema)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` if None.

    Raises:
        SystemExit: by argparse, for ``--help``, ``--version`` and wrong arguments.
    """
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))
