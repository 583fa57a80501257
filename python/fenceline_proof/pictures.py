"""Requests with pictures, for the model of that name: some tokens of a scenario's prompts become pictures.

A token always becomes the same picture or its neighbour, which is nearly equal, so that prompts share nearly as much as
before, and some differ in pictures alone.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from msgspec import structs

from fenceline.images.image_input import DIGEST_NBYTES, ImageInput
from fenceline.ipc.io_struct import Message, TokenizedGenerateReq, UpdateWeightsReq, id_array
from fenceline_proof.script import Flags, FollowUp, Scenario
from fenceline_proof.tiny_model import PICTURE_SIDE, PLACEHOLDER, tiny_model_path, tiny_weights

PICTURES = "pictures"  # the model's name
FIRST_PICTURE = 57  # of the tokens that become pictures
_GRIDS = ((2, 2), (2, 2), (1, 3), (2, 3), (2, 3), (1, 1), (3, 1))
_NEIGHBOURS = {0: 1, 1: 0, 3: 4, 4: 3}  # of the same size
_MOST = max(rows * columns for rows, columns in _GRIDS)


def _picture(number: int) -> ImageInput:
    """Of two neighbours with one size the digests differ in the last byte, and the pixels in one embedding's."""
    rows, columns = _GRIDS[number]
    height, width = rows * PICTURE_SIDE, columns * PICTURE_SIDE
    pixels = bytearray(Random(rows * 8 + columns).randbytes(3 * height * width))
    pixels[: 3 * PICTURE_SIDE] = bytes([40 * number]) * 3 * PICTURE_SIDE
    digest = bytes(DIGEST_NBYTES - 1) + bytes([number])
    return ImageInput(pixels=bytes(pixels), height=height, width=width, grid=(rows, columns), digest=digest)


_PICTURES = [_picture(number) for number in range(len(_GRIDS))]


def _illustrated(request: TokenizedGenerateReq, exchanged: bool) -> TokenizedGenerateReq:
    """``request`` with pictures; with ``exchanged`` they are the neighbours of what they are otherwise."""
    tokens: list[int] = []
    images = []
    for token in request.input_ids:
        if token >= FIRST_PICTURE:
            number = token - FIRST_PICTURE
            image = _PICTURES[_NEIGHBOURS.get(number, number) if exchanged else number]
            images.append(structs.replace(image, offset=len(tokens)))
            tokens += [PLACEHOLDER] * image.num_tokens
        else:
            tokens.append(token)
    return structs.replace(request, input_ids=id_array(tokens), images=images)


def with_pictures(scenario: Scenario, random: Random) -> Scenario:
    """The same of the model with pictures, and in most runs so few rows for embeddings that none stay long. A draft's
    row of a picture's last token may be computed from the next picture's first ones."""

    def changed(message: Message) -> Message:
        if isinstance(message, UpdateWeightsReq) and message.model_path:
            number = int(message.weight_version or 0)
            path = tiny_weights(number, PICTURES) if number else tiny_model_path(PICTURES)
            return structs.replace(message, model_path=path)
        if isinstance(message, TokenizedGenerateReq):
            return _illustrated(message, random.random() < 0.4)
        return message

    def followed(turn: FollowUp) -> FollowUp:
        words = _illustrated(structs.replace(turn.request, input_ids=id_array(list(turn.words))), False)
        return replace(turn, words=tuple(words.input_ids), request=structs.replace(turn.request, images=words.images))

    arrivals = tuple(replace(arrival, message=changed(arrival.message)) for arrival in scenario.arrivals)
    turns = {rid: followed(turn) for rid, turn in scenario.follow_ups.items()}
    rows = random.choice((_MOST, _MOST + 2, 2 * _MOST, 64))
    if str(scenario.flags.get("draft", "")).startswith(("EAGLE", "NEXTN")):
        rows = max(rows, 2 * _MOST + 2)
    flags: Flags = {**scenario.flags, "model": PICTURES, "embedding_rows": rows}
    return replace(scenario, flags=flags, arrivals=arrivals, follow_ups=turns)
