"""torchrun's spellings: what a command line written for torchrun means here.

Three kinds. The same thing under another name becomes ours. What our way of starting has no use for on this job (a master port: each
cycle's store listens on a port that the kernel chose) is dropped with a note. What would silently do something else is refused, with what
to say instead. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ft_launcher.edge.sources import Setting
from ft_launcher.edge.values import nearest, show
from ft_launcher.errors import ConfigError

SAME = {"rdzv-id": "run-id", "local-addr": "node-addr", "node-rank": "node-order"}
"""torchrun's name -> ours, where the value means the same."""
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
UNUSED = {
    "master-addr": "the node of rank 0 is told to every rank",
    "master-port": "each cycle has its own store on a port that the kernel chose",
}
TAKES_VALUE = (*SAME, *UNUSED, "rdzv-backend", "rdzv-endpoint")
SWITCHES = ("standalone",)
REFUSED = {
    "rdzv-conf": "use --join-wait, --store-timeout, --store-ca, --store-cert, --store-key",
    "monitor-interval": "exits are reported at once, there is nothing to poll; leave it out",
    "shutdown-timeout": "use --term-grace",
    "role": "all ranks have the role 'default'; leave it out",
    "redirects": "every rank's output goes to a file in --log-dir anyway; say with --tee which ranks the console shows",
    "local-ranks-filter": "say with --tee which ranks the console shows",
    "duplicate-stdout-filters": "each rank's output is in a file of its own in --log-dir",
    "duplicate-stderr-filters": "each rank's output is in a file of its own in --log-dir",
    "logs-specs": "logs are laid out as the documentation says, below --log-dir",
    "event-log-handler": "events are in the journal below --log-dir",
    "signals-to-handle": "TERM and INT are always handled; use --forward-signals for others",
    "numa-binding": "bind inside the script, or start ft-launch under numactl",
}
REFUSED_SWITCHES = {
    "no-python": "only Python scripts and modules can be started; wrap the program in a script",
    "run-path": "scripts are run as `python script.py` would; leave it out",
    "virtual-local-rank": "use LOCAL_RANK as it is",
}

Flags = dict[str, list[Setting]]


def translate(flags: Mapping[str, Sequence[Setting]]) -> tuple[Flags, list[str]]:
    """(our options' settings, notes) from all flags that were given. Raises ConfigError for what has no equal here."""
    ours: Flags = {name: list(settings) for name, settings in flags.items()}
    for name, why in (REFUSED | REFUSED_SWITCHES).items():
        if ours.pop(name, None):
            raise ConfigError(f"--{name} (torchrun's) has no equal here: {why}")
    notes = [f"--{name} is not used: {why}" for name, why in UNUSED.items() if ours.pop(name, None)]
    for theirs, name in SAME.items():
        _rename(ours, theirs, name)
    _standalone(ours)
    notes += _rendezvous(ours)
    return ours, notes


def _rename(flags: Flags, theirs: str, name: str) -> None:
    for setting in flags.pop(theirs, []):
        if any(other.text != setting.text for other in flags.get(name, [])):
            raise ConfigError(
                f"--{theirs} {show(setting.text)} and --{name} {show(flags[name][-1].text)} mean the same and differ; give one of them"
            )
        flags.setdefault(name, []).append(setting)


def _standalone(flags: Flags) -> None:
    """One node, its own store, whatever the environment says."""
    if not flags.pop("standalone", None):
        return
    for name, text in (("nnodes", "1"), ("store", "memory")):
        allowed = {text, "1:1"} if name == "nnodes" else {text}
        if other := next((s for s in flags.get(name, []) if s.text not in allowed), None):
            raise ConfigError(
                f"--standalone means --nnodes 1 and --store memory, but {other.where} is {show(other.text)}; give one of them"
            )
        flags.setdefault(name, [Setting(text, "flag", "--standalone")])


def _rendezvous(flags: Flags) -> list[str]:
    """An etcd rendezvous is a store; any other meets at a process that does not exist here, which one node does not need."""
    backend = flags.pop("rdzv-backend", [])
    endpoint = flags.pop("rdzv-endpoint", [])
    kind = backend[-1].text if backend else "static"
    if kind not in BACKENDS:
        raise ConfigError(f"--rdzv-backend {show(kind)}: must be one of {', '.join(BACKENDS)}{nearest(kind, BACKENDS)}")
    if not kind.startswith("etcd"):
        return [f"--rdzv-endpoint is not used: agents meet in the store (--store), not at a {kind} rendezvous"] if endpoint else []
    if not endpoint and "store" not in flags:
        raise ConfigError(f"--rdzv-backend {kind} needs --rdzv-endpoint HOST:PORT; or say --store etcd://HOST:PORT")
    for setting in endpoint:
        text = f"etcd://{setting.text}"
        if any(other.text != text for other in flags.get("store", [])):
            raise ConfigError(
                f"--rdzv-endpoint {show(text)} and --store {show(flags['store'][-1].text)} mean the same and differ; give one of them"
            )
        flags.setdefault("store", []).append(Setting(text, "flag", setting.where))
    return []
