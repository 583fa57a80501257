"""ImageRules: which images a server takes, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from fenceline.images.prepare import ImageSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """``placeholder``: the token that stands for an image in a prompt, and for each of its embeddings. ``max_images``:
    of one request. ``domains``: hosts from which images are fetched, in lower case."""

    settings: ImageSettings
    placeholder: int
    max_images: int
    domains: frozenset[str]
