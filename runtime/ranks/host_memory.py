"""Memory of the host that a GPU reads and writes by itself: for what goes to a step, and for what comes back from it.

Not memory of the device and no sums of what is held. On a CPU the same calls hand over what is there already.
A copy from or to pageable memory makes the host wait, and goes through a buffer of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

_ALIGNMENT = 16

# Takes an array to the device of what it is used with; a `Sender` is one.
Send = Callable[[np.ndarray], torch.Tensor]


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros on the host, in pages that stay where they are if `device` is a GPU."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


class Fetcher:
    """Brings tensors to the host, several with one wait.

    Args:
        device: of the tensors.
        room: makes [n] u8 on the host that the device can write to; None: `pinned`.
        wait: until the device has done what it was given; None: until its current stream has.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        room: Callable[[int], torch.Tensor] | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self._copies = device.type == "cuda" or room is not None
        self._make_room = room or (lambda num_bytes: pinned((num_bytes,), torch.uint8, device))
        self._wait = wait or (lambda: torch.cuda.current_stream(device).synchronize())
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(self, *tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return `tensors` as numpy arrays, which hold until the next call."""
        if not self._copies:
            return tuple(tensor.numpy() for tensor in tensors)
        ends, total = [], 0
        for tensor in tensors:
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            ends.append(total)
        if self._room.numel() < total:
            self._room = self._make_room(2 * total)
        arrived = []
        for tensor, end in zip(tensors, ends, strict=True):
            start = end - -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            place = self._room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            arrived.append(place.numpy())
        self._wait()
        return tuple(arrived)


class Sender:
    """Takes arrays to a device, without a wait for the host: through memory of its own, which is not written to again
    before the device has read it. An array may change as soon as it was handed over.

    Call `begin`, then send; `end` when most of a step was sent, and whatever is sent later counts as well.

    Args:
        device: where they go. On a CPU they stay where they are.
        room: makes [n] u8 that the device can read from; None: `pinned`.
        mark: returns what waits until the device has read all that was sent before; None: by an event.
        copy: lets the device copy from the second tensor to the first; None: as torch does.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        room: Callable[[int], torch.Tensor] | None = None,
        mark: Callable[[], Callable[[], None]] | None = None,
        copy: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        self._device, self._copies = device, device.type == "cuda" or room is not None
        self._make_room = room or (lambda num_bytes: pinned((num_bytes,), torch.uint8, device))
        self._mark, self._copy = mark or self._event, copy or _copy_unawaited
        self._rooms = [torch.empty(0, dtype=torch.uint8)]  # the last is in use, others have been read from
        self._at = 0
        self._read: Callable[[], None] | None = None

    def begin(self) -> None:
        """Send what a new step needs; all that was sent before was used, or waits to be read here."""
        if self._read is not None:
            self._read()
            self._read = None
        del self._rooms[:-1]
        self._at = 0

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        """Return `array` on the device."""
        source = torch.from_numpy(array)
        if not self._copies:
            return source
        arrived = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.into(arrived, array)
        return arrived

    def into(self, place: torch.Tensor, array: np.ndarray) -> None:
        """Copy `array` to `place`, on the device, of the same shape."""
        source = torch.from_numpy(array)
        if not self._copies:
            place.copy_(source)
            return
        size = -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._at + size > self._rooms[-1].numel():
            self._rooms.append(self._make_room(2 * (self._at + size)))
            self._at = 0
        room = self._rooms[-1][self._at : self._at + source.nbytes].view(source.dtype).view(source.shape)
        self._at += size
        room.copy_(source)
        self._copy(place, room)
        if self._read is not None:  # after `end`
            self._read = self._mark()

    def end(self) -> None:
        """Nearly all of a step was sent."""
        if self._copies:
            self._read = self._mark()

    def _event(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def _copy_unawaited(place: torch.Tensor, source: torch.Tensor) -> None:
    place.copy_(source, non_blocking=True)
