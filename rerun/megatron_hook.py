"""Unmodified Megatron under the launcher: what its rerun state machine cannot know, and one thing that it does wrong, put right when its module is imported.

- *The verdict.* After exit 17 the launcher restarts on good hardware, from the fault checkpoint, with FT_RERUN_VERDICT set. In it Megatron 0.16.1 finds its old state
  again and raises TypeError (transient) or exits 17 for ever (persistent). While the variable is set, a saved state is no valid state, as after `--rerun-mode disabled`.
- *The launcher.* What goes to the file of rejected results, or would if there were one, is left in the section page as well.
- *The place.* "The same GPU" is (host name, CUDA index) to Megatron. Here the suspected place is kept in the launcher's words (rerun/place.py), and while Megatron
  compares it stands there in Megatron's own words if it is the same place, else as nothing.
- *The step's beginning.* Megatron puts a script's saved state back twice, for the rerun and for the checkpoint, and Megatron's tracker of generators writes into what it
  is given: the checkpoint then holds the generators of the step's end. With dropout, the next device would compute other numbers and the first one be called faulty. So
  each time a copy is put back.

`install` costs a rank one object: a finder that lets every import pass but one, or the patch itself where Megatron was preloaded before the fork. Everything is looked up
first and replaced afterwards: a Megatron that looks different is left as it is. With `--start-method spawn` a rank is a fresh interpreter that nobody has prepared: there
the hook is missing, and the tracker file is what the launcher has. Must never import torch or Megatron, print, or fail a script.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ft_launcher.core.rerun_report import RerunStatus
from rerun import telling
from rerun.place import here, recorded

TARGET = "megatron.core.rerun_state_machine"
MARK = "_ft_launcher"
Method = Callable[..., Any]


def install() -> None:
    """Teaches Megatron's module, now if it is loaded, else when it is. Once a process is enough; never raises."""
    try:
        module = sys.modules.get(TARGET)
        if module is not None:
            teach(module)
        elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception:  # noqa: BLE001  without the hook, but training
        return


def teach(module: ModuleType) -> None:
    """Replaces the methods of the module's RerunStateMachine; nothing where one is missing or it has been done."""
    machine: Any = getattr(module, "RerunStateMachine", None)
    originals = {name: getattr(machine, name) for name in LESSONS if hasattr(machine, name)}
    if len(originals) < len(LESSONS) or hasattr(machine, MARK):
        return
    for name, original in originals.items():
        setattr(machine, name, LESSONS[name](module, original))
    setattr(machine, MARK, True)


class _Finder:
    """Lets others find every module; the one is taught as soon as it has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The one module's spec, with a loader that teaches it; None for all others."""
        if fullname != TARGET:
            return None
        others = (
            finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            _teach_after(spec.loader)
        return spec


def _teach_after(loader: Any) -> None:
    """This loader object, not its class: it remains what `inspect` and others expect."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        _quietly(teach, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without attributes of its own: no hook
        return


# -- the verdict


def _no_old_state(module: ModuleType, original: Method) -> Method:
    """validate_state_dict: False while a verdict is being acted upon."""

    @functools.wraps(original)
    def validate_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return False if telling.settled() else original(self, *args, **kwargs)

    return validate_state_dict


def _nothing_to_load(module: ModuleType, original: Method) -> Method:
    """load_state_dict: nothing, while a verdict is being acted upon; for loops that load without asking."""

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if telling.settled() else original(self, *args, **kwargs)

    return load_state_dict


# -- the launcher


def _also_to_the_page(module: ModuleType, original: Method) -> Method:
    """_log_validation_error_to_file: called for every event, with a file or without."""

    @functools.wraps(original)
    def log_validation_error(self: Any, *args: Any, **kwargs: Any) -> Any:
        _quietly(_tell, self, **dict(zip(("status", "result", "message"), args, strict=False)), **kwargs)
        return original(self, *args, **kwargs)

    return log_validation_error


def _tell(machine: Any, status: Any, result: Any, message: str) -> None:
    name = str(getattr(status, "name", status)).rpartition(".")[2].upper()
    place = here()
    text = f"node={place.node} device={place.device} result={result} message='{message}'"
    telling.tell(RerunStatus[name], machine.current_iteration, " ".join(text.split()))
    setattr(machine, MARK, True)


def _take_back_when_harmless(module: ModuleType, original: Method) -> Method:
    """should_run_forward_backward: a step that ends normally takes back what this rank had to say about it."""

    @functools.wraps(original)
    def should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = original(self, *args, **kwargs)
        if not run and vars(self).get(MARK) and self.state.name == "NOT_RUNNING_YET":
            telling.take_back()
            setattr(self, MARK, False)
        return run

    return should_run_forward_backward


# -- the place


def _in_the_launchers_places(module: ModuleType, original: Method) -> Method:
    """validate_result: writes and reads the suspected place in Megatron's words, around which it is kept in ours."""
    torch: Any = vars(module).get("torch")

    @functools.wraps(original)
    def validate_result(self: Any, *args: Any, **kwargs: Any) -> Any:
        put_back = _quietly(_megatrons_words, self, torch)
        try:
            return original(self, *args, **kwargs)
        finally:
            if put_back is not None:
                put_back()

    return validate_result


def _megatrons_words(machine: Any, torch: Any) -> Callable[[], None]:
    """Puts the suspected place into Megatron's words, as far as it is about to look; returns what puts it back into ours, or takes down a new one."""
    state, kept = machine.state.name, (machine.suspicious_node, machine.suspicious_device)
    suspect = recorded(*kept)
    if state == "RERUNNING_IN_PLACE":
        machine.suspicious_node = MARK
    elif state == "RERUNNING_FROM_CHECKPOINT" and suspect is not None:
        same = suspect.same(here())
        machine.suspicious_node, machine.suspicious_device = (os.uname()[1], torch.cuda.current_device()) if same else (None, None)

    def put_back() -> None:
        found = kept
        if state == "RERUNNING_IN_PLACE" and machine.suspicious_node != MARK:
            place = here()
            found = (place.node, place.device)
        machine.suspicious_node, machine.suspicious_device = found

    return put_back


def _quietly(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `work` returns, or None where it fails: a Megatron that is not quite as expected goes its own way."""
    try:
        return work(*args, **kwargs)
    except Exception:  # noqa: BLE001
        return None


# -- the step's beginning


def _from_a_copy(module: ModuleType, original: Method) -> Method:
    """_restore_state: what the script's own function gets is a copy."""

    @functools.wraps(original)
    def restore_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the original, which reads `self.saved_state`."""
        kept = self.saved_state
        copied = _quietly(copy.deepcopy, kept)
        self.saved_state = kept if copied is None else copied
        try:
            return original(self, *args, **kwargs)
        finally:
            self.saved_state = kept

    return restore_state


LESSONS: dict[str, Callable[[ModuleType, Method], Method]] = {
    "validate_state_dict": _no_old_state,
    "load_state_dict": _nothing_to_load,
    "_log_validation_error_to_file": _also_to_the_page,
    "should_run_forward_backward": _take_back_when_harmless,
    "validate_result": _in_the_launchers_places,
    "_restore_state": _from_a_copy,
}
