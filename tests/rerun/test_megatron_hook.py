"""The hook as such: found by import, early or late, in a module that looks like Megatron's; nothing happens to one that does not, nor to any other import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rerun import megatron_hook

ROOT = Path(__file__).resolve().parents[2]
MACHINE = """
class RerunStateMachine:
    def validate_state_dict(self, state): return True
    def load_state_dict(self, state): self.loaded = state
    def _log_validation_error_to_file(self, status, result, message): pass
    def should_run_forward_backward(self, iterator): return False
    def validate_result(self, result): return result
    def _restore_state(self): self.saved_state.clear()
"""
PROGRAM = """
import os, sys
from rerun import megatron_hook
if {early}:
    import megatron.core.rerun_state_machine
megatron_hook.install(); megatron_hook.install()
finders = [f for f in sys.meta_path if type(f).__module__ == "rerun.megatron_hook"]
assert len(finders) == (0 if {early} else 1), finders
import json, email.message
from megatron.core import rerun_state_machine as m
import inspect
assert "class RerunStateMachine" in inspect.getsource(m) and m.__spec__.loader is m.__loader__
machine = m.RerunStateMachine()
for verdict, valid in (("", True), ("transient", False), ("persistent", False)):
    os.environ["FT_RERUN_VERDICT"] = verdict
    assert machine.validate_state_dict({{}}) is valid
machine.load_state_dict(7)
assert not hasattr(machine, "loaded")
assert machine.validate_result(3) == 3, "a machine without suspicious_node is used as it is"
assert machine.should_run_forward_backward(None) is False
machine._log_validation_error_to_file(1, 2, 3)
assert not {{"torch", "numpy"}} & set(sys.modules)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "rerun_state_machine.py").write_text(MACHINE)
    return tmp_path


@pytest.mark.parametrize("early", [False, True])
def test_imported_before_or_after(fake: Path, early: bool) -> None:
    code = f"import sys; sys.path.insert(0, {str(fake)!r}); sys.path.append({str(ROOT)!r})\n" + PROGRAM.format(early=early)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr + done.stdout, done.stderr


@pytest.mark.parametrize("missing", list(megatron_hook.LESSONS))
def test_a_megatron_that_looks_different_is_left_alone(missing: str) -> None:
    module = ModuleType("strange")
    exec(MACHINE, vars(module))
    machine = module.RerunStateMachine
    delattr(machine, missing)
    before = dict(vars(machine))
    megatron_hook.teach(module)
    assert dict(vars(machine)) == before
    megatron_hook.teach(ModuleType("empty"))


def test_what_megatron_raises_is_raised() -> None:
    module = ModuleType("m")
    exec(MACHINE.replace("return result", "raise KeyError(result)"), vars(module))
    megatron_hook.teach(module)
    with pytest.raises(KeyError):
        module.RerunStateMachine().validate_result("x")


def test_a_state_is_put_back_from_a_copy() -> None:
    module = ModuleType("m")
    exec(MACHINE, vars(module))
    megatron_hook.teach(module)
    machine = module.RerunStateMachine()
    machine.saved_state = {"other_state": [1]}
    machine._restore_state()
    assert machine.saved_state == {"other_state": [1]}


def test_an_import_that_fails_fails_as_ever(fake: Path) -> None:
    (fake / "megatron" / "core" / "rerun_state_machine.py").write_text("raise ImportError('no such luck')")
    code = "from rerun import megatron_hook; megatron_hook.install()\nimport megatron.core.rerun_state_machine"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(fake), str(ROOT)]!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.strip().endswith("ImportError: no such luck")
