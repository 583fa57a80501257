"""Where images stand in the bodies of each route, and those that Python programs hand over."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import orjson
import pytest
from hostile_images import data_url, picture
from PIL import Image

from fenceline.entrypoints.anthropic import protocol as anthropic
from fenceline.entrypoints.engine import _body, _chat_body
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_body import VideoData, parse_generate
from fenceline.entrypoints.openai.parsing import chat_completion, parse_body, parse_model
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.responses_protocol import RULES, ResponsesBody, chat_fields, input_messages
from fenceline.entrypoints.openai.serving_chat import render_chat
from fenceline.entrypoints.openai.serving_responses import ResponseStore
from fenceline.frontend.request_types import ImageSource, RequestError, VideoSource
from fenceline.images.decode import decode, from_base64
from fenceline.images.video import FrameTimes

URL, OTHER = "data:image/png;base64,AAAA", "data:image/jpeg;base64,BBBB"
TEXT = {"type": "text", "text": "See"}
UNKNOWN = UnknownFields(strict=True)


def places(body: ChatBody) -> list[tuple[str, str, str]]:
    return [(one.place, one.url, one.detail) for one in body.images() if isinstance(one, ImageSource)]


def chat(*contents: object) -> ChatBody:
    messages = [{"role": "user", "content": content} for content in contents]
    return parse_body(ChatBody, orjson.dumps({"messages": messages}), UNKNOWN)


def test_images_of_a_chat_completion() -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    body = chat("Hi", [TEXT, image], [{"type": "image_url", "image_url": {"url": OTHER}}])
    assert places(body) == [("messages[1].content[1]", URL, "low"), ("messages[2].content[0]", OTHER, "auto")]
    assert [message.text for message in body.messages] == ["Hi", "See", ""]


def test_images_are_not_looked_for_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has millions of characters."""
    monkeypatch.setattr(anthropic, "_is_image", None)
    message = anthropic.InputMessage(role="assistant", content="Well")
    assert message.content == "Well"


def test_images_of_a_response() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "high"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": OTHER}]},
        {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": URL}]},
    ]
    body = parse_model(ResponsesBody, RULES, orjson.dumps({"input": items}), UNKNOWN)
    made = chat_completion(chat_fields(body, []))
    found = [
        ("input[0].content[0]", URL, "high"),
        ("input[2].output[0]", OTHER, "auto"),
        ("input[3].content[1]", URL, "auto"),
    ]
    assert places(made) == found
    assert made.messages[2].role == "tool" and made.messages[3].text == "See"
    # A later request refers to the stored conversation.
    store = ResponseStore()
    store.add({"id": "resp_1", "output": []}, None, input_messages(body.input))
    later = chat_completion(chat_fields(body, store.get("resp_1").conversation()))
    assert [url for _, url, _ in places(later)] == [URL, OTHER, URL] * 2
    assert places(later)[0][0] == "messages[0].content[0]" and places(later)[3:] == found


def test_images_of_anthropic_s_messages() -> None:
    def image(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [TEXT, image("AAAA")]}
    fetched = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    messages = [
        {"role": "user", "content": [image("BBBB"), TEXT]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [result, fetched]},
    ]
    raw = orjson.dumps({"messages": messages, "max_tokens": 1, "system": "Be brief"})
    body = parse_model(anthropic.MessagesBody, anthropic.RULES[anthropic.MessagesBody], raw, UNKNOWN)
    made = chat_completion(anthropic.chat_fields(body))
    assert places(made) == [
        ("messages[0].content[0]", "data:image/png;base64,BBBB", "auto"),
        ("messages[2].content[0].content[1]", URL, "auto"),
        ("messages[2].content[1]", "https://example.org/a.png", "auto"),
    ]
    assert [message.role for message in made.messages] == ["system", "user", "assistant", "tool", "user"]
    assert made.messages[3].text == "Error: See"


def test_templates_get_no_urls() -> None:
    shown: list[object] = []

    class Template:
        has_tools = False

        def render(self, messages: list[object], **_: object) -> str:
            shown.extend(messages)
            return ""

    render_chat(Template(), chat([TEXT, {"type": "image_url", "image_url": {"url": URL}}]))  # type: ignore[arg-type]
    assert shown == [{"role": "user", "content": [TEXT, {"type": "image"}]}]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, r"\[1\] is an image without its URL"),
        ({"type": "image_url", "image_url": {}}, "an image without its URL"),
        ({"type": "image_url", "image_url": {"url": ""}}, "an image without its URL"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "fine"}}, "detail is not auto, low, high"),
        ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'; this server reads text, images"),
        (
            {"type": "video_url", "video_url": {"url": URL}},
            "a video that is no list of frames, and video files are not",
        ),
        ({"type": "video", "video": "https://a.org/a.mp4"}, "video files are not decoded here: send its frames, as in"),
        ({"type": "video", "video": []}, "a video without frames"),
        ({"type": "video", "video": [URL, 3]}, "a video whose frame 1 is not the URL of an image"),
        ({"type": "video", "video": [URL], "fps": 0}, "a video whose fps is not a number above 0"),
        ({"type": "video", "video": [URL], "fps": "fast"}, "a video whose fps is not a number above 0"),
        ({"type": "video", "video": [URL], "fps": 10**18}, "a video whose fps is not a number above 0"),
        (
            {"type": "video", "video": [URL], "timestamps": [1, 2]},
            "a video whose timestamps are not a list of 1 numbers",
        ),
        ({"type": "video", "video": [URL] * 2, "timestamps": [2, 1]}, "a video whose timestamps do not ascend"),
        ({"type": "video", "video": [URL], "timestamps": [-1]}, "a video whose timestamps are not seconds"),
        ({"type": "video", "video": [URL], "fps": 1, "timestamps": [1]}, "a video with both fps and timestamps"),
    ],
)
def test_wrong_parts_are_named(part: dict[str, object], reason: str) -> None:
    with pytest.raises(Exception, match=r"messages\[0\].content \[1\] is.*" + reason.removeprefix(r"\[1\] is ")):
        chat([TEXT, part])


def films(body: ChatBody) -> list[tuple[str, list[str], FrameTimes]]:
    videos = [one for one in body.images() if isinstance(one, VideoSource)]
    for video in videos:
        assert [frame.place for frame in video.frames] == [
            f"{video.place}.video[{i}]" for i in range(len(video.frames))
        ]
    return [(video.place, [frame.url for frame in video.frames], video.times) for video in videos]


def test_videos_of_a_chat_completion() -> None:
    video = {"type": "video", "video": [URL, OTHER], "fps": 4, "max_pixels": 5000}
    together = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,BBBB,CCCC"}}
    stamped = {"type": "video", "video": [URL, OTHER], "timestamps": [0.5, 7]}
    body = chat([TEXT, video], [together, stamped, {"type": "video", "video": [URL], "sample_fps": "1"}])
    assert films(body) == [
        ("messages[0].content[1]", [URL, OTHER], FrameTimes(4.0)),
        ("messages[1].content[0]", ["AAAA", "BBBB", "CCCC"], FrameTimes()),
        ("messages[1].content[1]", [URL, OTHER], FrameTimes(stamps=(0.5, 7.0))),
        ("messages[1].content[2]", [URL], FrameTimes(1.0)),
    ]
    [first, *_] = body.images()
    assert isinstance(first, VideoSource) and {frame.max_pixels for frame in first.frames} == {5000}


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "video", "video": [URL] * 1025}],
        [{"type": "video_url", "video_url": "data:video/jpeg;base64," + "," * 1024}],
        [
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "," * 512}},
            {"type": "video", "video": [URL] * 512},
        ],
    ],
)
def test_frames_of_a_chat_are_counted_before_they_are_made(parts: list[object]) -> None:
    with pytest.raises(RequestError, match="has 1025 frames of videos, at most 1024 are allowed"):
        chat([TEXT], parts)


def test_routes_without_videos_refuse_them() -> None:
    video = {"type": "video", "video": [URL]}
    for part in (video, {"type": "input_video", "video_url": URL}):
        raw = orjson.dumps({"input": [{"role": "user", "content": [part]}]})
        with pytest.raises(RequestError, match=r"input \[0\] has a part that is neither text nor an image") as caught:
            chat_completion(chat_fields(parse_model(ResponsesBody, RULES, raw, UNKNOWN), []))
        assert caught.value.status == 400
    raw = orjson.dumps({"messages": [{"role": "user", "content": [video]}], "max_tokens": 1})
    with pytest.raises(RequestError, match="messages.*'video'") as caught:
        parse_model(anthropic.MessagesBody, anthropic.RULES[anthropic.MessagesBody], raw, UNKNOWN)
    assert caught.value.status == 400


def test_programs_hand_over_frames() -> None:
    frames = np.stack([np.asarray(picture(9, 5, seed=seed)) for seed in range(3)])
    pictures = [Image.fromarray(frame) for frame in frames]
    parts = [{"type": "video", "video": one, "fps": 1.0} for one in (frames, pictures, list(frames))]
    for _, urls, times in films(_chat_body([{"role": "user", "content": parts}], None, {})):
        assert (np.stack(list(map(_pixels, urls))) == frames).all() and times == FrameTimes(1.0)
    for given, shape in ((frames, 3), (pictures, 3), ([frames[:1], None], [1]), ([{"video": pictures, "fps": 1}], [3])):
        body = _body(["a"], None, None, False, {"video_data": given})
        found = body.video_data if isinstance(body.video_data, list) else [body.video_data]
        counts = [len(one.video) for one in found if isinstance(one, VideoData)]
        assert counts == (shape if isinstance(shape, list) else [shape])


def _pixels(url: str) -> np.ndarray:
    return np.asarray(decode(from_base64(url.rpartition(",")[2])))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "I;16"])
def test_programs_hand_over_images_of_pillow(mode: str) -> None:
    image = picture(9, 5, mode)
    body = _chat_body([{"role": "user", "content": [{"type": "image", "image": image}, TEXT]}], None, {})
    [found] = body.images()
    assert found.place == "messages[0].content[0]"
    expected = np.asarray(image) >> 8 if mode == "I;16" else np.asarray(image.convert("RGB"))
    assert (_pixels(found.url) == (expected[..., None] if mode == "I;16" else expected)).all()


def test_programs_hand_over_arrays_and_urls() -> None:
    array = np.asarray(picture(9, 5))
    parts = [
        {"type": "image_url", "image_url": {"url": array}},
        {"type": "image_pil", "image_pil": Image.fromarray(array)},
    ]
    body = _chat_body([{"role": "user", "content": [*parts, {"type": "image", "image": URL}]}], None, {})
    assert [(_pixels(image.url) == array).all() for image in body.images()[:2]] == [True, True]
    assert body.images()[2].url == URL
    native = _body(["a", "b"], None, None, False, {"image_data": [array, [Image.fromarray(array), None]]})
    assert isinstance(native.image_data, list) and (_pixels(str(native.image_data[0])) == array).all()


@pytest.mark.parametrize("array", [np.zeros((3, 3), np.float32), np.zeros((2, 3, 5), np.uint8), np.zeros(9, np.uint8)])
def test_other_arrays_are_no_images(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"an image is an array of uint8 \[height, width, 3\], not"):
        _body("a", None, None, False, {"image_data": array})
    with pytest.raises(ValueError, match="set is neither JSON nor an image"):
        _body("a", None, None, False, {"image_data": {1}})


def test_a_large_image_comes_through_the_process_that_parses_large_bodies() -> None:
    from fenceline.entrypoints.body_parser import _pickled, _Unpickler

    noise = io.BytesIO(np.random.default_rng(0).bytes(20 << 20)).getvalue()
    body = chat([{"type": "image_url", "image_url": {"url": data_url(noise)}}])
    assert _Unpickler(*_pickled(body)).load() == body


def test_too_many_images_are_refused_by_their_number() -> None:
    def parsed(*images: object) -> object:
        body = {"text": ["a"] * len(images), "image_data": images}
        return parse_generate(orjson.dumps(body), UNKNOWN).image_data

    assert parsed(*["AAAA", ["AAAA", None]] * 128, *[None, [None], []] * 99)
    with pytest.raises(RequestError, match="have 257 images together"):
        parsed(*["AAAA", ["AAAA", None]] * 128, ["AAAA"])
