"""A forked rank against `python script.py`: the same little script under both, the same end and the same text wanted. No torch: every case is milliseconds."""

from __future__ import annotations

import os
import resource
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.shell.process import Command
from tests.process.driver import Driver, Outcome, base_env, fresh

EXITS = {
    "end": "pass",
    "none": "import sys; sys.exit()",
    "three": "import sys; sys.exit(3)",
    "256": "import sys; sys.exit(256)",
    "minus one": "import sys; sys.exit(-1)",
    "huge": "import sys; sys.exit(2**70)",
    "true": "import sys; sys.exit(True)",
    "text": "import sys; sys.exit('no data in /x')",
    "object": "import sys; sys.exit([1, 2])",
    "raise": "raise SystemExit(7)",
    "subclass": "class E(SystemExit): pass\nraise E(9)",
    "_exit": "import os; print('x', end=''); os._exit(5)",
    "abort": "import os; os.abort()",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "term": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "last words": "import os, signal; print('last words', end=''); os.kill(os.getpid(), signal.SIGKILL)",
    "pipe": "import os, signal; os.kill(os.getpid(), signal.SIGPIPE); print('ignored')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt by signal": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "interrupt subclass": "class K(KeyboardInterrupt): pass\nraise K",
    "interrupt and atexit": "import atexit, sys\natexit.register(lambda: print('bye', sys.excepthook is sys.__excepthook__))\nraise KeyboardInterrupt",
    "thread exits": "import threading, sys\nthreading.Thread(target=sys.exit, args=(4,)).start()",
}

ERRORS = {
    "plain": "def f():\n    g()\ndef g():\n    raise ValueError('x')\nf()",
    "no message": "raise RuntimeError",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "while handling": "def f():\n    try:\n        int('x')\n    except ValueError:\n        raise KeyError('k')\nf()",
    "from none": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('k') from None",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "notes": "e = ValueError('x')\ne.add_note('a note')\nraise e",
    "syntax": "x = 1\ndef f(:\n    pass",
    "indent": "if 1:\n    x = 1\n  y = 2",
    "tabs": "if 1:\n        x = 1\n\ty = 2",
    "future": "print('a')\nfrom __future__ import annotations",
    "runtime syntax": "compile('a b', 'made.py', 'exec')",
    "missing import": "import no_such_module_here",
    "broken import": "import broken_helper",
    "assert": "assert [] == [1], 'not equal'",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()\nprint('goes on')",
    "atexit": "import atexit\natexit.register(print, 'first in')\natexit.register(lambda: 1 / 0)\natexit.register(print, 'last in')",
    "atexit after error": "import atexit\natexit.register(print, 'bye')\nraise ValueError",
    "del": "class A:\n    def __del__(self):\n        raise ValueError('in del')\na = A()\ndel a",
    "hook": "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t, v, tb.tb_frame.f_code.co_name, tb.tb_lineno, sys.exc_info())\nraise ValueError(1)",
    "hook raises": "import sys\ndef hook(t, v, tb):\n    raise KeyError('in hook')\nsys.excepthook = hook\nraise ValueError(1)",
    "hook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(41)\nraise ValueError(1)",
    "hook missing": "import sys\ndel sys.excepthook\nraise ValueError(1)",
    "hook and interrupt": "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t)\nraise KeyboardInterrupt",
    "last value": "import sys, atexit\natexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))\n\nraise ValueError(1)",
    "traceback module": "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()",
    "logging": "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('logged')",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    raise ValueError('a')\nasyncio.run(f())",
    "warning": "import warnings\nwarnings.warn('careful')\ndef f():\n    warnings.warn('inner', DeprecationWarning)\nf()",
    "order": "import sys\nprint('out 1')\nprint('err 1', file=sys.stderr)\nprint('out 2', end='')\nsys.stderr.write('err 2')\nraise ValueError",
    "closed stdout": "import sys\nsys.stdout.close()\nraise ValueError(1)",
    "replaced stdout": "import sys, io\nsys.stdout = io.StringIO()\nprint('lost')\nraise ValueError(1)",
    "exits in atexit": "import atexit, sys\natexit.register(lambda: sys.exit(9))",
    "late thread": (
        "import threading, pickle, time\nclass A: pass\nmain = threading.main_thread()\n"
        "def late():\n    main.join()\n    print(pickle.loads(pickle.dumps(A())).__class__.__module__)\nthreading.Thread(target=late).start()"
    ),
    "late pickle": "import atexit, pickle\nclass A: pass\natexit.register(lambda: print(type(pickle.loads(pickle.dumps(A()))).__module__))",
    "late file": "import atexit\natexit.register(lambda: print('__file__' in globals(), '__cached__' in globals()))",
    "late file after error": "import atexit\natexit.register(lambda: print('__file__' in globals()))\nraise ValueError",
    "late file after exit": "import atexit\natexit.register(lambda: print('__file__' in globals()))\nraise SystemExit(2)",
}

LOOKS = {
    "main": (
        "import sys\nm = sys.modules['__main__']\nassert m.__dict__ is globals()\n"
        "print({k: repr(v).split(' at 0x')[0] for k, v in sorted(globals().items()) if k != 'm'})\n"
        "print(__loader__.name, __loader__.path, __spec__, __builtins__, list(globals())[:9])"
    ),
    "argv": "import sys\nprint(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions, sys.executable)",
    "environment": "import os\nprint(sorted(os.environ.items()))",
    "c environment": "import os, subprocess\nprint(sorted(subprocess.run(['env'], capture_output=True, text=True).stdout.splitlines()))",
    "descriptors": "import os\nprint([(n, os.readlink(f'/proc/self/fd/{n}')) for n in ('0',)], sorted(os.listdir('/proc/self/fd')), open(__file__).fileno())",
    "signals": "import signal\nprint([(s, signal.getsignal(s)) for s in sorted(signal.valid_signals())], signal.pthread_sigmask(0, []))",
    "signals of the kernel": "print([l for l in open('/proc/self/status') if l.startswith(('Sig', 'Shd', 'Threads'))])",
    "wakeup": "import signal\nprint(signal.set_wakeup_fd(-1))",
    "limits": "import resource\nprint([(n, resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n.startswith('RLIMIT')])",
    "places": "import os\nu = os.umask(0)\nprint(oct(u), os.getcwd(), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.nice(0), os.sched_getaffinity(0))",
    "time zone": "import time\nprint(time.tzname, time.localtime(0).tm_hour)",
    "streams": (
        "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
        "    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), type(s.buffer), s.newlines)\n"
        "print(sys.stdout is sys.__stdout__, sys.stdin.read())"
    ),
    "stack": "import sys, threading\nprint(threading.current_thread(), threading.main_thread().name, threading.active_count())\nprint(sys.gettrace(), sys.getprofile())",
    "annotations": (
        "from __future__ import annotations\nimport dataclasses, typing\nx: int = 1\n@dataclasses.dataclass\nclass A:\n    y: B | None = None\nclass B: pass\n"
        "print(__annotations__, typing.get_type_hints(A))"
    ),
    "no future leaks": "x: undefined_name\n",
    "inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))",
    "import main": "import __main__\nx = 5\nprint(__main__.x, __name__)\nif __name__ == '__main__':\n    print('yes')",
    "own folder": "import beside\nprint(beside.__file__)",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "gc": "import gc\nprint(gc.isenabled(), gc.get_threshold(), gc.get_debug())",
    "tracker": "from multiprocessing import resource_tracker as r\nprint(r._resource_tracker._pid, r._resource_tracker._fd)",
    "event loop": "import asyncio\nprint(asyncio.run(asyncio.create_subprocess_exec('true')).pid > 0)",
    "children": "import os, subprocess\nprint(subprocess.run(['sh', '-c', 'exit 3']).returncode)\nprint(os.popen('echo hi').read())\n",
    "wait": "import os\ntry:\n    print(os.waitpid(-1, 0))\nexcept ChildProcessError as e:\n    print(e)",
}

POOLS = {
    method: (
        "import multiprocessing as mp\nimport concurrent.futures as cf\nclass Thing:\n    def __init__(self, x):\n        self.x = x\n"
        "def double(t):\n    return Thing(t.x * 2)\n"
        f"if __name__ == '__main__':\n    ctx = mp.get_context('{method}')\n"
        "    with cf.ProcessPoolExecutor(2, mp_context=ctx) as pool:\n        print([t.x for t in pool.map(double, [Thing(1), Thing(2)])])\n"
        "    q = ctx.Queue()\n    p = ctx.Process(target=q.put, args=(Thing(3),))\n    p.start(); print(q.get().x); p.join(); print(p.exitcode)\n"
        "    with mp.Manager() as m:\n        print(m.dict(a=1))\n"
        "    from multiprocessing import shared_memory\n    s = shared_memory.SharedMemory(create=True, size=8); s.close(); s.unlink()\n"
    )
    for method in ("fork", "spawn", "forkserver")
}  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "beside.py").write_text("")
    (folder / "broken_helper.py").write_text("def broken(:\n")
    with Driver(folder, Command(script="main.py", args=("--x", "1", "ä"))) as driver:
        yield driver


def both(driver: Driver, text: str, env: dict[str, str] | None = None) -> tuple[Outcome, Outcome]:
    (driver.folder / "main.py").write_text(text, encoding="latin-1" if "latin-1" in text else "utf-8")
    expected = fresh(driver.folder, ["main.py", "--x", "1", "ä"], env={**base_env(), **(env or {})})
    return driver.run(env=env), expected


@pytest.mark.parametrize("name", EXITS)
def test_exit_is_the_same(driver: Driver, name: str) -> None:
    got, expected = both(driver, EXITS[name])
    assert got == expected


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_told_the_same(driver: Driver, name: str) -> None:
    got, expected = both(driver, ERRORS[name])
    assert got == expected


@pytest.mark.parametrize("name", LOOKS)
def test_script_sees_the_same(driver: Driver, name: str) -> None:
    got, expected = both(driver, LOOKS[name], env={"TZ": "Asia/Tokyo", "OTHER": "ü"})
    assert got.same == expected.same
    assert got == expected


@pytest.mark.parametrize("name", POOLS)
def test_multiprocessing_works(driver: Driver, name: str) -> None:
    got, expected = both(driver, POOLS[name])
    assert got == expected
    assert got.code == 0, got.text


def test_variable_can_be_unset(driver: Driver) -> None:
    (driver.folder / "main.py").write_text("import os; print('HOME' in os.environ, os.getenv('A'))")
    assert driver.run(env={"HOME": None, "A": ""}).text == "False \n"


def test_children_of_a_rank_hold_no_descriptor_of_the_launcher(driver: Driver) -> None:
    (driver.folder / "main.py").write_text(
        "import os, sys\nif os.fork() == 0:\n    print(sorted(os.listdir('/proc/self/fd')))\nelse:\n    os.wait()"
    )
    assert driver.run().text == "['0', '1', '2', '3']\n"


def test_process_title_names_script_and_rank(driver: Driver) -> None:
    (driver.folder / "main.py").write_text("print(open('/proc/self/cmdline').read().strip('\\0 '))")
    assert driver.run().text == f"{sys.executable} main.py --x 1 ä [rank 0]\n"


def test_ranks_differ_in_what_chance_gives_them(driver: Driver) -> None:
    text = "import random, uuid, tempfile, secrets, multiprocessing as m\nprint(random.random(), uuid.uuid4(), secrets.token_hex(), m.current_process().authkey.hex())"
    (driver.folder / "main.py").write_text(text)
    cycle = driver.fork(3)
    words = [set((driver.ended(cycle, r), driver.rank_log(cycle, r).read_text())[1].split()) for r in range(3)]
    assert [len(w) for w in words] == [4, 4, 4]
    assert len(set().union(*words)) == 12


def test_output_of_several_cycles_is_appended(driver: Driver) -> None:
    (driver.folder / "main.py").write_text("print('line')")
    log = driver.folder / "same.log"
    for _ in range(2):
        driver.ended(_fork_into(driver, log))
    assert log.read_text() == "line\nline\n"


def _fork_into(driver: Driver, log: Path) -> int:
    from ft_launcher.shell.process import RankSpec

    driver.cycle += 1
    driver.call(driver.zygote.fork_ranks, driver.cycle, [RankSpec(rank=0, slot=0, log_path=str(log))])
    return driver.cycle


def test_log_that_cannot_be_opened_ends_the_rank_and_says_so(driver: Driver) -> None:
    cycle = _fork_into(driver, Path("/proc/nothing/x.log"))
    assert driver.ended(cycle).code == 71
    assert "rank 0 could not be started: FileNotFoundError" in driver.log()


# --- other shapes of a command ---


def run_command(folder: Path, command: Command, **options: object) -> tuple[Outcome, Outcome]:
    with Driver(folder, command, **options) as driver:
        got = driver.run()
    flags = options.get("flags", ())
    return got, fresh(folder, command.argv, flags=flags)  # type: ignore[arg-type]


SHOW = "import sys\nprint(sys.argv, sys.path, sys.orig_argv, __name__, __file__, __package__, __spec__ and __spec__.name, __cached__)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')\n")
    (package / "other.py").write_text("X = 5\n")
    (package / "mod.py").write_text(SHOW + "from .other import X\nfrom . import other\nprint(X)\n1 / 0\n")
    (package / "__main__.py").write_text(SHOW + "from .other import X\nsys.exit(X)\n")
    app = tmp_path / "app"
    app.mkdir()
    (app / "__main__.py").write_text(SHOW + "import near\nnear.fail()\n")
    (app / "near.py").write_text("def fail():\n    raise ValueError('near')\n")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for path in app.iterdir():
            archive.write(path, path.name)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "real.py").write_text(SHOW + "import neighbour\n")
    (tmp_path / "sub" / "neighbour.py").write_text("print('neighbour')\n")
    (tmp_path / "link.py").symlink_to("sub/real.py")
    (tmp_path / "empty").mkdir()
    return tmp_path


COMMANDS = {
    "module": Command(module="pack.mod", args=("a", "-m")),
    "package": Command(module="pack"),
    "no module": Command(module="pack.nothing"),
    "no package": Command(module="nothing_here"),
    "folder": Command(script="app", args=("a",)),
    "dotted folder": Command(script="./app"),
    "folder without main": Command(script="empty"),
    "zip": Command(script="app.zip", args=("b",)),
    "subfolder": Command(script="sub/real.py"),
    "dotted": Command(script="./sub/../sub/real.py"),
    "link": Command(script="link.py"),
    "missing": Command(script="not/there.py"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_shape_of_command(folder: Path, name: str, method: str) -> None:
    got, expected = run_command(folder, COMMANDS[name], start_method=method)
    assert got.same == expected.same
    assert got == expected


def test_compiled_script(folder: Path) -> None:
    import py_compile

    py_compile.compile(str(folder / "sub" / "real.py"), cfile=str(folder / "sub" / "done.pyc"))
    got, expected = run_command(folder, Command(script="sub/done.pyc"))
    assert got == expected


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_flags_of_python(folder: Path, method: str) -> None:
    (folder / "f.py").write_text("import sys\nassert False\nprint(sys.flags, sys.orig_argv, sys._xoptions, sys.warnoptions, sys.path)\n")
    got, expected = run_command(folder, Command(script="f.py"), flags=("-O", "-P", "-X", "utf8", "-W", "error"), start_method=method)
    assert got == expected
    assert got.code == 0


def test_output_is_block_buffered_where_the_user_wants_that(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("import os\nprint('lost')\nos._exit(0)\n")
    with Driver(tmp_path, Command(script="b.py"), env={**base_env(), "PYTHONUNBUFFERED": ""}) as driver:
        assert driver.run().text == ""


def test_process_attributes_that_the_agent_was_started_with(tmp_path: Path) -> None:
    """nohup, a lower soft limit and a strict umask reach a rank as they reach a script."""
    (tmp_path / "a.py").write_text(
        "import os, signal, resource\nu = os.umask(0)\nprint(u, signal.getsignal(signal.SIGHUP), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN), os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (180, old[2][1]))
    try:
        got, expected = run_command(tmp_path, Command(script="a.py"))
    finally:
        signal.signal(signal.SIGHUP, old[0])
        os.umask(old[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, old[2])
    assert got == expected
    assert got.text.startswith(f"{0o027} 1 (180")


def test_working_folder_is_not_importable_for_the_launcher(tmp_path: Path) -> None:
    """A folder full of modules named like the standard library's must not break the zygote of a script that lies elsewhere."""
    for name in ("json", "socket", "select", "ft_launcher", "setproctitle"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "s.py").write_text("import json, sys\nprint(json.dumps([1]), sys.path[0])")
    got, expected = run_command(tmp_path, Command(script="sub/s.py"))
    assert got == expected
    assert got.code == 0
