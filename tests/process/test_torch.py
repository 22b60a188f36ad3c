"""Ranks forked from a process that has imported torch: what users of torch do, compared with a fresh interpreter where the text can be compared."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.shell.process import Command, StandbyFailed, StandbyReady
from monitors import layout
from tests.process.driver import Driver, Outcome, base_env, fresh, make_page

pytest.importorskip("torch")

SAME = {
    "descriptors": "import os, torch\nprint(sorted(os.listdir('/proc/self/fd')))",
    "threads": "import os, torch\nprint(torch.get_num_threads(), torch.get_num_interop_threads(), len(os.listdir('/proc/self/task')))",
    "environment": "import os, torch\nprint(sorted(os.environ.items()))",
    "signals": "import signal, torch\nprint([l for l in open('/proc/self/status') if l.startswith('Sig')])",
    "error": "import torch\nm = torch.nn.Linear(2, 3)\nm(torch.ones(5))",
    "modules": "import sys, torch\nprint(sys.modules['torch'] is torch, sys.path)",
    "parallel": "import torch\ntorch.set_num_threads(2)\na = torch.ones(600, 600)\nprint((a @ a).sum().item(), (a * 2).sum().item())",
    "warnings": "import warnings, torch\nprint(warnings.filters[:3])",
    "compiles nothing": "import torch\nprint(torch.default_generator.device, torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())",
}

WORKS = {
    f"loader {method}": (
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class D(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): return torch.tensor([float(i)])\n"
        f"if __name__ == '__main__':\n    d = DataLoader(D(), batch_size=4, num_workers=2, multiprocessing_context='{method}')\n    print([b.sum().item() for b in d])\n"
    )
    for method in ("fork", "spawn")
} | {
    "mp spawn": "import torch\nimport torch.multiprocessing as mp\ndef f(i, q):\n    q.put((torch.ones(2) * i).sum().item())\nif __name__ == '__main__':\n"
    "    q = mp.get_context('spawn').SimpleQueue()\n    c = mp.spawn(f, (q,), nprocs=2, join=False)\n    print(sorted(q.get() for _ in range(2)))\n    c.join()\n",
    "numpy": "import numpy as np\na = np.ones((400, 400))\nprint((a @ a).sum())",
    "gloo": "import os, torch, torch.distributed as d\nd.init_process_group('gloo', init_method=f'file://{os.getcwd()}/rdzv.{os.getpid()}', rank=0, world_size=1)\n"
    "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\nm(torch.ones(1, 2)).sum().backward()\nprint('ok')\nd.destroy_process_group()",
}  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("torch"), Command(script="main.py"), preload=("torch",)) as driver:
        assert driver.ready.method == "fork", driver.ready
        assert driver.ready.preloaded == ("torch",)
        yield driver


def forked(driver: Driver, text: str, env: dict[str, str | None] | None = None) -> Outcome:
    (driver.folder / "main.py").write_text(text)
    return driver.run(env=env)


@pytest.mark.parametrize("name", SAME)
def test_script_sees_the_same(driver: Driver, name: str) -> None:
    got, expected = forked(driver, SAME[name]), fresh(driver.folder, ["main.py"], env={**base_env(), "PYTHONWARNINGS": ""})
    ours, theirs = got.same.splitlines(), expected.same.splitlines()
    if name == "environment":
        theirs = [line.replace("('PYTHONWARNINGS', ''), ", "") for line in theirs]
    assert ours == [line for line in theirs if "pynvml" not in line]  # the zygote has shown that warning
    assert got.code == expected.code


@pytest.mark.parametrize("name", WORKS)
def test_torch_users_work(driver: Driver, name: str) -> None:
    got = forked(driver, WORKS[name])
    assert (got.code, got.signal) == (0, None), got.text


def test_seeds_differ_between_ranks(driver: Driver) -> None:
    (driver.folder / "main.py").write_text(
        "import torch, numpy as np\nprint(torch.initial_seed(), torch.rand(1).item(), np.random.rand(), torch.randn(1).item())"
    )
    cycle = driver.fork(3)
    words = [(driver.ended(cycle, r), driver.rank_log(cycle, r).read_text().split())[1] for r in range(3)]
    assert len({word for line in words for word in line}) == 12


def test_seeded_ranks_agree_with_a_fresh_process(driver: Driver) -> None:
    text = "import torch, numpy as np, random\ntorch.manual_seed(5); np.random.seed(5); random.seed(5)\nprint(torch.rand(3), np.random.rand(3), random.random())"
    got = forked(driver, text)
    assert got.text.splitlines()[-1] == fresh(driver.folder, ["main.py"]).text.splitlines()[-1]


def test_a_rank_s_own_thread_count_is_honoured(driver: Driver) -> None:
    got = forked(driver, "import os, torch\nprint(torch.get_num_threads())", env={"OMP_NUM_THREADS": "3"})
    assert got.text == "3\n"


def test_record_writes_the_error_file(driver: Driver) -> None:
    path = driver.folder / "error.json"
    text = "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n    raise ValueError('bad data')\nmain()"
    got = forked(driver, text, env={"TORCHELASTIC_ERROR_FILE": str(path), "LOCAL_RANK": "0"})
    assert got.code == 1
    message = json.loads(path.read_text())["message"]
    assert "ValueError: bad data" in json.dumps(message)
    assert "ft_launcher" not in json.dumps(message)


def test_record_without_a_file_prints_as_ever(driver: Driver) -> None:
    got = forked(
        driver,
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n    raise ValueError('bad data')\nmain()",
    )
    assert got.text.rstrip().endswith("ValueError: bad data")
    assert "ft_launcher" not in got.text


REDUCE = "import os, torch, torch.distributed as d\nd.init_process_group('gloo')\nt = torch.ones(1) * (d.get_rank() + 1)\nd.all_reduce(t)\nprint(t.item())\nd.destroy_process_group()"


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_ranks_meet_at_the_standby_store(driver: Driver, host: str) -> None:
    token = 10 + len(host)
    driver.call(driver.zygote.prepare_standby, token, host)
    port = driver.expect(StandbyReady, lambda e: e.token == token).port
    (driver.folder / "main.py").write_text(REDUCE)
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    cycle = driver.fork(3, env)
    ends = [driver.ended(cycle, r) for r in range(3)]
    texts = [driver.rank_log(cycle, r).read_text() for r in range(3)]
    assert [e.code for e in ends] == [0, 0, 0], texts
    assert all("6.0" in text for text in texts)
    assert driver.reap(cycle).strays == 0, "the store is no stray"
    driver.call(driver.zygote.release_standby, token)


def test_store_of_a_host_that_is_not_here_fails_with_a_reason(driver: Driver) -> None:
    driver.call(driver.zygote.prepare_standby, 77, "192.0.2.1")
    assert "Cannot assign requested address" in driver.expect(StandbyFailed, lambda e: e.token == 77).reason


def word(fd: int, at: int) -> int:
    return int.from_bytes(os.pread(fd, 8, at * 8), "little", signed=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_section_page_belongs_to_the_rank(tmp_path: Path, method: str) -> None:
    (tmp_path / "main.py").write_text(
        "from monitors.client import attach\nmon = attach()\nwith mon.section('step', iteration=7):\n    pass\nraise ValueError('told')"
    )
    fd = make_page()
    try:
        with Driver(tmp_path, Command(script="main.py"), start_method=method) as driver:
            cycle = driver.fork(1, page_fd=fd, stacks_path=str(tmp_path / "stacks"))
            assert driver.ended(cycle).code == 1
            text = driver.rank_log(cycle, 0).read_text()
            assert word(fd, layout.OWNER_PID) == driver.started(cycle).pid
            assert word(fd, layout.ITERATION) == 7, text
            assert b"ValueError: told" in os.pread(fd, layout.TEXT_BYTES, layout.EXCEPTION_TEXT * 8)
            assert text.rstrip().endswith("ValueError: told")
            assert (tmp_path / "stacks").exists()
    finally:
        os.close(fd)


def test_each_rank_has_its_own_page_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import os\nprint([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    pages = [make_page() for _ in range(3)]
    try:
        with Driver(tmp_path, Command(script="main.py")) as driver:
            from ft_launcher.shell.process import RankSpec

            specs = [RankSpec(rank=r, slot=r, log_path=str(driver.rank_log(1, r)), page_fd=pages[r]) for r in range(3)]
            driver.call(driver.zygote.fork_ranks, 1, specs)
            for r in range(3):
                driver.ended(1, r)
                assert word(pages[r], layout.OWNER_PID) == driver.started(1, r).pid
                seen = eval(driver.rank_log(1, r).read_text())
                assert sum(layout.MEMFD_NAME in link for link in seen) <= 2, seen  # the page, and what mmap keeps of it
    finally:
        for fd in pages:
            os.close(fd)
