"""LLM: the part of vLLM's offline class that most programs use, over :class:`fenceline.Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fenceline.entrypoints.engine import Answer, Conversation, Engine, Params, are_several, params_dict, video_objects

# A text, {"prompt": text} or {"prompt_token_ids": ids}; both may have "multi_modal_data": {"image": one or several,
# "video": one or several}.
Prompt = str | Mapping[str, Any]
_MAX_TOKENS = 16  # vLLM's default


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt; ``finish_reason`` is stop, length or abort."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, ``n`` of them. ``prompt`` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """vLLM's offline class for programs that were written for it. Other keyword arguments are this server's flags.
    Differences: parameters that are not given are those of the model's generation_config.json, and other servers' flags
    are refused with what they are called here."""

    def __init__(
        self, model: str, *, tokenizer: str | None = None, seed: int | None = None, **server_args: Any
    ) -> None:
        self.llm_engine = Engine(model, tokenizer_path=tokenizer, random_seed=seed, **server_args)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or several, in their order; ``use_tqdm`` has no effect. Raises like
        :meth:`fenceline.Engine.generate`."""
        several = prompts if isinstance(prompts, (list, tuple)) else [prompts]
        texts: list[str] = []
        ids: list[list[int]] = []
        images: list[Any] = []
        videos: list[Any] = []
        for prompt in several:
            data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
            image = None if data is None else data.get("image")
            images.append(list(image) if isinstance(image, (list, tuple)) else image)
            video = video_objects(None if data is None else data.get("video"))
            videos.append(video if video is None or isinstance(video, list) else [video])
            if isinstance(prompt, str):
                texts.append(prompt)
            elif isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
                ids.append(prompt["prompt_token_ids"])
            elif isinstance(prompt, Mapping) and "prompt" in prompt:
                texts.append(prompt["prompt"])
            else:
                raise ValueError(
                    f'a prompt is a text, {{"prompt": text}} or {{"prompt_token_ids": ids}}, not {prompt!r}'
                )
        if texts and ids:
            raise ValueError("give either texts or token ids as prompts, not both in one call")
        answers = self.llm_engine.generate(
            texts or None,
            _limited(sampling_params),
            input_ids=ids or None,
            image_data=images,
            video_data=videos,
            return_prompt_token_ids=True,
        )
        num_samples = len(answers) // len(several)
        return [
            RequestOutput(
                answers[start]["meta_info"]["id"],
                texts[index] if texts else None,
                answers[start]["prompt_token_ids"],
                [_completion(*numbered) for numbered in enumerate(answers[start : start + num_samples])],
            )
            for index, start in enumerate(range(0, len(answers), num_samples))
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Write the assistant's next message of one conversation or several. ``options`` are other fields of
        /v1/chat/completions (``tools``, ``chat_template_kwargs``, ``continue_final_message``, ...). Texts are as the
        model writes them, thinking and calls of tools included."""
        conversations: Any = messages if are_several(messages) else [messages]
        answers = self.llm_engine.chat(
            conversations,
            _limited(sampling_params),
            **{"separate_reasoning": False, "return_token_ids": True, **options},
        )
        return [self._chat_output(answer) for answer in answers]

    def _chat_output(self, answer: Answer) -> RequestOutput:
        choices = answer["choices"]
        outputs = [
            CompletionOutput(one["index"], self._raw_text(one), one["token_ids"], one["finish_reason"])
            for one in choices
        ]
        return RequestOutput(answer["id"], None, choices[0]["prompt_token_ids"], outputs)

    def _raw_text(self, choice: Mapping[str, Any]) -> str:
        message = choice["message"]
        if message.get("tool_calls"):  # were taken out of the text
            return str(self.get_tokenizer().decode(choice["token_ids"], skip_special_tokens=True))
        return message["content"] or ""

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it."""
        return self.llm_engine.get_tokenizer()


def _limited(params: Params | Sequence[Params] | None) -> dict[str, Any] | list[dict[str, Any]]:
    """``params`` with vLLM's default of ``max_tokens``."""
    if isinstance(params, (list, tuple)):
        return [{"max_new_tokens": _MAX_TOKENS, **params_dict(one)} for one in params]
    return {"max_new_tokens": _MAX_TOKENS, **params_dict(params)}


def _completion(index: int, answer: Answer) -> CompletionOutput:
    reason = answer["meta_info"]["finish_reason"]["type"]
    return CompletionOutput(index, answer["text"], answer["output_ids"], reason)
