"""Images for requests, made from a seed as data: URLs; nothing is downloaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from itertools import cycle

import numpy as np

from fenceline.benchmarking.args import BenchArgs, image_size


def image_urls(args: BenchArgs, rng: np.random.Generator) -> Iterator[str]:
    """Images without end: each a new one, drawn from ``rng``, or with --image-pool those of the pool in turn, which
    depend on --seed alone."""
    if args.image_pool is None:
        while True:
            yield _url(args, rng)
    of_pool = np.random.default_rng([args.seed, 2])
    yield from cycle([_url(args, of_pool) for _ in range(args.image_pool)])


def _url(args: BenchArgs, rng: np.random.Generator) -> str:
    from PIL import Image

    height, width = image_size(args.image_resolution)
    if args.image_content == "blank":
        image = Image.new("RGB", (width, height), "white")
    else:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.save(file, args.image_format)
    return f"data:image/{args.image_format};base64,{base64.b64encode(file.getvalue()).decode()}"
