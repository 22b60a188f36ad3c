"""`__main__` as a fresh interpreter has it, the user's code run in it, and its end told as a fresh interpreter tells it.

Why not `runpy.run_path`: it puts the old `__main__` back when the script's last line is done, and from then on late threads and atexit functions can neither
pickle nor find their globals. So the module is built here and never taken away. Scripts are compiled and executed; `-m`, folders and zip files go through the
very function that `python -m` uses, so even the frozen runpy lines of their tracebacks are the same. Errors lose the one frame that is ours; SystemExit and
the exit by SIGINT are left to the interpreter, which then finalises as ever. It knows Python's start-up (CPython 3.11: Modules/main.c, Python/pythonrun.c)
and nothing of ranks.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from typing import Any, NoReturn

from ft_launcher.core.command import Command

Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]


def path_entry(command: Command, cwd: str) -> str:
    """What a fresh interpreter would put at sys.path[0]: the script's folder with symbolic links resolved, or the folder or zip file itself; for -m `cwd`."""
    if command.script is None:
        return cwd
    path = os.path.join(cwd, command.script)
    return path if _is_container(path) else os.path.dirname(os.path.realpath(path))


_ahead: dict[str, tuple[tuple[int, int, int], types.CodeType]] = {}


def compile_ahead(command: Command) -> None:
    """In the zygote: compile the script once for all ranks of all cycles. A file that has changed by then is compiled anew; one that cannot be read or compiled is
    the rank's to complain about.
    """
    if command.script is None or _is_container(command.script):
        return
    path = os.path.join(os.getcwd(), command.script)  # noqa: PTH109
    try:
        with open(path, "rb") as file:
            stamp, text = _stamp(os.fstat(file.fileno())), file.read()
        if not text.startswith(MAGIC_NUMBER):
            _ahead[path] = stamp, compile(text, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ino


def run(command: Command) -> None:
    """Runs the command as `__main__` of this process. Returns when it is done, or raises SystemExit or KeyboardInterrupt for the interpreter to end by."""
    failure: BaseException | None = None
    try:
        _execute(command)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  everything that the interpreter itself would print
        failure = error
    _flush()
    if failure is not None:
        _report(failure)
    _forget_file()
    if failure is not None:
        _end_by(failure)


def _execute(command: Command) -> None:
    main = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    if command.module is not None:
        sys.argv = ["-m", *command.args]
        runpy._run_module_as_main(command.module)  # type: ignore[attr-defined]
        return
    script = str(command.script)
    sys.argv = [script, *command.args]
    if _is_container(script):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), script)  # noqa: PTH109  absolute, not normalised: as CPython leaves it
    vars(main).update(__file__=path, __cached__=None)
    exec(_code(main, path), vars(main))


def _is_container(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _code(main: types.ModuleType, path: str) -> types.CodeType:
    try:
        with open(path, "rb") as file:
            known = _ahead.get(path)
            if known is not None and known[0] == _stamp(os.fstat(file.fileno())):
                main.__loader__ = SourceFileLoader("__main__", path)
                return known[1]
            text = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    if text.startswith(MAGIC_NUMBER):
        main.__loader__ = SourcelessFileLoader("__main__", path)
        code = main.__loader__.get_code("__main__")
        assert code is not None
        return code
    main.__loader__ = SourceFileLoader("__main__", path)
    return compile(text, path, "exec", dont_inherit=True)


def _report(failure: BaseException) -> None:
    """Prints the error through sys.excepthook, as PyErr_Print does. May raise SystemExit, when the hook does."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    failure.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    hook: Hook | None = getattr(sys, "excepthook", None)
    if hook is None:
        sys.stderr.write("sys.excepthook is missing\n")
        sys.__excepthook__(type(failure), failure, trace)
        return
    second = _second_failure(hook, failure, trace)
    if second is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(failure), failure, trace)


def _second_failure(hook: Hook, failure: BaseException, trace: types.TracebackType | None) -> BaseException | None:
    try:
        hook(type(failure), failure, trace)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the user's hook
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        return error
    return None


def _end_by(failure: BaseException) -> NoReturn:
    """Exit status 1; for a KeyboardInterrupt the interpreter's own way: finalise, then die by SIGINT. It would print it again, so it is told not to, once."""
    if type(failure) is not KeyboardInterrupt:
        raise SystemExit(1)
    hook = getattr(sys, "excepthook", None)

    def once(*_: object) -> None:
        if hook is not None:
            sys.excepthook = hook

    sys.excepthook = once
    raise KeyboardInterrupt


def _flush() -> None:
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or None: the interpreter ignores it here as well
            continue


def _forget_file() -> None:
    """CPython 3.11 takes `__file__` and `__cached__` of a script away again at its end: what an atexit function meets must not depend on the launcher."""
    main = sys.modules.get("__main__")
    if main is not None and main.__spec__ is None:
        vars(main).pop("__file__", None)
        vars(main).pop("__cached__", None)
