"""Events as CUDA's, for programs that use the virtual GPU by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenceline.vgpu.operation import Operation, here
from fenceline.vgpu.streams import VirtualStream

if TYPE_CHECKING:
    from fenceline.vgpu.gpu import VirtualGpu


class Event:
    """A wait is for the latest record at the time of the call; without one it is for nothing.

    ``external`` records and waits, inside a captured graph, concern work outside it: each replay records the event
    anew, or waits for its latest record at the time of the replay.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self.mark: Operation | None = None

    def record(self, stream: VirtualStream, external: bool = False) -> None:
        """Let the event stand for everything submitted to ``stream`` so far."""
        if external and stream.capture is not None:
            stream.capture.add(stream, Operation("external record", here(), None), self)
        else:
            self.mark = self._gpu.record(stream)

    def wait(self, stream: VirtualStream, external: bool = False) -> None:
        """What is submitted to ``stream`` from now on runs after the event's latest record."""
        if external and stream.capture is not None:
            op = Operation("external wait", here(), None)
            op.after = op  # whatever the event stands for at the replay
            stream.capture.add(stream, op, self)
        elif self.mark is not None:
            self._gpu.wait(stream, self.mark)

    def synchronize(self) -> None:
        """Block the calling thread until the event's latest record has passed."""
        if self.mark is not None:
            self._gpu.synchronize(self.mark)

    def query(self) -> bool:
        """Whether the event's latest record has passed."""
        return self.mark is None or self._gpu.query(self.mark)
