"""The table of options: the one place where an option gets its name, its help and its default's text.

The command line, the keys of a `--config` file and the FT_ variables are all made from it, so the three cannot drift apart. How a text
becomes a value is said in `resolve`, where the types are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `default` is the text of the value used where nobody says anything, None where `resolve` finds one out; `default_help`
    says how.

    `off` is the spelling that negates a switch; `repeats` options may be given several times.
    """

    name: str
    metavar: str
    help: str
    default: str | None = None
    default_help: str = ""
    off: str = ""
    repeats: bool = False

    @property
    def env(self) -> str:
        """The environment variable with the same meaning: FT_ and the name (FT_STATE for ft-state)."""
        return "FT_" + self.name.removeprefix("ft-").replace("-", "_").upper()


GROUPS: dict[str, tuple[Option, ...]] = {
    "Topology (fixed for the whole run)": (
        Option("tp", "N", "Tensor-parallel degree.", default_help="Megatron's own flag in the script's arguments, else 1"),
        Option("pp", "N", "Pipeline-parallel degree.", default_help="likewise"),
        Option("cp", "N", "Context-parallel degree.", default_help="likewise"),
        Option("ep", "N", "Expert-parallel degree.", default_help="likewise"),
        Option("etp", "N", "Tensor-parallel degree inside an expert.", default_help="likewise, else --tp"),
        Option(
            "rank-order", "ORDER", "Which degree neighbouring ranks differ in, fastest first.", default_help="likewise, else tp-cp-ep-dp-pp"
        ),
    ),
    "Nodes": (
        Option("nnodes", "N[:MAX]", "Nodes that compute; the rest of MAX are spares.", default_help="SLURM_NNODES, else 1"),
        Option("nproc-per-node", "K", "Ranks on a node; gpu, cpu or auto as in torchrun.", default_help="the number of GPUs, else 1"),
        Option("node-id", "ID", "Name of this node.", default_help="the host name"),
        Option("node-addr", "ADDR", "Address at which the other nodes reach this one; ADDR:PORT for a fixed port."),
        Option("node-label", "K=V", "Label of this node; may be repeated.", repeats=True),
    ),
    "Store": (
        Option(
            "store", "memory|etcd://HOST:PORT[,...]", "Where the job's truth lives.", default_help="memory on one node, required on several"
        ),
        Option("store-timeout", "S", "How long the store may be away before the job gives up.", "300"),
        Option("store-ca", "FILE", "CA certificate of the store (TLS)."),
        Option("store-cert", "FILE", "Client certificate for the store (TLS)."),
        Option("store-key", "FILE", "Key of the client certificate."),
        Option("store-user", "U", "User name at the store; its password is read from FT_STORE_PASSWORD."),
        Option("run-id", "ID", "Name of this run in the store.", default_help="SLURM_JOB_ID, else generated on one node"),
    ),
    "Hangs": (
        Option(
            "timeouts",
            "SECTION=S,...",
            "How long a section may take (setup, step, checkpointing; +NAME for one of your script's own).",
            default_help="setup=600,step=180,checkpointing=420",
        ),
        Option("out-of-section", "S", "How long a rank may stay outside all sections.", "300"),
        Option("learn-timeouts", "", "Learn tighter timeouts from the run; --timeouts stays the ceiling.", "true", off="fixed-timeouts"),
        Option("hang-action", "restart|log", "What a hang leads to: a restart, or a line that says what would have been done.", "restart"),
    ),
    "Faults": (
        Option("max-restarts", "N", "Restarts for crashes and hangs.", "3"),
        Option("no-progress-cycles", "N", "Stop after this many cycles in a row without a higher iteration.", "3"),
        Option("healthy-stretch", "S", "Training this long without a fault gives one restart back; 0: never.", "21600"),
        Option("quarantine-after", "N", "Transient wrong numbers of one device that put it into quarantine; 0: never.", "3"),
        Option("quarantine-days", "DAYS", "How long a device stays in quarantine.", "7"),
        Option("progress-file", "PATH", "File in which the script writes its iteration, for scripts without a client."),
        Option("node-ttl", "S", "A node that is silent this long is suspected lost.", "10"),
        Option("join-wait", "S", "How long to wait for all nodes at the start.", "600"),
        Option("spare-wait", "S", "How long to wait for a spare when none is there.", "600"),
        Option("exit-grace", "S", "How long the others may take once a rank has finished.", "60"),
        Option("term-grace", "S", "How long ranks may take after TERM.", "25"),
        Option("survivor-grace", "S", "How long the other ranks live on after a fault.", "0"),
        Option("forward-signals", "SIG,...", "Signals passed on to the ranks; none for none.", "USR1,USR2"),
        Option("health-check", "CMD", "Command that exits non-zero on a node unfit for work."),
    ),
    "Start of the ranks": (
        Option(
            "preload",
            "MODULE,...",
            "Modules imported once per node, before the ranks are forked; none for none.",
            default_help="torch where it is installed",
        ),
        Option("start-method", "fork|spawn", "Fork ranks from the preloaded process, or start each afresh.", "fork"),
    ),
    "Files": (
        Option("ft-state", "PATH", "State that outlives the run.", default_help="ft_state.json in --log-dir"),
        Option("log-dir", "DIR", "Logs, journal, incidents, verdict.", "ft_logs"),
        Option("tee", "all|none|0,3", "Ranks whose output the console shows.", "all"),
    ),
}

OPTIONS: dict[str, Option] = {option.name: option for group in GROUPS.values() for option in group}
"""All options that a flag, a file or the environment can set, by name. (--config and --dry-run are flags only.)"""

SCHEDULER: dict[str, str] = {"nnodes": "SLURM_NNODES", "run-id": "SLURM_JOB_ID", "node-order": "SLURM_NODEID"}
"""What the scheduler knows, the weakest source. `node-order` has no option of its own; torchrun's --node-rank sets it too."""

RANK_ENVIRONMENT = frozenset(
    [
        "FT_RUN_ID",
        "FT_CYCLE",
        "FT_NODE_ID",
        "FT_SLOT",
        "FT_COORDS",
        "FT_RESTART_REASON",
        "FT_SECTION_PAGE",
        "FT_RERUN_VERDICT",
        "FT_RANK_MONITOR_IPC_SOCKET",
        "FT_LAUNCHER_IPC_SOCKET",
    ]
)
"""Variables that a rank gets from its launcher. In a launcher started by a rank, they tell about the outer run."""
