"""The torch adapter by itself: a step is computed again from the same beginning, what is told is told once, and a checkpoint holds what the next process needs."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rerun
from ft_launcher.core.rerun_report import RerunStatus
from monitors import layout
from monitors.rank_page import RankPage, scratch_words
from rerun import adapter, telling, tracker
from rerun.data import RerunDataIterator
from rerun.machine import OutsideStepError
from rerun.place import Place, here, recorded
from rerun.words import RerunMode, RerunState

NAN = torch.tensor(float("nan"))


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPage]:
    """The section page of this process, which is slot 2 of node `n`, and no machine of another test."""
    for name, value in (("FT_NODE_ID", "n"), ("FT_SLOT", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(telling.VERDICT, raising=False)
    made = RankPage(scratch_words())
    monkeypatch.setattr(telling, "own_page", lambda: made)
    rerun.destroy_rerun_state_machine()
    yield made
    rerun.destroy_rerun_state_machine()


def machine(**how: Any) -> Any:
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS, **how)
    return rerun.get_rerun_state_machine()


def step(m: Any, samples: RerunDataIterator, results: list[Any], **check: Any) -> tuple[tuple[bool, bool, int], list[Any]]:
    """One step whose n-th run gives `results[n]` (the last one for ever); (answer, what each run drew: a sample and all generators)."""
    drawn: list[Any] = []
    while m.should_run_forward_backward(samples):
        drawn.append((next(samples), random.random(), float(np.random.rand()), float(torch.rand(1))))
        m.validate_result(results[min(len(drawn), len(results)) - 1], torch.isnan, "loss is NaN", **check)
    return m.should_checkpoint_and_exit(), drawn


GOOD = torch.tensor(1.0)


def seasoned(m: Any, samples: RerunDataIterator) -> None:
    assert step(m, samples, [NAN])[0] == (False, False, 0), "the first step is not checked"


def test_a_rerun_begins_where_the_step_began() -> None:
    own = {"n": 0}
    restored = []
    m = machine(state_save_func=lambda: copy.copy(own), state_restore_func=lambda state: restored.append(state.pop("n")))
    samples = RerunDataIterator(range(100))
    seasoned(m, samples)
    own["n"] = 7
    answer, drawn = step(m, samples, [NAN, GOOD])
    assert answer == (True, True, 17) and len(drawn) == 2 and drawn[0] == drawn[1] and drawn[0][0] == 1
    assert restored == [7, 7], "once for the rerun, once for the checkpoint, and what is handed over may be used up"
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == drawn[0][1:]


def test_a_disputed_result_is_kept_as_it_was() -> None:
    """Megatron's schedule divides a loss in place; what is compared later must not change with it."""
    m, samples = machine(), RerunDataIterator(range(100))
    seasoned(m, samples)
    results = [torch.tensor(-1.0), torch.tensor(-1.0)]
    for run in range(2):
        assert m.should_run_forward_backward(samples)
        next(samples)
        m.validate_result(results[run], lambda r: r < 0, "loss is negative")
        results[run] /= 2
    assert not m.should_run_forward_backward(samples) and m.should_checkpoint_and_exit() == (True, True, 16)


def test_what_is_told(page: RankPage, tmp_path: Path) -> None:
    path = tmp_path / "rejected"
    m, samples = machine(result_rejected_tracker_filename=str(path)), RerunDataIterator(range(100))
    seasoned(m, samples)
    assert step(m, samples, [NAN])[0] == (True, True, 16)
    words = page.words
    assert (words[layout.RERUN_STATUS], words[layout.RERUN_ITERATION]) == (RerunStatus.FIRST_RERUN_REPRODUCIBLE, 1)
    assert [(e.rank, e.iteration, e.status, e.node, e.device, e.result) for e in tracker.read(str(path))] == [
        (0, 1, RerunStatus.INITIAL_RUN, "n", "slot:2", "nan"),
        (0, 1, RerunStatus.FIRST_RERUN_REPRODUCIBLE, "n", "slot:2", "nan"),
    ]


def test_the_question_reaches_another_device(monkeypatch: pytest.MonkeyPatch, page: RankPage) -> None:
    """In plain form; Megatron's format is that of tests/rerun/test_equivalence.py."""
    m, samples = machine(), RerunDataIterator(range(100))
    seasoned(m, samples)
    assert m.state_dict(samples, "per_rank") is None, "between steps there is nothing to keep"
    step(m, samples, [NAN])
    saved = pickle.dumps(m.state_dict(samples, "per_rank"))
    assert b"rerun" not in saved.replace(b"rerunning", b"").replace(b"rerun_", b"").replace(b"_rerun", b""), "plain words, no class of ours"
    for slot, results, code in (("2", [NAN], 16), ("3", [NAN], 17), ("3", [GOOD], 17)):
        monkeypatch.setenv("FT_SLOT", slot)
        m, samples = machine(), RerunDataIterator(range(1, 100))
        assert m.validate_state_dict(pickle.loads(saved))
        m.load_state_dict(pickle.loads(saved))
        answer, drawn = step(m, samples, results)
        assert answer == (False, True, code) and [d[0] for d in drawn] == [1]
    assert m.diagnostic == "persistent_error" and page.words[layout.RERUN_STATUS] == RerunStatus.SECOND_RERUN_NOT_REPRODUCIBLE


def test_a_settled_question_is_none_but_its_samples_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    m, samples = machine(), RerunDataIterator(range(100))
    seasoned(m, samples)
    step(m, samples, [NAN])
    saved = pickle.dumps(m.state_dict(samples, "per_rank"))
    monkeypatch.setenv(telling.VERDICT, "persistent")
    m, samples = machine(), RerunDataIterator(range(2, 100))  # a source that goes on behind the disputed step
    assert not m.validate_state_dict(pickle.loads(saved))
    m.load_state_dict(pickle.loads(saved))
    assert m.state is RerunState.NOT_RUNNING_YET
    drawn = [step(m, samples, [GOOD])[1][0][0] for _ in range(3)]
    assert drawn == [1, 2, 3]


def test_other_formats_cannot_hold_it(caplog: pytest.LogCaptureFixture) -> None:
    m, samples = machine(), RerunDataIterator(range(100))
    seasoned(m, samples)
    step(m, samples, [NAN])
    assert m.state_dict(samples, "torch") is None and "only torch_dist and per_rank can" in caplog.text


@pytest.mark.parametrize("state", [None, {}, {"state": None}, {"state": "no such"}, {"state": "rerunning_in_place"}, {"state": 3}])
def test_states_that_ask_nothing(state: Any) -> None:
    assert not machine().validate_state_dict(state)


def test_disabled_raises_what_is_fatal(page: RankPage, caplog: pytest.LogCaptureFixture) -> None:
    m = adapter.RerunStateMachine()
    assert m.should_run_forward_backward(None)
    m.validate_result(NAN, torch.isnan, "loss is NaN", fatal=False)
    assert "Unexpected result nan (message='loss is NaN')" in caplog.text
    with pytest.raises(RuntimeError, match=r"Rank 0, node n, device slot:2, iteration 0: Unexpected result nan"):
        m.validate_result(NAN, torch.isnan, "loss is NaN")
    assert page.words[layout.RERUN_STATUS] == RerunStatus.RERUN_DISABLED
    assert not m.should_run_forward_backward(None) and m.should_checkpoint_and_exit() == (False, False, 0)


def test_mistakes_of_a_loop_are_named(tmp_path: Path) -> None:
    m = machine()
    with pytest.raises(OutsideStepError, match="only inside `while"):
        m.validate_result(GOOD, torch.isnan, "x")
    with pytest.raises(AssertionError, match="not wrapped with RerunDataIterator: range"):
        m.should_run_forward_backward(range(3))
    with pytest.raises(AssertionError, match="already initialized"):
        rerun.initialize_rerun_state_machine()
    with pytest.raises(RuntimeError, match="cannot be appended to"):
        adapter.RerunStateMachine(result_rejected_tracker_filename=str(tmp_path))
    with pytest.raises(AttributeError, match="no_such_name"):
        rerun.no_such_name  # noqa: B018


def test_a_tracker_file_that_goes_away_costs_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    m, samples = machine(result_rejected_tracker_filename=str(folder / "t")), RerunDataIterator(range(9))
    (folder / "t").unlink(), folder.rmdir()
    seasoned(m, samples)
    assert step(m, samples, [NAN])[0][2] == 16 and "Could not log validation error" in caplog.text


def test_places() -> None:
    assert here({"FT_NODE_ID": "a", "FT_SLOT": "1", "LOCAL_RANK": "5"}) == Place("a", "slot:1")
    outside = here({"LOCAL_RANK": "5"})
    assert outside.device == "index:5" and outside.node and here({}).device == "index:0"
    gpu = Place("a", "GPU-1")
    assert gpu.same(Place("b", "GPU-1")) and not gpu.same(Place("a", "GPU-2")) and not Place("a", "slot:1").same(Place("b", "slot:1"))
    assert recorded("a", "slot:1") == Place("a", "slot:1") and recorded("host", 0) is None and recorded(None, None) is None


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The device is its UUID whatever the slot, and its generator is put back as well."""
    assert here().device == "slot:2", "a process that has not used CUDA is not on the GPU"
    torch.zeros(1, device="cuda")
    first = here()
    assert first.device.startswith("GPU-") and len(first.device) > 20 and first.same(Place("other", first.device))
    m, samples = machine(), RerunDataIterator(range(9))
    seasoned(m, samples)
    drawn = []
    while m.should_run_forward_backward(samples):
        next(samples)
        drawn.append(float(torch.rand(1, device="cuda")))
        m.validate_result(torch.full((), float("nan"), device="cuda"), torch.isnan, "loss is NaN")
    assert len(drawn) == 2 and drawn[0] == drawn[1] and m.should_checkpoint_and_exit() == (True, True, 16)
    saved = pickle.dumps(m.state_dict(samples, "per_rank"))
    m, samples = machine(), RerunDataIterator(range(1, 9))
    m.load_state_dict(pickle.loads(saved))
    assert step(m, samples, [NAN])[0] == (False, True, 16), "the same GPU decides nothing, on CPU tensors either"
