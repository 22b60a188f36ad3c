"""NVRx's client with the face of ours, so that one script serves both: `Client().section(name, iteration)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient


class Client:
    """Connects at the first section that begins after the process group is there, as NVRx's client needs it."""

    def __init__(self) -> None:
        self._client: Any = None

    @contextmanager
    def section(self, name: str, iteration: int | None = None) -> Iterator[None]:
        """As `monitors.client.Monitor.section`; `setup` is not marked."""
        if name == "setup":
            yield
            return
        if self._client is None:
            self._client = RankMonitorClient()
            self._client.init_workload_monitoring()
        self._client.start_section(name)
        yield
        self._client.end_section(name)
