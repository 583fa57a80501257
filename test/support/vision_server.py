"""A random model that reads images, with a tokenizer and a chat template: what a server needs."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from vision_cases import BEGIN, END, IMAGE, VIDEO, save_vision_checkpoint

# As Qwen2.5-VL's, shortened.
QWEN_VL = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' \
in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' or 'video' in content %}\
<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}\
{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# As Gemma 3's, which writes the first token of an image alone.
GEMMA = QWEN_VL.replace("<|image_pad|><|vision_end|>", "").replace("'video'", "'film'")


def save_vision_model(
    directory: Path, name: str = "Qwen2_5_VLForConditionalGeneration"
) -> transformers.PreTrainedModel:
    """The model of this architecture in ``directory``. A token is a character of ASCII."""
    model = save_vision_checkpoint(name, directory)
    characters = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    backend = RustTokenizer(models.BPE(vocab={text: number for number, text in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>"}
    special |= {len(characters): "<|im_start|>", len(characters) + 1: "<|im_end|>"}
    names = [special.get(number, f"<|{number}|>") for number in range(len(characters), max(special) + 1)]
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.save(str(directory / "tokenizer.json"))
    template = GEMMA if model.config.model_type == "gemma3" else QWEN_VL
    names = {"boi_token": special[BEGIN], "image_token": special[IMAGE], "eoi_token": special[END]}
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **names}))
    return model
