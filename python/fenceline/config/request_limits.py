"""How much one request may ask for. docs/use/api.md lists these figures.

Ordinary requests stay far below these limits. They exist because one request must never stop the others: they bound the
cost of parsing a request, checking it and sending it between the processes. The length of a prompt is limited by the
context length, not here.
"""

from __future__ import annotations

MAX_REQUESTS = 4096  # of one body: prompts times n; texts of /tokenize, lists of /detokenize
MAX_SAMPLES = 128  # n
# Limits of one body; the context length holds instead if it is larger.
MAX_BODY_TOKENS = 4 << 20  # in all prompts, counted once for each sample
MAX_TOKENIZE_TOKENS = 1 << 20  # in all texts of /tokenize, or all lists of /detokenize
# Logprobs of all prompts and samples of a body: positions times (1 + top_logprobs_num + token_ids_logprob).
MAX_BODY_LOGPROBS = 4 << 20
MAX_BODY_VALUES = 1 << 20  # JSON values; or twice the context length
MAX_BODY_OBJECTS = 1 << 18  # Python objects that a large body becomes, long lists of token ids counted as one
MAX_BODY_FIELDS = 256  # unknown ones at the top level
MAX_TEMPLATE_BYTES = 64 << 10  # chat_template_kwargs as JSON
MAX_TOOLS = 128  # of a conversation
MAX_TOOLS_BYTES = 256 << 10  # all of them as JSON
MAX_ARGUMENT_VALUES = 1 << 16  # JSON values in the arguments of all tool calls of a conversation
MAX_MESSAGES = 4096  # of a conversation; and of their parts, all together
MAX_TEXT_CHARS = 16 << 20  # of one text: building it, and freeing it, stops all threads of a process
MAX_IMAGE_CHARS = (32 << 20) // 3 * 4 + 256  # of an image of 32 MiB in a data: URL; building it takes milliseconds
MAX_BODY_IMAGES = 256  # of all prompts, those of a prompt's samples counted once
MAX_BODY_FRAMES = 1024  # of all videos of all prompts
# Of the images of a prompt, decoded. They are sent in one message, which may have a GiB, and copied some times, during
# which other requests wait.
MAX_PROMPT_PIXEL_BYTES = 256 << 20
MAX_UNBROKEN_CHARS = 1 << 18  # of a text without space or punctuation after a letter or digit
MAX_RID_BYTES = 256  # ids of past requests are kept for a while, by the ten thousand
# A prompt may have at most this many characters for each token of the context, unless the tokenizer says how many
# characters its longest token has.
PRESUMED_TOKEN_CHARS = 1024

# Limits of one request. These values are sent with each of a body's prompts and samples.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all its stop strings together
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_TOP_LOGPROBS = 128  # alternatives at each position
MAX_TOKEN_IDS_LOGPROB = 128  # named tokens whose logprobs each position reports
MAX_EXTRA_KEY_BYTES = 512  # the cache's namespace
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1  # as far as messages can carry it
