"""State that belongs to one forward pass of a model, in whichever thread and whenever it runs."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")
Output = TypeVar("Output")


class PassState(Generic[State]):
    """The state of the forward pass that runs in this thread.

    Several passes may be under way at once: in other threads, in one thread block by block in turns, one
    inside of another, and again in a backward pass, where gradient checkpointing repeats blocks. So each
    thread has a current state, a block has its own while it runs, and a state is saved with the tokens
    that it belongs to, for as long as these live: whoever is handed them finds it by their storage.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._saved: dict[int, tuple[weakref.ref[Any], State]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # copies and pickles of a model take no pass along

    def __setstate__(self, state: dict[str, Any]) -> None:
        PassState.__init__(self)

    @property
    def current(self) -> State | None:
        """The state of the pass that runs in this thread.

        None before the first pass, and during a backward pass unless the state is known to belong to
        the part of the forward pass that runs again.
        """
        if recomputing() and getattr(self._thread, "task", -1) != _task():
            return None
        return getattr(self._thread, "state", None)

    def begin(self, state: State) -> None:
        """Set the state of this thread, unless a block runs in it, which has its own."""
        if torch.compiler.is_compiling():
            self._thread.state = state
        elif not getattr(self._thread, "inside", False):
            self._thread.state, self._thread.task = state, _task()

    def within(self, state: State, call: Callable[[], Output]) -> Output:
        """What `call` returns, run with this state as the current one."""
        if torch.compiler.is_compiling():
            self._thread.state = state
            return call()
        thread = self._thread.__dict__
        before = thread.get("state"), thread.get("task", -1), thread.get("inside", False)
        thread["state"], thread["task"], thread["inside"] = state, _task(), True
        try:
            return call()
        finally:
            thread["state"], thread["task"], thread["inside"] = before

    def save(self, tokens: Tensor, state: State) -> None:
        """Let `recall` find the state from these tokens."""
        if torch.compiler.is_compiling():
            return  # a compiled graph has its state as constants
        storage = _storage(tokens)
        if storage is None:
            return
        key = storage._cdata
        entry = self._saved.get(key)
        if entry is not None and entry[1] is state and entry[0]() is storage:
            return

        def forget(dead: weakref.ref[Any]) -> None:
            entry = self._saved.get(key)
            if entry is not None and entry[0] is dead:
                self._saved.pop(key, None)

        self._saved[key] = (weakref.ref(storage, forget), state)

    def recall(self, tokens: Tensor) -> State | None:
        """The state that was saved with these tokens."""
        if torch.compiler.is_compiling():
            return None
        storage = _storage(tokens)
        entry = None if storage is None else self._saved.get(storage._cdata)
        return None if entry is None or entry[0]() is None else entry[1]


def recomputing() -> bool:
    """Whether this thread is in a backward pass, where gradient checkpointing runs modules again."""
    return not torch.compiler.is_compiling() and _task() >= 0


def _task() -> int:
    """The backward pass that this thread runs; -1 where it runs none."""
    task: int = torch._C._current_graph_task_id()
    return task


def _storage(tokens: Tensor) -> Any:
    """The storage, which checkpointing shares where it detaches a tensor."""
    try:
        return tokens.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # tensors of torch.func have none
