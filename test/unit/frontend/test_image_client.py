"""The front end's images: what is refused before it costs anything, and what the process that decodes makes of them."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from frontend_bench import Bench
from hostile_images import data_url, hostile_images, oriented, picture, png, written

from fenceline.config.image_rules import ImageRules
from fenceline.frontend import image_client, job_process, request_prepare
from fenceline.frontend.image_client import ImageClient
from fenceline.frontend.request_types import (
    GenerateInput,
    ImageDetail,
    ImageSource,
    RequestError,
    VideoSource,
    expand_samples,
)
from fenceline.images.decode import DecodeJob, decode
from fenceline.images.header import MAX_BYTES
from fenceline.images.positions import position_delta
from fenceline.images.prepare import ImageSettings, prepare
from fenceline.images.video import FrameTimes, VideoForm
from fenceline.ipc.forked_jobs import JobResult

SETTINGS = ImageSettings(
    patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280, mean=(0.5,) * 3, std=(0.5,) * 3
)
RULES = ImageRules(settings=SETTINGS, placeholder=7, max_images=3, domains=frozenset())
GOOD = written(picture(40, 30), "PNG")
SEGMENT = b"\xff\xe1\xff\xff" + bytes((1 << 16) - 3)


def source(url: str | bytes, detail: ImageDetail = "auto", place: str = "messages[1].content[0]") -> ImageSource:
    return ImageSource(place, url if isinstance(url, str) else data_url(url), detail)


@pytest.fixture
async def client() -> AsyncIterator[ImageClient]:
    made = ImageClient(RULES)
    yield made
    made.close()


async def _refusal(client: ImageClient, *images: ImageSource | VideoSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        client.check(images)
        client.least(images)
        await client.prepare(images)
    return caught.value


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,AAA", "it is not base64"),
        ("data:image/png;base64,", "not a PNG"),
        ("data:image/png,AAAA", "its URL must be data:image/TYPE;base64"),
        ("data:text/html;base64,AAAA", "its URL must be data:image/TYPE;base64"),
        ("file:///etc/passwd", "its URL must be data:image/TYPE;base64"),
        ("ftp://example.org/a.png", "its URL must be data:image/TYPE;base64"),
        ("http://example.org/a.png", "this server fetches no images: send it as a data: URL"),
        ("HTTPS://example.org/a.png", "--allowed-media-domains"),
        ("/etc/passwd", "it is not base64"),
        (data_url(b"x" * 600), "not a PNG, JPEG, WebP or GIF image"),
        (data_url(png(10_000, 10_000)), "10000x10000 pixels, at most"),
        (data_url(png(201, 1)), "more than 200 times"),
        (data_url(b"\xff\xd8" + SEGMENT * 5), "its file is broken: it does not say how large"),
        (data_url(GOOD[:-60]), "its PNG file is broken"),
    ],
    ids=lambda value: value[:40],
)
async def test_what_is_refused_names_the_image_by_its_place(client: ImageClient, url: str, reason: str) -> None:
    error = await _refusal(client, source(GOOD, place="messages[0].content[4]"), source(url))
    assert error.status == 400 and error.param == "messages[1].content[0]"
    assert error.message.startswith("messages[1].content[0]: ") and reason in error.message


async def test_models_of_text_and_requests_of_many_images_refuse_them() -> None:
    text_only, client = ImageClient(None), ImageClient(RULES)
    text_only.check([])
    assert "this model reads text only" in (await _refusal(text_only, source(GOOD))).message
    many = [source(GOOD, place=f"image_data[{index}]") for index in range(4)]
    client.check(many[:3])
    assert (await _refusal(client, *many)).message.startswith("image_data[3]: the request has 4 images, this server")


def test_bombs_cost_microseconds() -> None:
    client = ImageClient(RULES)
    bombs = [png(10_000, 10_000, bytes(10_001), times=10_000), b"\xff\xd8" + b"\xff\xe1\x00\x02" * 3_000_000]
    for bomb, most_s in zip(map(source, bombs), (0.001, 0.01), strict=True):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            client.check([bomb])
            try:
                client.least([bomb])
            except RequestError:
                pass
            times.append(time.perf_counter() - begin)
        assert min(times) < most_s


async def test_images_are_prepared_in_their_order(client: ImageClient) -> None:
    large = written(picture(900, 700), "JPEG")
    files = [GOOD, large, oriented(6, 120, 50)]
    images = await client.prepare([source(data) for data in files])
    assert images == [prepare(decode(data), SETTINGS) for data in files]
    sources = [source(data) for data in files]
    assert client.least(sources).num_tokens == sum(image.num_tokens for image in images)
    [low, bare] = await client.prepare([source(large, "low"), source(base64.b64encode(large).decode())])
    assert bare == images[1] and low.num_tokens < images[1].num_tokens
    assert 200_000 < low.width * low.height <= 512 * 512


def test_files_of_more_than_32_mib_are_refused() -> None:
    client = ImageClient(RULES)
    client.check([source("A" * (MAX_BYTES // 3 * 4))])
    with pytest.raises(RequestError, match="its file has more than 32 MiB"):
        client.check([source("A" * (MAX_BYTES // 3 * 4 + 8))])


async def test_a_request_narrows_the_size_of_its_images(client: ImageClient) -> None:
    image = source(written(picture(900, 700), "JPEG"))
    narrow, wide = replace(image, max_pixels=100_000), replace(image, max_pixels=1 << 30, detail="low")
    small, large = await client.prepare([narrow, wide])
    assert 80_000 < small.width * small.height <= 100_000 and large.width * large.height > 600_000
    assert client.least([narrow]).num_tokens == small.num_tokens
    error = await _refusal(client, replace(image, max_pixels=5))
    assert error.message.startswith("messages[1].content[0]: min_pixels 3136 and max_pixels 5 are no range")


class _Held:
    """A process that answers when it is told to, with an error unless it has ``data``."""

    def __init__(self, data: bytes = b"") -> None:
        self.go, self.num_running, self.data = asyncio.Event(), 0, data

    async def started(self) -> bytes:
        return b""

    async def run(self, make: Callable[[int], DecodeJob]) -> JobResult:
        self.num_running += 1
        await self.go.wait()
        self.num_running -= 1
        error = "" if self.data else "it is broken"
        return JobResult(make(1).id, data=self.data, error=error, is_refused=bool(error))


async def test_images_of_clients_that_left_keep_their_turns(
    client: ImageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise more and more would be with the process, which would be killed for not answering."""
    held = _Held()
    monkeypatch.setattr(client._process, "get", lambda: held)
    for _ in range(3):
        leaving = [asyncio.create_task(client.prepare([source(GOOD)])) for _ in range(20)]
        for _ in range(20):
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        _, waiting = await asyncio.wait(leaving, timeout=60)
        assert not waiting, "nobody waits for what is still being decoded"
        assert held.num_running == client._num_children
    held.go.set()
    assert "it is broken" in (await _refusal(client, source(GOOD))).message


async def test_an_image_that_is_sent_again_is_not_decoded_again(
    client: ImageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn of a conversation sends all of its images. Other limits of its pixels make another image of it."""
    large = written(picture(900, 700), "JPEG")
    [first] = await client.prepare([source(large)])
    broken = _Held()
    broken.go.set()
    monkeypatch.setattr(client._process, "get", lambda: broken)
    [again] = await client.prepare([source(large, place="messages[2].content[1]")])
    assert again.pixels is first.pixels
    for other in (source(large, "low"), source(data_url(large)[:-8])):
        assert "it is broken" in (await _refusal(client, other)).message


async def test_the_latest_images_are_kept_decoded(client: ImageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [source(written(picture(56 + side, 56 + side), "PNG")) for side in range(3)]  # of one size when resized
    images = await client.prepare(files[:2])
    monkeypatch.setattr(image_client, "MAX_KEPT_BYTES", 2 * len(images[0].pixels))
    assert (await client.prepare(files[:1]))[0].pixels is images[0].pixels
    await client.prepare(files[2:])
    first, second = await client.prepare(files[:2])
    assert first.pixels is images[0].pixels and second == images[1] and second.pixels is not images[1].pixels


@pytest.mark.long
async def test_the_largest_image_fits_into_the_limits(client: ImageClient) -> None:
    row = b"\0" + b"\x0a\x14\x1e\xff" * 8192
    [made] = await client.prepare([source(png(8192, 8192, row, color=6, times=8192))])
    assert made.num_tokens == SETTINGS.num_tokens(8192, 8192)


async def test_a_decoder_that_is_killed_costs_its_request_alone(
    client: ImageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_process, "FIRST_PAUSE_S", 0.0)
    await client.prepare([source(GOOD)])
    process: Any = client._process.get()
    os.kill(process._process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(client.prepare([source(written(picture(30, 30), "PNG"))]))
    await asyncio.sleep(0)
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="the image-decoder process ended; try again") as caught:
        await waiting
    assert caught.value.status == 503
    assert len(await client.prepare([source(GOOD)])) == 1


async def test_hostile_images_are_no_server_errors_and_nobody_waits(client: ImageClient) -> None:
    """The event loop, on which all requests are served, is never kept by one for long."""
    longest = 0.0

    async def neighbour() -> None:
        nonlocal longest
        while True:
            begin = time.thread_time()  # of this thread: whatever else the machine does
            await asyncio.sleep(0.0005)
            longest = max(longest, time.thread_time() - begin)

    async def ask(data: bytes) -> bool:
        image = source(data)
        try:
            client.check([image])
            client.least([image])
            [made] = await client.prepare([image])
        except RequestError as error:
            assert error.status == 400, error.message
            return False
        assert len(made.pixels) == 3 * made.width * made.height
        return True

    beside = asyncio.create_task(neighbour())
    files = list(hostile_images(100, seed=1))
    found = [await asyncio.gather(*map(ask, files[start : start + 10])) for start in range(0, len(files), 10)]
    beside.cancel()
    assert 10 < sum(map(sum, found)) < 90
    assert longest < 0.1


async def test_requests_beyond_the_queue_are_told_to_come_later(
    client: ImageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenceline.frontend.image_client.MAX_WAITING", 1)
    error = await _refusal(client, source(GOOD), source(GOOD))
    assert error.status == 503 and "wait to be decoded" in error.message
    assert len(await client.prepare([source(GOOD)])) == 1


async def test_domains_are_named_by_the_error() -> None:
    client = ImageClient(replace(RULES, domains=frozenset(["images.example.org"])))
    url = "http://example.org/a.png"
    client.check([source(url)])
    assert client.least([source(url)]).num_tokens == 1
    assert "--allowed-media-domains does not name" in (await _refusal(client, source(url))).message


# --- videos


FORM = VideoForm(
    settings=replace(SETTINGS, max_pixels=100_000, group_size=2), placeholder=9, written="<v>", group="<{}><v>",
    tokens_per_second=2.0,
)  # fmt: skip
VIDEO_RULES = replace(RULES, video=FORM, max_videos=2, max_frames=4)


@pytest.fixture
async def films() -> AsyncIterator[ImageClient]:
    made = ImageClient(VIDEO_RULES)
    yield made
    made.close()


def video(*files: bytes | str, times: FrameTimes = FrameTimes(), place: str = "messages[0].content[0]") -> VideoSource:
    frames = [source(file, place=f"{place}.video[{index}]") for index, file in enumerate(files)]
    return VideoSource(place, tuple(frames), times)


async def test_frames_become_groups_in_their_order(films: ImageClient) -> None:
    """Beside an image of the same file, which is prepared with limits of its own."""
    files = [written(picture(400, 300, seed=seed), "JPEG") for seed in range(3)]
    asked = [source(files[0]), video(*files, times=FrameTimes(1.0))]
    image, *groups = await films.prepare(asked)
    frames = [prepare(decode(data), FORM.settings, 3) for data in files]
    assert image == prepare(decode(files[0]), SETTINGS)
    assert groups == FORM.groups(frames, FrameTimes(1.0)) and [one.moment for one in groups] == [0, 4]
    assert groups[1].pixels == frames[2].pixels * 2 and image.num_tokens > groups[0].num_tokens
    assert films.least(asked).num_tokens == image.num_tokens + sum(one.num_tokens for one in groups)


@pytest.mark.parametrize(
    ("files", "place", "reason"),
    [
        (
            [GOOD, written(picture(40, 31), "PNG")],
            "video[1]",
            "its 40x31 pixels are not the 40x30 of the frames before",
        ),
        ([oriented(6, 50, 30), oriented(1, 50, 30)], "video[1]", "pixels are not the"),
        ([GOOD, GOOD[:-60]], "video[1]", "its PNG file is broken"),
        ([GOOD, b"x" * 600], "video[1]", "not a PNG, JPEG, WebP or GIF image"),
        ([png(10_000, 10_000)], "video[0]", "10000x10000 pixels, at most"),
        ([GOOD] * 5, "video[4]", "the video has 5 frames, this server takes 4 at most"),
        (["http://a.org/a.png"], "video[0]", "this server fetches no images"),
    ],
)
async def test_a_frame_that_is_refused_is_named_by_its_place(
    films: ImageClient, files: list[bytes | str], place: str, reason: str
) -> None:
    error = await _refusal(films, source(GOOD), video(*files))
    assert error.status == 400 and error.param == f"messages[0].content[0].{place}"
    assert error.message.startswith(f"messages[0].content[0].{place}: ") and reason in error.message


async def test_hostile_frames_are_no_server_errors(films: ImageClient) -> None:
    """Among frames that are none, and alone."""
    found = []
    for data in hostile_images(60, seed=4):
        for one in (video(data), video(GOOD, data, GOOD)):
            try:
                films.check([one])
                films.least([one])
                groups = await films.prepare([one])
            except RequestError as error:
                assert error.status == 400 and str(error.param).startswith("messages[0].content[0].video["), (
                    error.message
                )
                found.append(False)
            else:
                found.append(all(len(each.pixels) == 6 * each.width * each.height for each in groups))
    assert 5 < sum(found) < 100


def test_many_frames_are_looked_at_in_little_time(films: ImageClient) -> None:
    large = written(picture(300, 200), "PNG")
    one = video(*[large] * 4)
    costs = []
    for _ in range(20):
        begin = time.thread_time()
        films.least([one])
        costs.append(time.thread_time() - begin)
    assert min(costs) < 4 * 0.0003, "so that the 1,024 frames of a body do not keep others waiting"


async def test_videos_that_a_server_does_not_take(films: ImageClient, client: ImageClient) -> None:
    assert "this model reads no videos: send frames as images" in (await _refusal(client, video(GOOD))).message
    error = await _refusal(films, video(GOOD), video(GOOD), video(GOOD, place="video_data[2]"))
    assert error.message.startswith("video_data[2]: the request has 3 videos, this server takes 2 at most")


@pytest.fixture
async def reads_videos() -> AsyncIterator[Bench]:
    """The texts of the form are ordinary ones, each of two tokens at least."""
    tokenizer = Bench().manager.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("<v>", False)
    made = Bench(images=replace(VIDEO_RULES, video=replace(FORM, placeholder=ids[1])))
    yield made
    made.manager.shutdown()


async def test_a_placeholder_of_a_video_becomes_one_of_each_group(reads_videos: Bench) -> None:
    """Of a text as if it had been written so, and the same of token ids."""
    manager, small = reads_videos.manager, written(picture(28, 56), "PNG")
    assert manager.tokenizer is not None
    encode = partial(manager.tokenizer.encode, add_special_tokens=False)
    film = video(small, small, small, times=FrameTimes(1.0))
    size = prepare(decode(small), FORM.settings, 3).num_tokens
    text = GenerateInput(text="a<v>b", images=[film], add_special_tokens=False, rid="text")
    ids = GenerateInput(input_ids=encode("a<v>b"), images=[film], rid="ids")
    await manager.submit_many([*expand_samples(text, 2), ids])
    first, sample, other = reads_videos.link.requests()
    shown = list(encode("a<0.5><v><2.0><v>b"))
    placeholder = encode("<v>")[1]
    expected = [id for token in shown for id in ([token] * size if token == placeholder else [token])]
    assert first.input_ids.tolist() == expected and sample.input_ids is first.input_ids
    assert other.input_ids.tolist()[1:-1] == expected[1:-1]
    assert [image.moment for image in first.images] == [0, 4]
    for wrong, reason in (("ab", "0 video placeholders and the request 1 videos"), ("<v><v>", "2 video placeholders")):
        for inp in (GenerateInput(text=wrong, images=[film]), GenerateInput(input_ids=encode(wrong), images=[film])):
            with pytest.raises(RequestError, match=reason) as caught:
                await manager.submit(inp)
            assert caught.value.status == 400 and caught.value.param == film.place
    with pytest.raises(RequestError, match="1 video placeholders and the request 0 videos"):
        await manager.submit(GenerateInput(text="a<v>"))


async def test_frames_that_are_far_apart_have_too_many_positions(
    reads_videos: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = written(picture(28, 56), "PNG")
    slow = video(small, small, small, times=FrameTimes(stamps=(0.0, 1.0, 40.0)))
    with monkeypatch.context() as without_decoding:
        without_decoding.setattr(ImageClient, "_decoded", None)
        with pytest.raises(RequestError, match="so far apart in time that it has .. positions or more, at most 63"):
            await reads_videos.manager.submit(GenerateInput(text="<v>", images=[slow]))
    close = replace(slow, times=FrameTimes(stamps=(0.0, 1.0, 30.0)))
    with pytest.raises(RequestError, match="so far apart in time that it has .. positions or more, at most 63"):
        await reads_videos.manager.submit(GenerateInput(text="bcd<v>", images=[close]))
    near = replace(slow, times=FrameTimes(stamps=(0.0, 1.0, 20.0)))
    await reads_videos.manager.submit(GenerateInput(text="<v>", images=[near]))
    [message] = reads_videos.link.requests()
    assert message.sampling_params.max_new_tokens == 64 - len(message.input_ids) - position_delta(message.images)


async def test_frames_of_a_body_are_limited(reads_videos: Bench) -> None:
    inputs = [GenerateInput(text="<v>", images=[video(*[GOOD] * 4)], rid=f"r{index}") for index in range(257)]
    with pytest.raises(RequestError, match="the prompts have 1028 frames of videos together, at most 1024"):
        await reads_videos.manager.submit_many(inputs)


# --- among requests


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(images=RULES)
    yield made
    made.manager.shutdown()


def asked(*ids: int, images: list[ImageSource], rid: str = "r") -> GenerateInput:
    return GenerateInput(input_ids=ids, images=images, rid=rid)


async def test_placeholders_become_as_many_as_an_image_has_tokens(bench: Bench) -> None:
    files = [GOOD, written(picture(100, 60), "JPEG")]
    inputs = expand_samples(asked(1, 7, 2, 7, 3, images=list(map(source, files))), 2)
    other = asked(5, 7, images=[source(files[1])], rid="s")
    await bench.manager.submit_many([*inputs, other, GenerateInput(input_ids=[4], rid="t")])
    first, sample, alone, text = bench.link.requests()
    small, large = (prepare(decode(data), SETTINGS) for data in files)
    assert first.input_ids.tolist() == [1, *[7] * small.num_tokens, 2, *[7] * large.num_tokens, 3]
    assert [(image.offset, image.digest) for image in first.images] == [
        (1, small.digest),
        (2 + small.num_tokens, large.digest),
    ]
    assert sample.input_ids is first.input_ids, "the link sends what samples share once"
    assert alone.input_ids.tolist() == [5, *[7] * large.num_tokens] and alone.images[0].pixels == large.pixels
    assert text.input_ids.tolist() == [4] and text.images == []


async def test_images_that_samples_share_are_checked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(ImageClient, "check", lambda _, images: checked.append(len(images)))
    await bench.manager.submit_many(expand_samples(asked(7, images=[source(GOOD)]), 9))
    assert checked == [1] and len(bench.link.requests()) == 9


async def test_pixels_of_requests_in_flight_are_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 37 KB has 38 MB of pixels, which its request keeps until it ends."""
    num_bytes = len(prepare(decode(GOOD), SETTINGS).pixels)
    monkeypatch.setattr(image_client, "MAX_PIXEL_BYTES", 2 * num_bytes)
    first = await bench.manager.submit_many(expand_samples(asked(7, images=[source(GOOD)]), 2))
    done = asyncio.gather(
        *(bench.manager.submit(asked(7, images=[source(GOOD)], rid=rid)) for rid in "st"), return_exceptions=True
    )
    second, refused = await done
    assert isinstance(refused, RequestError) and refused.status == 503 and "too much memory" in refused.message
    await bench.manager.submit(GenerateInput(input_ids=[4], rid="text"))
    for stream in (*first.streams, second):
        stream.close()
    await bench.manager.submit(asked(7, 7, images=[source(GOOD)] * 2, rid="u"))


@pytest.mark.parametrize("abort", [{"rid": "body"}, {"rid": "bo", "prefix": True}, {"abort_all": True}])
async def test_an_abort_ends_the_wait_for_images(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, abort: dict[str, Any]
) -> None:
    held = _Held()
    monkeypatch.setattr(bench.manager._images._process, "get", lambda: held)
    body = replace(asked(7, images=[source(GOOD)]), rid="body")
    waiting = asyncio.create_task(bench.manager.submit_many(expand_samples(body, 2)))
    while not held.num_running and not waiting.done():
        await asyncio.sleep(0)
    bench.manager.abort(**abort)
    bench.manager.abort(**abort)
    answers = await (await waiting).collect()
    assert held.num_running == 1, "the image is still being decoded"
    assert [answer.finish_reason and answer.finish_reason.type for answer in answers] == ["abort"] * 2
    assert not bench.link.requests() and not bench.manager.num_active and not bench.manager.is_active("body")
    held.go.set()


async def test_an_abort_leaves_others_of_the_body_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(msgspec.msgpack.encode(prepare(decode(GOOD), SETTINGS)))
    monkeypatch.setattr(bench.manager._images._process, "get", lambda: held)
    inputs = [asked(7, images=[source(GOOD)], rid=rid) for rid in ("one", "two")]
    waiting = asyncio.create_task(bench.manager.submit_many(inputs))
    while not held.num_running and not waiting.done():
        await asyncio.sleep(0)
    bench.manager.abort("one")
    bench.manager.abort("tw")
    for _ in range(9):
        await asyncio.sleep(0)
    assert not waiting.done()
    held.go.set()
    first, second = (await waiting).streams
    chunk = first.take()
    assert chunk is not None and chunk.finish_reason is not None and chunk.finish_reason.type == "abort"
    assert [request.rid for request in bench.link.requests()] == ["two"] and second.take() is None
    first.close()
    assert bench.manager.is_active("two")


async def test_more_pixels_than_a_message_takes_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the files' headers say: nothing is decoded. A body of several prompts may have more than one of them."""
    monkeypatch.setattr(ImageClient, "_decoded", None)
    num_bytes = SETTINGS.token_bytes * SETTINGS.num_tokens(40, 30)
    monkeypatch.setattr(request_prepare, "MAX_PROMPT_PIXEL_BYTES", 2 * num_bytes)
    with pytest.raises(RequestError, match="at most .* are allowed: send fewer images, or limit max_pixels") as caught:
        await bench.manager.submit(asked(7, 7, 7, images=[source(GOOD)] * 3))
    assert caught.value.status == 400 and caught.value.param == "messages[1].content[0]"
    monkeypatch.setattr(image_client, "MAX_PIXEL_BYTES", 3 * num_bytes)
    pairs = [asked(7, 7, images=[source(GOOD)] * 2, rid=rid) for rid in "rs"]
    with pytest.raises(RequestError, match="send several bodies") as caught:
        await bench.manager.submit_many(pairs)
    assert caught.value.status == 400 and not bench.manager._images._num_bytes


async def test_prompts_without_images_are_not_looked_through_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body has millions of tokens, and the event loop has others to serve."""
    monkeypatch.setattr("fenceline.frontend.tokenizer_manager.expand_placeholders", None)
    await bench.manager.submit_many([GenerateInput(input_ids=[4, 5], rid="r"), GenerateInput(input_ids=[6], rid="s")])
    assert [request.input_ids.tolist() for request in bench.link.requests()] == [[4, 5], [6]]


async def test_the_tokenizer_gets_its_own_text_of_an_image() -> None:
    """As Gemma 3's does, whose chat template writes only the token that begins one."""
    bench = Bench(images=RULES)
    assert bench.manager.tokenizer is not None
    pool = bench.manager.tokenizer
    placeholder, begin = next(
        (number, text) for number in range(20, 200) if pool.encode(text := pool.decode([number])) == [number]
    )
    rules = replace(RULES, placeholder=placeholder, written=("<start>", begin))
    bench.manager.shutdown()
    bench = Bench(images=rules)
    texts = GenerateInput(text="<start>", images=[source(GOOD)])
    await bench.manager.submit_many([*expand_samples(texts, 2), GenerateInput(text="<start>", rid="text")])
    first, sample, text = bench.link.requests()
    assert set(first.input_ids) == {placeholder} and sample.input_ids is first.input_ids
    assert placeholder not in text.input_ids
    assert set((await bench.manager.tokenize(["<start>"], images=[source(GOOD)]))[0]) == {placeholder}
    bench.manager.shutdown()


@pytest.mark.parametrize(("ids", "num_images"), [((1, 7), 0), ((1,), 1), ((7, 7), 1), ((7,), 2)])
async def test_each_placeholder_has_its_image(bench: Bench, ids: tuple[int, ...], num_images: int) -> None:
    with pytest.raises(
        RequestError, match=f"has {ids.count(7)} image placeholders and the request {num_images} images"
    ):
        await bench.manager.submit(asked(*ids, images=[source(GOOD)] * num_images))
    assert bench.link.requests() == []


async def test_tokens_of_images_count_before_they_are_decoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageClient, "prepare", None)
    with pytest.raises(RequestError, match="the prompt has 1028 tokens, this server takes at most 63") as caught:
        await bench.manager.submit(asked(*range(10, 30), 7, images=[source(png(1000, 780))]))
    assert caught.value.code == "context_length_exceeded"


async def test_a_body_has_a_limited_number_of_images(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_prepare, "MAX_BODY_IMAGES", 3)
    inputs = [asked(7, 7, images=[source(GOOD)] * 2, rid=f"{index}") for index in range(2)]
    with pytest.raises(RequestError, match="have 4 images together, at most 3 are allowed"):
        await bench.manager.submit_many(inputs)
