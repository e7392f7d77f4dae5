"""State that belongs to one forward pass of a model, in whichever thread and whenever it runs."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


class PassState(Generic[State]):
    """The state of the forward pass that runs in this thread.

    Several threads may run a model at once, so each has a state of its own. Gradient checkpointing runs
    blocks again during the backward pass, when other pictures may have gone through the model. It hands
    them the same tokens as before; so a state is saved with the tokens that it belongs to, for as long
    as these live, and is found by their storage.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._saved: dict[int, tuple[weakref.ref[Tensor], State]] = {}

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
        """Set the state of the pass that runs in this thread."""
        self._thread.state = state
        if not torch.compiler.is_compiling():
            self._thread.task = _task()

    @contextmanager
    def resumed(self, state: State) -> Iterator[None]:
        """Within a backward pass, make a saved state the current one while a block runs again."""
        before = self._thread.__dict__.copy()
        self.begin(state)
        try:
            yield
        finally:
            self._thread.__dict__.clear()
            self._thread.__dict__.update(before)

    def save(self, tokens: Tensor, state: State) -> None:
        """Let `recall` find the state from these tokens, where a backward pass may follow."""
        if torch.compiler.is_compiling():
            return  # a compiled graph has its state as constants
        if not (tokens.requires_grad or torch.is_grad_enabled()):
            return
        key = _storage_key(tokens)

        def forget(dead: weakref.ref[Tensor]) -> None:
            entry = self._saved.get(key)
            if entry is not None and entry[0] is dead:
                self._saved.pop(key, None)

        self._saved[key] = (weakref.ref(tokens, forget), state)

    def recall(self, tokens: Tensor) -> State | None:
        """The state that was saved with these tokens."""
        entry = self._saved.get(_storage_key(tokens))
        return None if entry is None or entry[0]() is None else entry[1]


def recomputing() -> bool:
    """Whether this thread is in a backward pass, where gradient checkpointing runs modules again."""
    return not torch.compiler.is_compiling() and _task() >= 0


def _task() -> int:
    """The backward pass that this thread runs; -1 where it runs none."""
    task: int = torch._C._current_graph_task_id()
    return task


def _storage_key(tokens: Tensor) -> int:
    """The address of the storage, which reentrant checkpointing keeps where it detaches a tensor."""
    key: int = tokens.untyped_storage()._cdata
    return key
