# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse.apex`: runs an unmodified program for which `apex` is torchfuse."""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch.distributed as dist

from torchfuse.apex._alias import install_in_all_processes

USAGE = """\
usage: python -m torchfuse.apex script.py [argument ...]
       python -m torchfuse.apex -m module [argument ...]

Runs a Python program with `import apex` resolving to torchfuse.
"""


def main() -> None:
    """Runs the command line; the program ends as under `python` itself."""
    arguments = sys.argv[1:]
    # torch.distributed.launch puts the program's argument --local-rank before the program's name.
    of_launcher = []
    while arguments and arguments[0].startswith(("--local-rank=", "--local_rank=")):
        of_launcher.append(arguments.pop(0))
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    program[1:1] = of_launcher if program else []
    if program[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    if not program or program[0].startswith("-"):
        _fail(USAGE)
    if not as_module and not os.path.isfile(program[0]):
        _fail(f"python -m torchfuse.apex: expected a Python file, got {program[0]!r}.\n")
    sys.argv = program
    if not as_module and not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    try:
        install_in_all_processes()
    except RuntimeError as error:
        _fail(f"{error}\n")
    atexit.register(_leave_group)  # Registered first, so it runs after the program's functions.
    try:
        if as_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(os.path.abspath(program[0]))
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            atexit.unregister(_leave_group)
        if not isinstance(error, Exception):
            raise
        _report(error)
        sys.exit(1)


def _run_script(path: str) -> None:
    """Executes a file as `python` does, with sys.argv[0] as given on the command line."""
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _leave_group() -> None:
    """Destroys a Gloo process group that a program left open when the program ends without error.

    Programs for apex rarely call `destroy_process_group()`. If the group's threads still run while
    the interpreter finalizes, the process occasionally aborts.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _report(error: Exception) -> None:
    """Prints the traceback without the frames of this file and of runpy."""
    traceback = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _fail(message: str) -> None:
    sys.stderr.write(message)
    sys.exit(2)


if __name__ == "__main__":
    main()
