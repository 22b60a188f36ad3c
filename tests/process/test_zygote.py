"""The zygote's own promises: safe to fork or it says why, loud about imports, aware of edited sources, and a standby store with and without torch."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from ft_launcher.shell import forksafety
from ft_launcher.shell.process import Command, Pong, RankStarted, SourcesChanged, StandbyFailed, StandbyReady, ZygoteLost
from tests.process.driver import Driver, base_env, fresh, gone, wait_until

UNSAFE = {
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()",
        "2 threads run (watcher)",
    ),
    "native thread": ("import concurrent.futures as f\np = f.ThreadPoolExecutor(1)\np.submit(int).result()", "2 threads run"),
    "child": ("import subprocess\np = subprocess.Popen(['sleep', '600'])", "a child process runs"),
    "import error": ("import no_such_thing", "preloading 'bad' failed: ModuleNotFoundError: No module named 'no_such_thing'"),
    "syntax": ("def f(:", "SyntaxError"),
    "exit": ("import sys; sys.exit('not today')", "preloading 'bad' failed: SystemExit: not today"),
    "its place": ("import os\nos.environ['RANK']", "preloading 'bad' failed: KeyError: 'RANK' ({folder}/bad.py:2)"),
    "bad fork": (
        "import os, sys, types\nsys.modules['torch'] = t = types.SimpleNamespace(version=types.SimpleNamespace(cuda=None))\n"
        "me = os.getpid()\nt.cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != me)",
        "torch has asked the CUDA driver for devices",
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_import_is_named_and_ranks_are_spawned(tmp_path: Path, name: str) -> None:
    text, reason = UNSAFE[name]
    (tmp_path / "good.py").write_text("X = 1")
    (tmp_path / "bad.py").write_text(text)
    (tmp_path / "main.py").write_text("import sys, os\nprint('bad' in sys.modules, sorted(os.listdir('/proc/self/fd')))")
    with Driver(tmp_path, Command(script="main.py"), preload=("good", "bad")) as driver:
        assert driver.ready.method == "spawn"
        assert driver.ready.why is not None
        assert reason.replace("{folder}", str(tmp_path)) in driver.ready.why
        assert "bad" in driver.ready.why
        assert "\n" not in driver.ready.why
        assert driver.ready.preloaded == ()
        assert driver.ready.pid == driver.zygote.pid
        assert driver.ready.why in driver.log()
        assert driver.run().text == "False ['0', '1', '2', '3']\n"
        assert psutil.Process(driver.zygote.pid).num_threads() == 1
        wait_until(lambda: not psutil.Process(driver.zygote.pid).children(), "what the import had started to be gone")


def test_driver_library_that_is_initialised(tmp_path: Path) -> None:
    """A library named like CUDA's driver whose answer is 0: somebody has called cuInit. With the answer 3 nobody has."""
    (tmp_path / "main.py").write_text("")
    for answer, method in ((0, "spawn"), (3, "fork")):
        source = tmp_path / "cuda.c"
        source.write_text(f"int cuDeviceGetCount(int *n) {{ *n = 1; return {answer}; }}\n")
        library = tmp_path / f"libcuda.so.{answer + 1}"
        subprocess.run(["cc", "-shared", "-o", str(library), str(source)], check=True)
        (tmp_path / "gpu.py").write_text(f"import ctypes\nlib = ctypes.CDLL({str(library)!r})\n")
        with Driver(tmp_path, Command(script="main.py"), preload=("gpu",)) as driver:
            assert driver.ready.method == method, driver.ready
            assert (driver.ready.why or "").endswith("the CUDA driver is initialised (cuDeviceGetCount answers 0)" if answer == 0 else "")


def test_open_memory_device_is_seen(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    assert forksafety.uvm_open(str(device)) is None
    with device.open("w"):
        assert str(device) in (forksafety.uvm_open(str(device)) or "")


@pytest.mark.parametrize("name", ["json", "monitors", "socket", "ft_launcher"])
def test_script_s_own_module_is_not_hidden(tmp_path: Path, name: str) -> None:
    """The script's folder has a module of a name that the launcher has loaded: fresh Python takes the folder's, and so must the rank."""
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("print('mine')")
    (tmp_path / "main.py").write_text(f"import {name}\nprint({name}.__file__)")
    with Driver(tmp_path, Command(script="main.py")) as driver:
        assert driver.ready.method == "spawn"
        assert repr(name) in str(driver.ready.why)
        assert driver.run() == fresh(tmp_path, ["main.py"])


def test_script_s_folder_comes_first_while_preloading(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "colorsys.py").write_text("MINE = True")
    (tmp_path / "sub" / "main.py").write_text("import colorsys, sys\nprint(colorsys.MINE, sys.path)")
    with Driver(tmp_path, Command(script="sub/main.py"), preload=("colorsys",)) as driver:
        assert driver.ready.method == "fork"
        assert driver.run() == fresh(tmp_path, ["sub/main.py"])


def test_what_an_import_sets_stays_and_the_rank_s_values_win(tmp_path: Path) -> None:
    text = "import os, signal\nos.environ['SET'] = 'by import'\nos.environ.setdefault('DEFAULT', 'by import')\nos.environ.pop('REMOVED', None)\n"
    (tmp_path / "sets.py").write_text(text + "signal.signal(signal.SIGUSR2, signal.SIG_IGN)")
    (tmp_path / "main.py").write_text(
        "import sets, os, signal\nprint([os.environ.get(k) for k in ('SET', 'DEFAULT', 'REMOVED', 'OPENBLAS_NUM_THREADS', 'PYTORCH_NVML_BASED_CUDA_CHECK')])\n"
        "print(signal.getsignal(signal.SIGUSR2))"
    )
    env = {**base_env(), "REMOVED": "1"}
    with Driver(tmp_path, Command(script="main.py"), preload=("sets",), env=env) as driver:
        assert any("SIGUSR2" in warning for warning in driver.ready.warnings)
        assert driver.run() == fresh(tmp_path, ["main.py"], env=env)
        assert "'mine'" in driver.run(env={"DEFAULT": "mine"}).text


def test_descriptors_of_a_preloaded_module(tmp_path: Path) -> None:
    """Its files stay usable, its sockets and pipes lead nowhere, and neither number is given to the script."""
    (tmp_path / "opens.py").write_text("import os, socket\nfile = open('data', 'a')\npair = socket.socketpair()\nr, w = os.pipe()")
    (tmp_path / "main.py").write_text(
        "import opens, os\nopens.file.write('x'); opens.file.flush()\nmine = open('mine', 'w')\n"
        "taken = {opens.file.fileno(), opens.pair[0].fileno(), opens.pair[1].fileno(), opens.r, opens.w}\n"
        "print(mine.fileno() in taken, os.readlink(f'/proc/self/fd/{opens.r}'), os.readlink(f'/proc/self/fd/{opens.pair[0].fileno()}'))\n"
    )
    with Driver(tmp_path, Command(script="main.py"), preload=("opens",)) as driver:
        assert driver.run().text == "False /dev/null /dev/null\n"
        assert (tmp_path / "data").read_text() == "x"


def test_nothing_of_the_zygote_runs_at_a_rank_s_exit(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import atexit\nimport sys\nprint(atexit._ncallbacks() - ('logging' in sys.modules))\natexit.register(print, 'mine')"
    )
    with Driver(tmp_path, Command(script="main.py")) as driver:
        got = driver.run()
    expected = fresh(tmp_path, ["main.py"])
    assert got.text.splitlines()[-1] == expected.text.splitlines()[-1] == "mine"
    assert got == expected


def test_edited_source_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("X = 1")
    (tmp_path / "main.py").write_text("import helper\nprint(helper.X)")
    with Driver(tmp_path, Command(script="main.py"), preload=("helper",)) as driver:
        assert driver.run().text == "1\n"
        (tmp_path / "main.py").write_text("import helper\nprint('edited', helper.X)")
        assert driver.run().text == "edited 1\n", "the script itself is read at each start"
        (tmp_path / "helper.py").write_text("X = 22")
        cycle = driver.fork(2)
        assert driver.expect(SourcesChanged, lambda e: e.cycle == cycle).files == (str(tmp_path / "helper.py"),)
        assert not [e for e in driver.events if isinstance(e, RankStarted) and e.cycle == cycle]


def test_stalled_file_system_does_not_hold_up_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the sources that never ends is given up on; the loop answers meanwhile."""
    (tmp_path / "stall.py").write_text(
        "import os, time\nreal = os.stat\ndef slow(path, *a, **k):\n    if str(path).endswith('stall.py') and os.path.exists('stalled'):\n        time.sleep(600)\n"
        "    return real(path, *a, **k)\nos.stat = slow\n"
    )
    (tmp_path / "main.py").write_text("print('ran')")
    with Driver(tmp_path, Command(script="main.py"), preload=("stall",)) as driver:
        (tmp_path / "stalled").touch()
        cycle = driver.fork(1)
        driver.call(driver.zygote.ping)
        driver.expect(Pong)
        assert driver.ended(cycle).code == 0
        assert "did not tell within" in driver.log()


@pytest.mark.parametrize(("text", "how"), [("import os; os._exit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 11)", "SIGSEGV")])
def test_zygote_that_dies_importing_names_the_import(tmp_path: Path, text: str, how: str) -> None:
    (tmp_path / "deadly.py").write_text(text)
    (tmp_path / "main.py").write_text("")
    driver = Driver(tmp_path, Command(script="main.py"), preload=("deadly",))
    driver.loop.run_until_complete(driver.zygote.start())
    wait_until(lambda: (driver.turn(0.2), bool(driver.events))[1], "ZygoteLost")
    driver.__exit__()
    [lost] = driver.events
    assert isinstance(lost, ZygoteLost)
    assert how in lost.reason
    assert "'deadly'" in lost.reason


def test_missing_folder_is_an_oserror_and_starts_nothing(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    driver = Driver(tmp_path, Command(script="main.py"), cwd=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        driver.loop.run_until_complete(driver.zygote.start())
    driver.__exit__()
    assert psutil.Process().num_fds() == before
    assert driver.zygote.pid is None


def test_standby_store_without_torch_fails_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch for you')")
    (tmp_path / "main.py").write_text("")
    with Driver(tmp_path, Command(script="main.py"), start_method="spawn", env={**base_env(), "PYTHONPATH": str(tmp_path)}) as driver:
        driver.call(driver.zygote.prepare_standby, 1, "")
        assert "no torch for you" in driver.expect(StandbyFailed).reason


def test_standby_store_with_spawn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "main.py").write_text(
        "import torch.distributed as d, os\ns = d.TCPStore('127.0.0.1', int(os.environ['PORT']), is_master=False)\ns.set('a', 'b')\nprint(s.get('a'))"
    )
    with Driver(tmp_path, Command(script="main.py"), start_method="spawn", early_standby=True) as driver:
        driver.call(driver.zygote.prepare_standby, 1, "127.0.0.1")
        port = driver.expect(StandbyReady).port
        got = driver.run(env={"PORT": str(port)})
        assert (got.code, got.text.splitlines()[-1]) == (0, "b'b'")
        assert driver.reap(driver.cycle).strays == 0
        children = psutil.Process(driver.zygote.pid).children()
        assert len(children) == 2, "the store and the blank one for the next cycle"
        serving = next(p for p in children if any(c.status == "LISTEN" for c in p.net_connections()))
        driver.call(driver.zygote.release_standby, 1)
        wait_until(lambda: gone(serving.pid), "the store to end")


def test_store_that_dies_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "main.py").write_text("")
    with Driver(tmp_path, Command(script="main.py"), preload=("torch",)) as driver:
        driver.call(driver.zygote.prepare_standby, 4, "127.0.0.1")
        driver.expect(StandbyReady)
        [store] = psutil.Process(driver.zygote.pid).children()
        store.send_signal(signal.SIGKILL)
        assert "signal 9" in driver.expect(StandbyFailed, lambda e: e.token == 4).reason
        driver.call(driver.zygote.prepare_standby, 5, "127.0.0.1")
        driver.expect(StandbyReady, lambda e: e.token == 5)
        zygote = driver.zygote.pid
        [store] = psutil.Process(zygote).children()
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: gone(store.pid), "the store to die with its zygote")
