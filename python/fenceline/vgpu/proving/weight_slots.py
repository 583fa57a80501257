"""What a checkpoint's tensors become: which of them are refused, and what the others leave in the parameters.

The checkpoints of the proof have few types and shapes. So random ones, of which many do not fit, are loaded into random
parameters, and the outcome is compared with what ``WeightSlot`` and ``fill_slots`` promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from fenceline.config.quantization import QuantConfig
from fenceline.layers.quantized import FP8, Fp8Format, QuantizingSlot
from fenceline.layers.weight import WeightSlot, WeightSlots, fill_slots

_NUM_CHECKPOINTS = 16
_TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, FP8, torch.int32, torch.uint8)
_BEFORE = 3  # in all parameters


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a parameter: it takes the range from ``start`` on along ``dim`` of a tensor of ``shape``, transposed if
    it ``turns``. Of a quantising one only plain numbers are taken."""

    name: str
    param: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    start: int
    turns: bool
    quantises: bool
    group: int  # of places that are filled together; 0: none

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` fits."""
        kinds = [one.is_floating_point for one in (tensor.dtype, self.param.dtype)]
        wide = [one.itemsize >= 2 for one in (tensor.dtype, self.param.dtype)]
        if self.quantises:
            fits = kinds[0] and wide[0]
        elif not kinds[1]:
            fits = not kinds[0]
        elif not wide[1]:
            fits = tensor.dtype == self.param.dtype
        else:
            fits = kinds[0] and wide[0]
        return fits and (tuple(tensor.shape) == self.shape or (not self.shape and tensor.numel() == 1))

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the parameter takes of ``tensor``."""
        if not self.shape:
            return tensor.reshape(self.param.shape).to(self.param.dtype)
        whole = tensor.t() if self.turns else tensor
        picked = torch.arange(self.start, self.start + self.param.shape[self.dim])
        return whole.float().index_select(self.dim, picked).to(self.param.dtype)


def compare_weight_slots(random: Random) -> str:
    """The first checkpoint that is wrongly judged or loaded, "" if there is none."""
    for _ in range(_NUM_CHECKPOINTS):
        wrong = _compare(random) or _compare_blocks(random)
        if wrong:
            return f"weights: {wrong}"
    return ""


def _compare(random: Random) -> str:
    places = [_place(random, f"w{index}") for index in range(random.randint(1, 4))]
    # At most one thing is wrong with a checkpoint.
    fault = random.choice(("", "", "known", "type", "type", "type", "shape", "lacks", "other", "twice"))
    victim = random.choice(places)
    tensors = [(place.name, _tensor(random, place, fault if place is victim else "")) for place in places]
    partly, only_check = random.random() < 0.4, random.random() < 0.4
    if partly or fault == "lacks":
        tensors = [one for one in tensors if random.random() < 0.8]
    if fault in ("twice", "known", "other"):
        tensors += tensors[:1] if fault == "twice" else [(fault, torch.zeros(1))]
    random.shuffle(tensors)
    is_twice = fault == "twice" and len(tensors) > 1
    done: list[str] = []
    slots = {place.name: _slot(place, done) for place in places}
    by_name = dict(tensors)
    filled = {place.group for place in places if place.name in by_name}
    lacking = [place for place in places if place.name not in by_name]
    may = (
        not is_twice
        and fault != "other"
        and all(place.takes(by_name[place.name]) for place in places if place.name in by_name)
        and (partly or not lacking)
        and not any(place.group in filled for place in lacking if place.group)
    )
    about = f"{[(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]} for {places}"
    if _refuses(slots, tensors, partly, only_check) == may:
        return f"{about} are {'refused' if may else 'taken'} (partly {partly}, only checked {only_check})"
    if not may and not only_check:
        return ""  # what was loaded before is not undone
    for place in places:
        tensor = None if only_check else by_name.get(place.name)
        right = (
            torch.full_like(place.param.float(), _BEFORE) if tensor is None else place.part(tensor).float()
        )
        if not torch.equal(place.param.float(), right):
            return f"{place.name} becomes {place.param} in place of {right} from {about}"
    told = sorted(place.name for place in places if place.name in by_name and not place.quantises)
    if sorted(done) != ([] if only_check else told):
        return f"{done} are told that they have been loaded, and {told} have been: {about}"
    return ""


def _compare_blocks(random: Random) -> str:
    """Whether each 128 rows of a matrix in FP8 have one scale, as some products need: its parts may begin anywhere, and
    their rows are reordered in groups."""
    sizes = [random.choice((64, 128, 192, 256)) for _ in range(random.randint(1, 3))]
    stored = Fp8Format(sum(sizes), 8, QuantConfig(method="fp8", kind="fp8", scales="block"), torch.float32)
    moved, begin, is_aligned = random.choice((0, 0, 32, 64, 96, 128)), 0, True
    for size in sizes:
        start = random.choice((0, 0, 64, 128))
        full = -(-(start + size) // (moved or 1)) * (moved or 1)
        slot = stored.slots("w", slice(begin, begin + size), (full, 8), 0, start)["w.weight_scale_inv"]
        assert slot.convert is not None, "rows have scales of their own"
        rows = slot.convert(torch.arange(-(-full // 128)).float().unsqueeze(1) + begin)
        if moved:
            rows = rows.unflatten(0, (-1, moved)).flip(1).flatten(0, 1)
        slot.dest.copy_(rows[start : start + size])
        is_aligned &= begin % 128 == start % 128 == 0
        begin += size
    if moved:
        stored.moves_rows(moved)
    is_whole = all(bool((block == block[0]).all()) for block in stored.scales.split(128))
    must = is_aligned and (not moved or 128 % moved == 0)
    if must > stored.has_whole_blocks or stored.has_whole_blocks > is_whole:
        return f"parts of {sizes} rows have whole blocks: {stored.has_whole_blocks}, {is_whole} is right"
    return ""


def _place(random: Random, name: str) -> _Place:
    if random.random() < 0.2:
        return _Place(name, torch.full((1,), _BEFORE, dtype=torch.float32), (), 0, 0, False, False, 0)
    quantises, turns, dim = random.random() < 0.2, random.random() < 0.3, random.randrange(2)
    whole = [random.randint(1, 3), random.randint(1, 3)]
    part = list(whole)
    part[dim] = random.randint(1, whole[dim])
    start = random.randint(0, whole[dim] - part[dim])
    param = torch.full(part, _BEFORE).to(torch.uint8 if quantises else random.choice(_TYPES))
    shape = tuple(reversed(whole)) if turns else tuple(whole)
    return _Place(name, param, shape, dim, start, turns, quantises, random.choice((0, 0, 1)))


def _slot(place: _Place, done: list[str]) -> WeightSlot:
    convert = torch.t if place.turns else None
    together = ("a", "b")[place.group] if place.group else None
    if place.quantises:
        return QuantizingSlot(
            dest=place.param,
            full_shape=place.shape,
            dim=place.dim,
            parts=((place.param, place.start),),
            round=lambda matrix: (matrix,),
            plain_dtype=torch.float32,
            convert=convert,
            together=together,
        )
    return WeightSlot(
        place.param,
        place.shape,
        place.dim,
        place.start,
        convert if place.shape else torch.flatten,
        lambda: done.append(place.name),
        together,
    )


def _tensor(random: Random, place: _Place, fault: str) -> torch.Tensor:
    wrong = fault == "type"
    types = [one for one in _TYPES if place.takes(torch.empty(place.shape, dtype=one)) != wrong]
    shape = list(place.shape) or random.choice(([], [1], [1, 1]))
    if fault == "shape":
        shape[-1:] = [shape[-1] + 1 if shape else 2]
    numbers = [random.randrange(8) for _ in range(int(torch.Size(shape).numel()))]
    return torch.tensor(numbers).reshape(shape).to(random.choice(types))


def _refuses(
    slots: WeightSlots, tensors: list[tuple[str, torch.Tensor]], partly: bool, only_check: bool
) -> bool:
    given = [(name, tensor.to("meta") if only_check else tensor) for name, tensor in tensors]
    try:
        fill_slots(slots, given, lambda name: name == "known", partly, only_check)
    except ValueError:
        return True
    return False
