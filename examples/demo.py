"""`make demo`: train a real Megatron-core GPT on real text under ft-launch, kill a rank on the way, and show the recovery.

Everything happens on this machine: four ranks (TP 2 x PP 2, gloo on a CPU), the embedded store, no server, nothing downloaded but Python packages. The script only does
what you would do by hand: it starts `ft-launch`, waits until training has come some way, and sends one rank a SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "megatron_gpt"))
from options import PRELOAD  # noqa: E402 - the example's own list of what is worth importing once

VICTIM = 2


def main() -> int:
    """Run the demonstration; returns the launcher's exit code, or 1 when the recovery did not happen."""
    args = _arguments()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    command = _command(args)
    print("$ ft-launch " + " ".join(_short(word) for word in command[3:]), flush=True)
    launcher = subprocess.Popen(command, cwd=HERE.parent, env={"GLOO_SOCKET_IFNAME": "lo", **os.environ})
    try:
        _hurt(launcher, args)
        code = launcher.wait()
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    return _summary(args, code)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, kill a rank, recover.")
    parser.add_argument("--iters", type=int, default=200, help="iterations to train")
    parser.add_argument("--kill-at", type=int, default=70, help="iteration at which one rank gets a SIGKILL")
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".demo", help="where logs and checkpoints go (emptied first)")
    return parser.parse_args()


def _command(args: argparse.Namespace) -> list[str]:
    launch = [
        "--tp",
        "2",
        "--pp",
        "2",
        "--nproc-per-node",
        "4",
        "--run-id",
        "demo",
        "--log-dir",
        _short(str(args.folder / "logs")),
        "--tee",
        "0,3",
    ]
    places = ["--save", _short(str(args.folder / "checkpoints")), "--log", _short(str(_losses(args)))]
    train = ["--train-iters", str(args.iters), "--save-interval", "25", *places]
    return [sys.executable, "-m", "ft_launcher", *launch, "--preload", PRELOAD, _short(str(HERE / "megatron_gpt" / "train.py")), *train]


def _losses(args: argparse.Namespace) -> Path:
    folder: Path = args.folder
    return folder / "losses.jsonl"


def _short(word: str) -> str:
    return os.path.relpath(word, HERE.parent) if word.startswith("/") else word


def _journal(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for path in args.folder.glob("logs/demo.*/journal.*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may just be being written
                yield json.loads(line)


def _hurt(launcher: subprocess.Popen[bytes], args: argparse.Namespace) -> None:
    """Wait for the iteration, then kill."""
    while launcher.poll() is None:
        lines = _losses(args).read_text().splitlines() if _losses(args).exists() else []
        if len(lines) >= args.kill_at:
            pids = next(e["pids"] for e in _journal(args) if e["kind"] == "forked")
            print(f"\n>>> demo: kill -9 {pids[str(VICTIM)]}   (that is rank {VICTIM}, after iteration {len(lines)})\n", flush=True)
            os.kill(pids[str(VICTIM)], signal.SIGKILL)
            return
        time.sleep(0.05)


def _summary(args: argparse.Namespace, code: int) -> int:
    entries = list(_journal(args))
    back = [e for e in entries if e["kind"] == "recovered"]
    decided = [e for e in entries if e["kind"] == "decision" and e["cause"] != "finished"]
    print("\n>>> demo: what the launcher knows about it (ft-state show):\n", flush=True)
    subprocess.run([sys.executable, "-m", "ft_launcher.dashboard.cli", "show", str(args.folder / "logs")], cwd=HERE.parent, check=False)
    if code != 0 or not back or not decided:
        print(f"\n>>> demo: NOT as it should be: exit code {code}, {len(decided)} faults decided, {len(back)} recoveries", flush=True)
        return code or 1
    print(
        f"\n>>> demo: every rank was training again {back[0]['seconds']:.2f} s after the SIGKILL; incident and logs are in {_short(str(args.folder))}/logs"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
