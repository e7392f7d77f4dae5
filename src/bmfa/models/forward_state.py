"""State of one forward pass of a model; passes may run in several threads, or be interleaved."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")
Output = TypeVar("Output")

# The id of the backward pass that this thread runs, -1 outside of backward passes.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class ForwardState(Generic[State]):
    """The state of the forward pass that runs in the current thread.

    Several passes can be in progress at once: in different threads, interleaved block by block in one
    thread, nested in each other, and again in a backward pass, where gradient checkpointing reruns
    blocks. Therefore each thread has a current state, a block has its own while it runs, and a state is
    attached to the storage of its tokens for as long as these live, so that a block that receives the
    tokens finds it.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._attached: dict[int, tuple[weakref.ref[Any], State]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # copies and pickles of a model carry no state of a pass

    def __setstate__(self, state: dict[str, Any]) -> None:
        ForwardState.__init__(self)

    @property
    def current(self) -> State | None:
        """The state of the pass in this thread; None before the first pass.

        During a backward pass it is None, too, unless it was set in this backward pass: a state left
        by a forward pass may belong to another input than the block that is recomputed.
        """
        if is_recomputing() and getattr(self._thread, "task", -1) != current_graph_task():
            return None
        return getattr(self._thread, "state", None)

    def set(self, state: State) -> None:
        """Set the state of this thread, unless `run_with` is active and holds it fixed."""
        if torch.compiler.is_compiling():
            self._thread.state = state
        elif not getattr(self._thread, "fixed", False):
            self._thread.state, self._thread.task = state, current_graph_task()

    def forget(self) -> None:
        """Remove the state of this thread, unless `run_with` is active and holds it fixed."""
        if torch.compiler.is_compiling():
            self._thread.state = None
            return
        thread = self._thread.__dict__
        if not thread.get("fixed", False):
            thread.pop("state", None)

    def run_with(self, state: State, function: Callable[[], Output]) -> Output:
        """Call the function with this state as the current one, and restore the previous state."""
        if torch.compiler.is_compiling():
            self._thread.state = state
            return function()
        thread = self._thread.__dict__
        before = thread.get("state"), thread.get("task", -1), thread.get("fixed", False)
        thread["state"], thread["task"], thread["fixed"] = state, current_graph_task(), True
        try:
            return function()
        finally:
            thread["state"], thread["task"], thread["fixed"] = before

    @property
    def in_use(self) -> bool:
        """True while tokens with an attached state live."""
        return bool(self._attached)

    def attach(self, tokens: Tensor, state: State) -> None:
        """Associate the state with the storage of the tokens until that is freed."""
        if torch.compiler.is_compiling():
            return  # in a compiled graph the state is a constant
        storage = _storage(tokens)
        if storage is None:
            return
        key = storage._cdata
        entry = self._attached.get(key)
        if entry is not None and entry[1] is state and entry[0]() is storage:
            return

        def forget(freed: weakref.ref[Any]) -> None:
            entry = self._attached.get(key)
            if entry is not None and entry[0] is freed:
                self._attached.pop(key, None)

        self._attached[key] = (weakref.ref(storage, forget), state)

    def find(self, tokens: Tensor) -> State | None:
        """Return the state that is attached to the tokens, or None."""
        if torch.compiler.is_compiling():
            return None
        storage = _storage(tokens)
        entry = None if storage is None else self._attached.get(storage._cdata)
        return None if entry is None or entry[0]() is None else entry[1]


def is_recomputing() -> bool:
    """Return True in a backward pass, where gradient checkpointing reruns modules."""
    return not torch.compiler.is_compiling() and current_graph_task() >= 0


def _storage(tokens: Tensor) -> Any:
    """Return the storage, which checkpointing shares when it detaches a tensor; None if it has none."""
    try:
        return tokens.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # tensors inside torch.func transforms
