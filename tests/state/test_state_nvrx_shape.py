"""`current_timeouts` is loaded by the real client of nvidia_resiliency_ext, the way Megatron does it: a plain json.load, then
load_state_dict.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from state_samples import AT, full, run_info

from ft_launcher.state import document as doc
from ft_launcher.state import nvrx
from ft_launcher.state.file import FtStateFile

client = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.rank_monitor_client")
data = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.data")
calc = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.timeouts_calc")


def loaded_from(path: Path) -> object:
    with open(path) as file:
        state = json.load(file)
    loader = client.RankMonitorClient()
    loader.load_state_dict(state)
    return loader


def test_the_real_client_loads_a_whole_ft_state_and_sees_our_timeouts(tmp_path: Path) -> None:
    FtStateFile(tmp_path / "ft_state.json").save(full())
    timeouts = loaded_from(tmp_path / "ft_state.json").loaded_section_timeouts
    assert timeouts.section == {"setup": 600.0, "step": 9.5}
    assert timeouts.out_of_section == 300.0
    assert timeouts.calculated_sections == {"step"}
    assert timeouts.is_out_of_section_calculated is False
    assert timeouts.are_valid


def test_fixed_timeouts_are_taken_and_then_replaced_by_what_the_client_calculates(tmp_path: Path) -> None:
    made = doc.begin_run(None, run_info())
    made = doc.with_timeouts(made, {"step": doc.SectionTimeout(180, "fixed"), doc.OUT_OF_SECTION: doc.SectionTimeout(300, "fixed")}, AT)
    FtStateFile(tmp_path / "ft_state.json").save(made)
    current = loaded_from(tmp_path / "ft_state.json").loaded_section_timeouts
    assert current.section == {"step": 180.0}
    assert not current.calculated_sections
    learner = calc.TimeoutsCalc(sections=["step"], safety_factor=5.0)
    learner.section_to_max_time["step"] = 2.0
    merged = learner.get_section_timeouts(selected_sections=["step"], calc_out_of_section=False, current=current)
    assert merged.section == {"step": 10.0}
    assert merged.out_of_section == 300.0


def test_a_document_without_timeouts_loads_too(tmp_path: Path) -> None:
    FtStateFile(tmp_path / "ft_state.json").save(doc.begin_run(None, run_info()))
    assert loaded_from(tmp_path / "ft_state.json").loaded_section_timeouts is None


def test_what_the_real_client_writes_is_accepted_by_us(tmp_path: Path) -> None:
    writer = client.RankMonitorClient()
    writer.hb_timeouts = data.HeartbeatTimeouts(initial=60.0, subsequent=30.0, were_calculated=True)
    writer.section_timeouts = data.SectionTimeouts(
        section={"setup": None, "step": 3.5}, out_of_section=None, calculated_sections={"step"}, is_out_of_section_calculated=False
    )
    state = writer.state_dict()
    assert nvrx.trouble_in(state["current_timeouts"]) is None
    path = tmp_path / "ft_state.json"
    ours = FtStateFile(path)
    ours.save(full())
    with open(path, "w") as file:
        json.dump(state, file)
    saved = ours.save(full(at_cycle=3))
    assert saved.document["current_timeouts"] == json.loads(path.read_text())["current_timeouts"] == state["current_timeouts"]
    assert loaded_from(path).loaded_hb_timeouts.subsequent == 30.0
